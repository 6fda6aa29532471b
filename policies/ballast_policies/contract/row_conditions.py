"""Conditions on the registry's rows of the names in a configuration.

The API server knows Ballast's own rows only; those of other distributions are checked in Python.
"""

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from ballast_policies.contract.conditions import Condition, Field
from ballast_policies.registry import Registry


@dataclasses.dataclass(frozen=True, slots=True)
class RowFact(Condition):
    """Whether the registry's row of the name at ``path`` satisfies ``predicate``."""

    path: str
    registry: Registry[Any]
    predicate: Callable[[Any], bool]

    def holds(self, of: Any) -> bool:
        """Look the row up."""
        name = Field(self.path).value(of)
        return name is None or self.predicate(self.registry[name])

    def failing(self) -> tuple[str, ...]:
        """Ballast's own names whose rows do not satisfy it."""
        return tuple(name for name, row in self.registry.builtin.items() if not self.predicate(row))

    def fields(self) -> Iterator[str]:
        """The name's."""
        yield self.path


@dataclasses.dataclass(frozen=True, slots=True)
class ItemRows(Condition):
    """Whether the rows of the names in field ``item`` of all items of a list satisfy ``predicate``."""

    path: str
    item: str
    registry: Registry[Any]
    predicate: Callable[[Any], bool]

    def holds(self, of: Any) -> bool:
        """Look the rows up."""
        items = Field(self.path).value(of)
        return all(self.predicate(self.registry[getattr(item, self.item)]) for item in items)

    def failing(self) -> tuple[str, ...]:
        """Ballast's own names whose rows do not satisfy it."""
        return tuple(name for name, row in self.registry.builtin.items() if not self.predicate(row))

    def fields(self) -> Iterator[str]:
        """None: a list that is not set has no items."""
        return iter(())


def row(path: str, registry: Registry[Any], predicate: Callable[[Any], bool]) -> Condition:
    """Whether the row of the name at ``path`` satisfies ``predicate``."""
    return RowFact(path, registry, predicate)


def each_row(path: str, item: str, registry: Registry[Any], predicate: Callable[[Any], bool]) -> Condition:
    """Whether the rows of the names in field ``item`` of the list at ``path`` satisfy ``predicate``."""
    return ItemRows(path, item, registry, predicate)
