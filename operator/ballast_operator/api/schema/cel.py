"""Rules of the contract's configuration as CEL, which the API server evaluates on ``kubectl apply``."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from ballast_policies.contract.conditions import (
    AllOf,
    AnyOf,
    Arithmetic,
    AtDefaults,
    Comparison,
    Condition,
    Field,
    Items,
    Literal,
    Membership,
    Presence,
    Term,
    absent,
)
from ballast_policies.contract.row_conditions import ItemRows, RowFact
from ballast_policies.contract.rules import Rule, json_path


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """The object that a rule stands on, as the API server has it.

    Attributes:
        optional: whether the field at a dotted path, in Python's spelling, may be missing.
        typical: an object as most are; None: the parts of a rule keep their order.
        width: number of fields of the object at a dotted path, of ``self`` for the empty path; 0: no object.
        default: of the field at a dotted path; most objects leave out what is optional and at its default.
    """

    optional: Callable[[str], bool]
    typical: Any = None
    width: Callable[[str], int] = lambda path: 0
    default: Callable[[str], Any] = lambda path: None

    def present(self, path: str) -> bool:
        """Whether the typical object has the field."""
        parts, value = path.split("."), self.typical
        for count, name in enumerate(parts, 1):
            value, prefix = getattr(value, name), ".".join(parts[:count])
            if value in (None, ()) or (self.optional(prefix) and value == self.default(prefix)):
                return False
        return True

    def cost(self, path: str) -> int:
        """Properties that the API server looks at when it reads the field of the typical object.

        It builds a map of all properties of an object twice for each field that it finds there, once for each
        that it does not, and once for an object that it finds.
        """
        above, _, _ = path.rpartition(".")
        before = self.cost(above) if above else 0
        if above and not self.present(above):
            return before
        found = self.width(above) + self.width(path) if self.present(path) else 0
        return before + self.width(above) + found


def cel_rule(rule: Rule, shape: Shape) -> str | None:
    """The rule's condition over ``self``; None: CEL cannot express it.

    A rule holds where a field that it compares is not set, so those that may be missing are asked for.
    The order of the parts means nothing to CEL, which lets a true part decide whatever the others are, errors
    among them; it evaluates them from the left, so what makes most objects pass at least cost stands first.
    """
    if not isinstance(rule.condition, Condition):
        return None
    paths: dict[str, None] = {}
    for path in rule.condition.fields():
        parts = path.split(".")
        for count in range(1, len(parts) + 1):
            prefix = ".".join(parts[:count])
            if shape.optional(prefix):
                paths[prefix] = None
    disjuncts = list(_flat((rule.condition,)))
    paths |= dict.fromkeys(filter(None, (_section(part, shape) for part in disjuncts)))
    # Rules of one field that begin alike can be joined: the field's own object comes before others.
    own = rule.field.partition(".")[0]
    found: list[tuple[str, Condition]] = [
        (f"!has(self.{json_path(path)})", absent(path))
        for path in sorted(paths, key=lambda path: path != own)
    ]
    found += [(_condition(part, shape.optional, isinstance(part, AllOf)), part) for part in disjuncts]
    if shape.typical is not None:
        found.sort(key=lambda each: _rank(each[1], shape))
    return " || ".join(dict.fromkeys(text for text, _ in found))


def _section(condition: Condition, shape: Shape) -> str:
    """The object or list without which the condition holds, if that may be missing; empty: there is none."""
    match condition:
        case AtDefaults(leaves=leaves):
            sections = {path.partition(".")[0] for path, _ in leaves}
        case Items(path=path, negated=False) | ItemRows(path=path):
            sections = {path.partition(".")[0]}
        case _:
            return ""
    return "".join(sections) if len(sections) == 1 and shape.optional(*sections) else ""


def _rank(part: Condition, shape: Shape) -> tuple[bool, int]:
    """Sorts first what holds of the typical object and reads little."""
    if isinstance(part, Presence):
        passes = shape.present(part.path) is part.expected
    else:
        passes = part.holds(shape.typical) and all(map(shape.present, part.fields()))
    return not passes, sum(map(shape.cost, _read(part)))


def _read(condition: Condition) -> Iterator[str]:
    """Paths of all fields that it reads."""
    match condition:
        case AnyOf(parts=parts) | AllOf(parts=parts):
            for part in parts:
                yield from _read(part)
        case Presence(path=path) | Items(path=path) | ItemRows(path=path):
            yield path
        case AtDefaults(leaves=leaves):
            yield from (path for path, _ in leaves)
        case _:
            yield from condition.fields()


def cel_list(values: Iterable[Any]) -> str:
    """The values as a list in CEL."""
    return f"[{', '.join(literal(value) for value in values)}]"


def _condition(condition: Condition, optional: Callable[[str], bool], nested: bool) -> str:
    match condition:
        case Comparison(operator=operator, left=left, right=right):
            return f"{_term(left)} {operator} {_term(right)}"
        case Membership(term=term, names=names, negated=negated):
            text = f"{_term(term)} in {cel_list(names)}"
            return f"!({text})" if negated else text
        case RowFact(path=path):
            return f"!(self.{json_path(path)} in {cel_list(condition.failing())})"
        case Presence(path=path, expected=expected):
            return _has(path, optional) if expected else f"!{_has(path, optional)}"
        case Items(path=path, constant=constant, negated=True):
            text = f"{_has(path, optional)} && !self.{json_path(path)}.all(x, x == {literal(constant)})"
            return f"({text})" if nested else text
        case Items(path=path, constant=constant):
            text = f"!{_has(path, optional)} || self.{json_path(path)}.all(x, x == {literal(constant)})"
            return f"({text})" if nested else text
        case ItemRows(path=path, item=item):
            each = f"!(x.{json_path(item)} in {cel_list(condition.failing())})"
            text = f"!{_has(path, optional)} || self.{json_path(path)}.all(x, {each})"
            return f"({text})" if nested else text
        case AtDefaults(leaves=leaves):
            text = " && ".join(_at_default(path, default, optional) for path, default in leaves)
            return f"({text})"
        case AnyOf(parts=parts):
            text = " || ".join(_condition(part, optional, isinstance(part, AllOf)) for part in _flat(parts))
            return f"({text})" if nested else text
        case AllOf(parts=parts):
            text = " && ".join(_condition(part, optional, True) for part in parts)
            return f"({text})" if nested else text
    raise TypeError(f"CEL cannot express {condition!r}")


def _at_default(path: str, default: Any, optional: Callable[[str], bool]) -> str:
    value = f"self.{json_path(path)}"
    if default is None:
        return f"!{_has(path, optional)}"
    same = f"{value}.size() == 0" if default == () else f"{value} == {literal(default)}"
    has = _has(path, optional)
    return f"(!{has} || {same})" if has else same


def _flat(parts: tuple[Condition, ...]) -> Iterable[Condition]:
    for part in parts:
        if isinstance(part, AnyOf):
            yield from _flat(part.parts)
        else:
            yield part


def _has(path: str, optional: Callable[[str], bool]) -> str:
    """Whether the field is there; a part above it may be missing, too. Empty: it always is."""
    parts = path.split(".")
    prefixes = [".".join(parts[:count]) for count in range(1, len(parts) + 1)]
    asked = [f"has(self.{json_path(prefix)})" for prefix in prefixes if optional(prefix)]
    return f"({' && '.join(asked)})" if len(asked) > 1 else "".join(asked)


def _term(term: Term) -> str:
    match term:
        case Field(path=path):
            return f"self.{json_path(path)}"
        case Literal(constant=constant):
            return literal(constant)
        case Arithmetic(operator=operator, left=left, right=right):
            return f"{_term(left)} {operator} {_term(right)}"
    raise TypeError(f"CEL cannot express {term!r}")


def literal(value: Any) -> str:
    """The value in CEL."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)
