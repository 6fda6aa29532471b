"""``docs/api.md``: every field, condition and reason, from the models and their docstrings."""

import enum
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from ballast_policies.planning.balancers.registry import BALANCERS
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_policies.planning.schedules import trained_schedules

from ballast_operator.api.conditions import JobCondition, JobReason, JobState
from ballast_operator.api.policy_conditions import PolicyCondition, PolicyReason
from ballast_operator.api.schema.crd import RESOURCES, Resource, root_schema
from ballast_operator.api.schema.docstrings import member_docs

_HEAD = """<!-- Generated from the models in ballast_operator.api by `make generate`. Edit those. -->
# API reference: `ballast.dev/v1alpha1`

| kind | short name | scope | what |
|---|---|---|---|
{kinds}

`kubectl get ballast` lists both. `kubectl explain tj.spec` shows the same texts as this page.

An object that is wrong is refused when it is applied, with the field, the reason and what to change; so are
fields that exclude each other (`kubectl apply --dry-run=server` tries it).
What only the cluster can know (a GPU type that no pool has, overlapping pools, too many stages) is in
its conditions.
"""


_CONDITIONS = """## States, conditions and reasons

A reason is never renamed; a finer one extends it as a prefix. Events carry the same reasons.
Succeeded and Failed exclude each other. Programs should read conditions; `status.state` is for people.
"""

_AS_KUBERNETES = frozenset(
    f"template.spec.{field}"
    for field in ("containers[].env", "containers[].resources", "tolerations", "affinity")
)
"""Fields whose own fields are those of a Pod's, checked likewise."""
_WORDS: tuple[type[enum.StrEnum], ...] = (JobState, JobCondition, JobReason, PolicyCondition, PolicyReason)


def api_reference() -> str:
    """The page."""
    kinds = [
        (f"[`{r.kind}`](#{r.kind.lower()})", f"`{r.short_name}`", r.scope.lower(), _one_line(r.root.__doc__))
        for r in RESOURCES
    ]
    parts = [_HEAD.format(kinds="\n".join(f"| {' | '.join(row)} |" for row in kinds))]
    parts += [_kind(resource, root_schema(resource)) for resource in RESOURCES]
    parts += [
        "## Values\n",
        _names("Schedules", "planning.md#schedules", trained_schedules()),
        _names("Balancers", "planning.md#balancers", BALANCERS.builtin),
        _names("Dynamics", "trainer-changes.md#kinds-of-change", DYNAMICS.builtin),
    ]
    parts.append(_CONDITIONS)
    parts += [_enum(values) for values in _WORDS]
    return "\n".join(parts)


def _kind(resource: Resource, schema: dict[str, Any]) -> str:
    lines = [f"## {resource.kind}\n", f"{schema['description']}\n"]
    lines.append(f"### {resource.kind}.spec\n")
    for row in _rows(schema["properties"]["spec"], "", {}):
        values = f"{row.type}{row.range}" + (f"; {row.default}" if row.default else "")
        lines.append(_item(row.path, values, row.meaning))
    lines.append(f"\n### {resource.kind}.status\n")
    lines += [_item(row.path, row.type, row.meaning) for row in _rows(schema["properties"]["status"], "", {})]
    lines.append("")
    return "\n".join(lines)


def _item(path: str, values: str, meaning: str) -> str:
    return f"- `{path}`: {meaning}" if values == "object" else f"- `{path}` ({values}): {meaning}"


@dataclass(frozen=True)
class _Row:
    path: str
    type: str
    range: str
    default: str
    meaning: str


def _rows(schema: dict[str, Any], path: str, shown: dict[str, str]) -> Iterator[_Row]:
    """The fields below ``path``; an object whose fields are those of one in ``shown`` refers to it."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        if str(field.get("description", "")).startswith("Refused: "):
            continue
        here = f"{path}.{name}".lstrip(".")
        default = "required" if name in required else _default(field)
        nested, below = _nested(field, here)
        fields = json.dumps(nested.get("properties"))
        first = shown.setdefault(fields, below) if "properties" in nested else below
        meaning = _one_line(field.get("description"))
        ends = here in _AS_KUBERNETES
        if ends:
            meaning += " As in a Pod."
        elif first != below:
            meaning += f" Fields as of `{first}`."
        yield _Row(here, _type(field), _range(field), default, meaning)
        if first == below and not ends:
            yield from _rows(nested, below, shown)


def _nested(field: dict[str, Any], path: str) -> tuple[dict[str, Any], str]:
    """The object in a field, a list or a map, and the path of its fields."""
    if isinstance(field.get("items"), dict):
        return field["items"], f"{path}[]"
    if isinstance(field.get("additionalProperties"), dict):
        return field["additionalProperties"], f"{path}.*"
    return field, path


def _default(field: dict[str, Any]) -> str:
    if "default" not in field or field["default"] == {}:
        return ""
    return f"default `{json.dumps(field['default'])}`"


def _type(field: dict[str, Any]) -> str:
    if "enum" in field:
        return ", ".join(f"`{value}`" for value in field["enum"])
    if field["type"] == "array":
        return f"{_type(field['items'])}s"
    if field["type"] == "object":
        values = field.get("additionalProperties")
        return f"map to {_type(values)}" if isinstance(values, dict) else "object"
    if field.get("format") == "date-time":
        return "time"
    return str(field["type"])


def _range(field: dict[str, Any]) -> str:
    if field["type"] == "array":
        return _range(field["items"])
    low, high = field.get("minimum"), field.get("maximum")
    if low is None and high is None:
        return ""
    above = ">" if field.get("exclusiveMinimum") else "≥"
    if high is None or high >= 2**31 - 1:
        return f", {above}{low:g}"
    return f", >{low:g}, ≤{high:g}" if above == ">" else f", {low:g}-{high:g}"


def _names(title: str, page: str, names: Iterable[str]) -> str:
    return f"### {title}\n\n{', '.join(f'`{name}`' for name in names)}: [what each does]({page}).\n"


def _enum(values: type[enum.StrEnum]) -> str:
    lines = [f"### {values.__name__}\n", f"{_one_line(values.__doc__)}\n"]
    lines += [f"- `{name}`: {_one_line(text)}" for name, text in member_docs(values).items()]
    return "\n".join([*lines, ""])


def _one_line(text: str | None) -> str:
    # The models' docstrings mark code as reStructuredText does.
    return " ".join((text or "").split()).replace("``", "`")
