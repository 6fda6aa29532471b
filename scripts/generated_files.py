"""Files of the repository that are made from the operator's models and the rows of the registries.

Not part of the installed product; a test compares what is committed with what is made.
"""

import enum
import importlib.util
import json
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from ballast_operator.api.conditions import JobCondition, JobReason, JobState, PolicyCondition, PolicyReason
from ballast_operator.api.rbac import kueue_rules, operator_rules, page_rules, people_roles
from ballast_operator.api.schema.crd import RESOURCES, Resource, crd_files, root_schema, to_yaml
from ballast_operator.api.schema.model_schema import member_docs
from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.registry import POLICIES
from ballast_policies.allocation.solvers.methods import METHODS
from ballast_policies.planning.balancers.registry import BALANCERS
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_policies.planning.planners.registry import PLANNERS
from ballast_policies.planning.schedules.registry import DEFAULT_STAGES_PER_RANK, SCHEDULES, trained_schedules

ROOT = Path(__file__).resolve().parents[1]
"""Root of the repository."""

_CHART = "charts/ballast/files"
_HEADER = "# Generated from ballast_operator.api.rbac by `make generate`. Edit that.\n"

_API_HEAD = """<!-- Generated from the models in ballast_operator.api by `make generate`. Edit those. -->
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


def generated_files() -> Mapping[str, str]:
    """Path below the repository's root -> text."""
    files = {}
    for name, text in crd_files().items():
        files[f"crds/{name}"] = text
        files[f"{_CHART}/crds/{name}"] = text
    files[f"{_CHART}/rbac/operator-rules.yaml"] = _HEADER + to_yaml(operator_rules())
    files[f"{_CHART}/rbac/page-rules.yaml"] = _HEADER + to_yaml(page_rules())
    files[f"{_CHART}/rbac/kueue-rules.yaml"] = _HEADER + to_yaml(kueue_rules())
    files[f"{_CHART}/rbac/people-roles.yaml"] = _HEADER + to_yaml(people_roles())
    files["docs/api.md"] = api_reference()
    files["charts/ballast/README.md"] = chart_readme((ROOT / "charts/ballast/values.yaml").read_text())
    # Pages that people write, with tables that are made: name of the section -> text.
    for name, sections in {
        "docs/policies.md": {
            "policies": policies_table(),
            "specification": specification(),
            "methods": methods_table(),
        },
        "docs/planning.md": {
            "planners": planners_table(),
            "balancers": balancers_table(),
            "schedules": schedules_table(),
        },
        "docs/trainer-changes.md": {"dynamics": dynamics_table()},
    }.items():
        files[name] = with_sections((ROOT / name).read_text(), sections)
    return files


def with_sections(text: str, sections: Mapping[str, str]) -> str:
    """The page with the parts between its marks ``<!-- generated: NAME -->`` and ``<!-- end -->`` replaced.

    Raises:
        LookupError: the page lacks the marks of a section.
    """
    for name, content in sections.items():
        begin, end = f"<!-- generated: {name} -->\n\n", "\n\n<!-- end -->"
        before, found, rest = text.partition(begin)
        _, closed, after = rest.partition(end)
        if not (found and closed):
            raise LookupError(
                f"the page has no {begin.strip()} ... {end.strip()}. To fix: put them around it"
            )
        text = f"{before}{begin}{content}{end}{after}"
    return text


def api_reference() -> str:
    """The page."""
    kinds = [
        (f"[`{r.kind}`](#{r.kind.lower()})", f"`{r.short_name}`", r.scope.lower(), _one_line(r.root.__doc__))
        for r in RESOURCES
    ]
    parts = [_API_HEAD.format(kinds="\n".join(f"| {' | '.join(row)} |" for row in kinds))]
    shown: dict[str, str] = {}
    parts += [_kind(resource, root_schema(resource), shown) for resource in RESOURCES]
    parts += [
        "## Values\n",
        _names("Schedules", "planning.md#schedules", trained_schedules()),
        _names("Balancers", "planning.md#balancers", BALANCERS.builtin),
        _names("Dynamics", "trainer-changes.md#kinds-of-change", DYNAMICS.builtin),
    ]
    parts.append(_CONDITIONS)
    parts += [_enum(values) for values in _WORDS]
    return "\n".join(parts)


def _kind(resource: Resource, schema: dict[str, Any], shown: dict[str, str]) -> str:
    lines = [f"## {resource.kind}\n", f"{schema['description']}\n"]
    for part in ("spec", "status"):
        lines.append(f"### {resource.kind}.{part}\n")
        for row in _rows(schema["properties"][part], "", f"{resource.kind}.{part}.", shown):
            values = row.type if part == "status" else f"{row.type}{row.range}"
            default = row.default if part == "spec" else ""
            lines.append(_item(row.path, values + (f"; {default}" if default else ""), row.meaning))
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


def _rows(schema: dict[str, Any], path: str, part: str, shown: dict[str, str]) -> Iterator[_Row]:
    """The fields below ``path`` of ``part``; an object with the fields of one in ``shown`` refers to it."""
    required = schema.get("required", [])
    for name, field in schema.get("properties", {}).items():
        if str(field.get("description", "")).startswith("Refused: "):
            continue
        here = f"{path}.{name}".lstrip(".")
        default = "required" if name in required else _default(field)
        nested, below = _nested(field, here)
        fields = json.dumps(nested.get("properties"))
        first = shown.setdefault(fields, part + below) if "properties" in nested else part + below
        meaning = _one_line(field.get("description"))
        ends = here in _AS_KUBERNETES
        if ends:
            meaning += " As in a Pod."
        elif first != part + below:
            meaning += f" Fields as of `{first.removeprefix(part)}`."
        yield _Row(here, _type(field), _range(field), default, meaning)
        if first == part + below and not ends:
            yield from _rows(nested, below, part, shown)


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


_CHART_HEAD = """# Helm chart of Ballast

<!-- Generated from values.yaml by `make generate`. Edit the comments there. -->

Installs the operator with its custom resource definitions, permissions and admission policies:

```console
$ helm install ballast charts/ballast --namespace ballast-system --create-namespace
$ helm test ballast --namespace ballast-system
```

[Install on a cluster](../../docs/install.md) has images, the first steps, upgrades and removal.

A value that is not in this table is refused.

| value | default | what |
|---|---|---|
"""


def chart_readme(values: str) -> str:
    """The page for the text of ``values.yaml``: two spaces a level, comments above their key."""
    defaults = yaml.safe_load(values)
    keys = list(_keys(values))
    groups = {path[:depth] for path, _ in keys for depth in range(1, len(path))}
    rows = []
    for path, what in keys:
        default = "" if path in groups else f"`{json.dumps(_at(defaults, path))}`"
        if default or what:
            rows.append(f"| `{'.'.join(path)}` | {default} | {what} |\n")
    return _CHART_HEAD + "".join(rows)


def _keys(values: str) -> Iterator[tuple[tuple[str, ...], str]]:
    """Each key with the comment above it, in the file's order."""
    path: list[str] = []
    comment: list[str] = []
    for line in values.splitlines():
        text = line.strip()
        if not text:
            comment = []
        elif text.startswith("#"):
            comment.append(text.removeprefix("#").strip())
        elif not text.startswith("-"):
            depth = (len(line) - len(line.lstrip())) // 2
            path = [*path[:depth], text.partition(":")[0]]
            yield tuple(path), " ".join(comment).replace("|", "\\|")
            comment = []


def _at(defaults: object, path: tuple[str, ...]) -> object:
    for key in path:
        assert isinstance(defaults, dict)
        defaults = defaults[key]
    return defaults


def policies_table() -> str:
    """Table of the policies: program, inputs and proofs."""
    rows = []
    for name, policy in POLICIES.builtin.items():
        reads = ", ".join(field if " " in field else f"`{field}`" for field in Reads if field in policy.reads)
        proven = "proven" if policy.proves_gap else "none"
        elastic = "yes" if policy.takes_configurations else "no"
        rows.append((f"`{name}`", policy.summary, reads, policy.space_sharing.value, elastic, proven))
    return table(("policy", "problem", "reads", "shares", "elastic", "gap"), rows)


def specification() -> str:
    """The programs of the specification, read and not imported: cvxpy is a large module."""
    found = importlib.util.find_spec("ballast_policies.allocation.specification")
    assert found is not None
    assert found.origin is not None
    text = Path(found.origin).read_text()
    programs = text[text.index("\ndef ") : text.index("\ndef isolated(")]
    for left_out in (
        r'(?s)\n    """.*?"""(?=\n)',
        r": (ClusterView|np.ndarray|Sequence\[Any\]|Callable\[.*(?=, also))",
        r" -> .*(?=:\n)",
        r"\n    # .*",
    ):
        programs = re.sub(left_out, "", programs)
    return f"```python\n{programs.strip()}\n```"


def methods_table() -> str:
    """Table of the solvers' methods by program, with their fallbacks and what each saves."""
    rows = [
        (
            method.task.value,
            f"{method.name} (`{method.code}`)",
            method.when,
            method.otherwise or "",
            method.without,
        )
        for method in METHODS
    ]
    return table(("task", "method", "chosen for", "where it finds nothing", "without it"), rows)


def schedules_table() -> str:
    """Table of the trainer's schedules and their needs of a job."""
    rows = []
    for name, kind in SCHEDULES.builtin.items():
        if kind.trained:
            open_ = f"`stagesPerRank`, else {DEFAULT_STAGES_PER_RANK}"
            stages = open_ if kind.stages_per_rank is None else str(kind.stages_per_rank)
            rows.append(
                (
                    f"`{name}`",
                    kind.summary,
                    stages,
                    "no" if kind.asynchronous else "yes",
                    "equal rounds" if kind.equal_rounds else "any",
                    "yes" if kind.build_replicated is not None else "no",
                )
            )
    return table(("schedule", "meaning", "stages a rank", "flush", "microbatches", "replicas"), rows)


def balancers_table() -> str:
    """Table of the balancers and the limits that they respect."""
    rows = [
        (
            f"`{name}`",
            row.summary,
            ", ".join(sorted(row.schedules)) if row.schedules else "all",
            "yes" if row.balances_parameters else "no",
            "yes" if row.limits_memory else "no",
            "yes" if row.replicas else "no",
        )
        for name, row in BALANCERS.builtin.items()
    ]
    return table(("balancer", "meaning", "schedules", "`by: parameters`", "`memoryBytes`", "replicas"), rows)


def dynamics_table() -> str:
    """Table of the changes and their needs of a model and a job."""
    rows = [
        (
            f"`{name}`",
            case.summary,
            ", ".join(sorted(case.families)) or "all",
            "no" if case.inside_layers else "yes",
            "no" if case.compares_ranks else "yes",
            ", ".join(f"`{other}`" for other in sorted(case.excludes)),
        )
        for name, case in DYNAMICS.builtin.items()
    ]
    return table(("kind", "meaning", "models", "`parallelism.tensor`", "replicas", "not with"), rows)


def planners_table() -> str:
    """Table of the planners."""
    rows = [
        (
            f"`{name}`",
            row.summary,
            "yes" if row.simulates else "no",
        )
        for name, row in PLANNERS.builtin.items()
    ]
    return table(("planner", "plans", "`--sweep`, `--trace`, `--csv`, SVG"), rows)


def table(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Table in Markdown; a bar in a cell would end it."""
    columns = tuple(head)
    lines = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    lines += [f"| {' | '.join(cell.replace('|', '/') for cell in row)} |" for row in rows]
    return "\n".join(lines)
