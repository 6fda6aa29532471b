"""Rules of the contract's configuration as CEL, which the API server evaluates on ``kubectl apply``."""

from collections.abc import Callable, Iterable
from typing import Any

from ballast_policies.contract.conditions import (
    AllOf,
    AnyOf,
    Arithmetic,
    AtDefaults,
    Cel,
    Comparison,
    Condition,
    Field,
    Items,
    Literal,
    Membership,
    Presence,
    Term,
)
from ballast_policies.contract.row_conditions import ItemRows, RowFact
from ballast_policies.contract.rules import Rule, json_path


def cel_rule(rule: Rule, optional: Callable[[str], bool] = lambda path: False) -> str | None:
    """The rule's condition over ``self``; None: CEL cannot express it.

    A rule holds where a field that it compares is not set, so those that may be missing are asked for first.

    Args:
        rule: of the object ``self``.
        optional: whether the field at a dotted path, in Python's spelling, may be missing.
    """
    if isinstance(rule.condition, Cel):
        return rule.condition.expression
    if not isinstance(rule.condition, Condition):
        return None
    paths: set[str] = set()
    for path in rule.condition.fields():
        parts = path.split(".")
        prefixes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        paths.update(prefix for prefix in prefixes if optional(prefix))
    found = [f"!has(self.{json_path(path)})" for path in sorted(paths)]
    found += [_condition(part, optional, isinstance(part, AllOf)) for part in _flat((rule.condition,))]
    return " || ".join(dict.fromkeys(found))


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
