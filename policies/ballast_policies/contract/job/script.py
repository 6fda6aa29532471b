"""Jobs without a model, which run their template's own command: the fields that have no effect there."""

import dataclasses
import typing
from collections.abc import Iterator
from typing import Any

from ballast_policies.contract.conditions import AtDefaults, given
from ballast_policies.contract.errors import camel
from ballast_policies.contract.rules import Rule
from ballast_policies.contract.settings import Settings

KEPT = {"pipeline": ("min_stages", "max_stages"), "parallelism": ("gpus_per_pod",)}
"""Part -> fields of it that hold for every job: the fewest and the most ranks, and how many share a pod."""


def with_model_only(**parts: type | None) -> Iterator[Rule]:
    """For each part of a configuration, the rule that a job without a model leaves it at its defaults.

    What the API server has filled in cannot be told from what the user wrote, so a value that equals the
    default is allowed.

    Args:
        parts: field of the configuration -> its dataclass, ``tuple``, or None where its default is none.
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
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        inner = f"{path}.{field.name}"
        if field.name in KEPT.get(path, ()):
            continue
        if isinstance(hints[field.name], type) and issubclass(hints[field.name], Settings):
            yield from _leaves(inner, hints[field.name])
        else:
            factory = field.default_factory
            yield inner, field.default if factory is dataclasses.MISSING else factory()
