"""Conditions over the fields of a configuration, as values, and the rules that demand them.

``at("min_stages") <= at("max_stages")`` is not a truth value but the comparison itself.  Python evaluates it
on a configuration (:meth:`Condition.holds`); the operator writes the same as CEL for the API server
(``ballast_operator.api.schema.model_schema``).  A comparison with a field that is not set holds.

A name may stand for a row of a registry. The API server knows Ballast's own rows only; those of other
distributions are checked in Python.
"""

import dataclasses
import operator
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ballast_policies.contract.errors import Problem, camel
from ballast_policies.registry import Registry


class _Expression:
    """A term or a condition, whose parts are its fields as a dataclass."""

    def fields(self) -> Iterator[str]:
        """Paths of the fields that it compares: none of lists, nor of what may be absent."""
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            value = getattr(self, field.name)
            for part in value if isinstance(value, tuple) else (value,):
                if isinstance(part, _Expression):
                    yield from part.fields()


class Term(_Expression):
    """A number or a text of a configuration, or of arithmetic on such."""

    def __le__(self, other: Any) -> "Condition":
        return Comparison("<=", self, _term(other))

    def __lt__(self, other: Any) -> "Condition":
        return Comparison("<", self, _term(other))

    def __eq__(self, other: object) -> "Condition":  # type: ignore[override]
        return Comparison("==", self, _term(other))

    def __ne__(self, other: object) -> "Condition":  # type: ignore[override]
        return Comparison("!=", self, _term(other))

    def __mod__(self, other: Any) -> "Term":
        return Arithmetic("%", self, _term(other))

    def __mul__(self, other: Any) -> "Term":
        return Arithmetic("*", self, _term(other))

    __hash__ = object.__hash__

    def is_in(self, names: Iterable[Any]) -> "Condition":
        """Condition that the term is one of these."""
        return Membership(self, tuple(names))

    def is_not_in(self, names: Iterable[Any]) -> "Condition":
        """Condition that the term is none of these."""
        return Membership(self, tuple(names), negated=True)

    def value(self, of: Any) -> Any:
        """Value for a configuration; None: it reads a field that is not set."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Field(Term):
    """The field at the dotted ``path`` below what the rule is on, e.g. ``pipeline.max_stages``."""

    path: str

    def value(self, of: Any) -> Any:
        """The field, or None where it or a part above it is not set."""
        for name in self.path.split("."):
            of = None if of is None else getattr(of, name)
        return of

    def fields(self) -> Iterator[str]:
        """Its own path."""
        yield self.path


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Literal(Term):
    """A constant."""

    constant: Any

    def value(self, of: Any) -> Any:
        """The constant."""
        return self.constant


_FUNCTIONS: dict[str, Callable[[Any, Any], Any]] = {
    "%": operator.mod,
    "*": operator.mul,
    "<=": operator.le,
    "<": operator.lt,
    "==": operator.eq,
    "!=": operator.ne,
}


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Arithmetic(Term):
    """``left % right`` or ``left * right``."""

    operator: str
    left: Term
    right: Term

    def value(self, of: Any) -> Any:
        """The result."""
        left, right = self.left.value(of), self.right.value(of)
        return None if left is None or right is None else _FUNCTIONS[self.operator](left, right)


class Condition(_Expression):
    """Statement about a configuration, which holds or not."""

    def __or__(self, other: "Condition") -> "Condition":
        return AnyOf((self, other))

    def __and__(self, other: "Condition") -> "Condition":
        return AllOf((self, other))

    def holds(self, of: Any) -> bool:
        """True if it holds; comparisons with a field that is not set do."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, slots=True)
class Comparison(Condition):
    """``left <= right`` and the like."""

    operator: str
    left: Term
    right: Term

    def holds(self, of: Any) -> bool:
        """Compare."""
        left, right = self.left.value(of), self.right.value(of)
        return left is None or right is None or bool(_FUNCTIONS[self.operator](left, right))


@dataclasses.dataclass(frozen=True, slots=True)
class Membership(Condition):
    """A term is one of some names; ``negated``: none of them."""

    term: Term
    names: tuple[Any, ...]
    negated: bool = False

    def holds(self, of: Any) -> bool:
        """Look it up."""
        value = self.term.value(of)
        return value is None or (value in self.names) is not self.negated


@dataclasses.dataclass(frozen=True, slots=True)
class Presence(Condition):
    """A field is set (``expected``), or is not."""

    path: str
    expected: bool

    def holds(self, of: Any) -> bool:
        """Look."""
        return (Field(self.path).value(of) is not None) is self.expected


@dataclasses.dataclass(frozen=True, slots=True)
class _Parts(Condition):
    parts: tuple[Condition, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class AnyOf(_Parts):
    """One of the parts holds."""

    def holds(self, of: Any) -> bool:
        """True if one does."""
        return any(part.holds(of) for part in self.parts)


@dataclasses.dataclass(frozen=True, slots=True)
class AllOf(_Parts):
    """All parts hold."""

    def holds(self, of: Any) -> bool:
        """True if all do."""
        return all(part.holds(of) for part in self.parts)


@dataclasses.dataclass(frozen=True, slots=True)
class Items(Condition):
    """All items of a list are a constant (true of an empty list); ``negated``: not all of them are."""

    path: str
    constant: Any
    negated: bool = False

    def holds(self, of: Any) -> bool:
        """Compare each."""
        return all(item == self.constant for item in Field(self.path).value(of)) is not self.negated


@dataclasses.dataclass(frozen=True, slots=True)
class AtDefaults(Condition):
    """Every field has its default, or is not set; ``leaves``: (dotted path, default)."""

    leaves: tuple[tuple[str, Any], ...]

    def holds(self, of: Any) -> bool:
        """Compare each."""
        found = ((Field(path).value(of), default) for path, default in self.leaves)
        return all(value is None or value == default for value, default in found)


@dataclasses.dataclass(frozen=True, slots=True)
class Cel(Condition):
    """Statement that only CEL can express: of sizes, maps, and the object before an update.

    Attributes:
        expression: over ``self`` and ``oldSelf``.
        check: the same in Python; None: the API server alone can know.
    """

    expression: str
    check: Callable[[Any], bool] | None = None

    def holds(self, of: Any) -> bool:
        """True if Python's check holds."""
        return self.check is None or self.check(of)


at = Field


def given(path: str) -> Condition:
    """Condition that the field at ``path`` is set."""
    return Presence(path, True)


def absent(path: str) -> Condition:
    """Condition that the field at ``path`` is not set."""
    return Presence(path, False)


def _term(value: Any) -> Term:
    return value if isinstance(value, Term) else Literal(value)


@dataclasses.dataclass(frozen=True, slots=True)
class _OfRows(Condition):
    path: str
    registry: Registry[Any]
    predicate: Callable[[Any], bool]

    def failing(self) -> tuple[str, ...]:
        """Ballast's own names whose rows do not satisfy it."""
        return self.registry.own(lambda row: not self.predicate(row))


@dataclasses.dataclass(frozen=True, slots=True)
class RowFact(_OfRows):
    """The registry's row of the name at ``path`` satisfies ``predicate``."""

    def holds(self, of: Any) -> bool:
        """Look the row up."""
        name = Field(self.path).value(of)
        return name is None or self.predicate(self.registry[name])

    def fields(self) -> Iterator[str]:
        """The name's."""
        yield self.path


@dataclasses.dataclass(frozen=True, slots=True)
class ItemRows(_OfRows):
    """The rows of the names in field ``item`` of the list at ``path`` all satisfy ``predicate``."""

    item: str

    def holds(self, of: Any) -> bool:
        """Look the rows up."""
        items = Field(self.path).value(of)
        return all(self.predicate(self.registry[getattr(item, self.item)]) for item in items)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Requirement on several fields together.

    Attributes:
        condition: a :class:`Condition`, or a function where CEL cannot express it: then the API server does
            not check it, and the operator's condition reports it.
        field: path of the field to change, in Python's spelling, below the configuration the rule is on;
            empty: that as a whole.
        reason: what is wrong where it does not hold.
        fix: what to change.
        explain: the configuration -> ``reason`` with its values, where the condition does not tell them.
    """

    condition: Condition | Callable[[Any], bool]
    field: str
    reason: str
    fix: str
    explain: Callable[[Any], str] | None = None

    @property
    def path(self) -> str:
        """The field in JSON's spelling."""
        return json_path(self.field)

    @property
    def message(self) -> str:
        """Message for the API server, which adds no values."""
        return f"{self.reason}. To fix: {self.fix}"

    def problem(self, of: Any) -> Problem | None:
        """Problem of a configuration, with the values that the rule read; None: it holds."""
        holds = self.condition.holds if isinstance(self.condition, Condition) else self.condition
        if holds(of):
            return None
        if self.explain is not None or not isinstance(self.condition, Condition):
            reason = self.reason if self.explain is None else self.explain(of)
            return Problem(self.path, f"{reason}. To fix: {self.fix}")
        values = {json_path(path): at(path).value(of) for path in dict.fromkeys(self.condition.fields())}
        read = ", ".join(f"{path}: {value}" for path, value in values.items())
        return Problem(self.path, f"{self.reason}{f' ({read})' if read else ''}. To fix: {self.fix}")


def json_path(path: str) -> str:
    """A dotted path in JSON's spelling."""
    return ".".join(camel(name) for name in path.split("."))
