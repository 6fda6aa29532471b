"""Jobs without a model, which run their template's own command: the fields that have no effect there."""

from collections.abc import Iterator
from typing import Any

from ballast_policies.contract.conditions import AtDefaults, given
from ballast_policies.contract.errors import camel
from ballast_policies.contract.model import Settings
from ballast_policies.contract.rules import Rule

KEPT = {"pipeline": ("min_stages", "max_stages"), "parallelism": ("gpus_per_pod",)}
"""Part -> fields of it that hold for every job: the fewest and the most ranks, and how many share a pod."""


def with_model_only(**parts: type | None) -> Iterator[Rule]:
    """For each part of a configuration, the rule that a job without a model leaves it at its defaults.

    What the API server has filled in cannot be told from what the user wrote, so a value that equals the
    default is allowed.

    Args:
        parts: field of the configuration -> its class, ``tuple``, or None where its default is none.
    """
    for name, kind in parts.items():
        leaves = tuple(_leaves(name, kind))
        kept = KEPT.get(name, ())
        only = f", except {' and '.join(camel(field) for field in kept)}" if kept else ""
        yield Rule(
            condition=given("model") | AtDefaults(leaves),
            field=name,
            reason=f"a job without a model runs its template's own command, where {name} has no effect{only}",
            fix="leave it out, or name a model",
        )


def _leaves(path: str, kind: Any) -> Iterator[tuple[str, Any]]:
    """(dotted path, default) of every field of the part."""
    if not (isinstance(kind, type) and issubclass(kind, Settings)):
        yield path, None if kind is None else kind()
        return
    for name, field in kind.model_fields.items():
        inner, part = f"{path}.{name}", field.annotation
        if name in KEPT.get(path, ()):
            continue
        if isinstance(part, type) and issubclass(part, Settings):
            yield from _leaves(inner, part)
        else:
            yield inner, field.get_default(call_default_factory=True)
