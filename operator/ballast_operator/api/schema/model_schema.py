"""The JSON schema of a model, with what a CRD says beyond pydantic: rules, descriptions, what cannot change.

Types, defaults, bounds, descriptions and rules are read from the class: nothing is written twice.
"""

import ast
import collections
import functools
import inspect
import re
import textwrap
import types
import typing
from collections.abc import Callable, Iterable, Iterator
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
    ItemRows,
    Items,
    Literal,
    Membership,
    Presence,
    RowFact,
    Rule,
    Term,
    json_path,
)
from ballast_policies.contract.errors import camel
from ballast_policies.contract.model import InCluster, Keyed, Model, Named, Settings, mark_of
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue
from pydantic_core import core_schema

from ballast_operator.api.base import ApiModel, cel_list, immutable, literal, registered


@functools.cache
def field_docs(kind: Any) -> dict[str, str]:
    """Field of a dataclass -> the text under it; fields without one are left out."""
    return {name: text for name, text in _documented(kind).items() if text}


def member_docs(values: type[Any]) -> dict[str, str]:
    """Value of an enum -> the text under its member. Raises LookupError: a member has none."""
    documented = _documented(values)
    for name, text in documented.items():
        if not text:
            raise LookupError(f"{values.__name__}.{name} has no docstring. To fix: write one below it")
    return {values[name].value: text for name, text in documented.items()}


def _documented(kind: type[Any]) -> dict[str, str]:
    (definition,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(definition, ast.ClassDef)
    documented: dict[str, str] = {}
    for statement, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.Assign):
            target = statement.targets[0]
        elif isinstance(statement, ast.AnnAssign):
            target = statement.target
        else:
            continue
        if isinstance(target, ast.Name) and (isinstance(statement, ast.AnnAssign) or target.id != "RULES"):
            described = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            documented[target.id] = str(after.value.value) if described else ""  # type: ignore[union-attr]
    return documented


def cel_rule(rule: Rule, optional: Callable[[str], bool] = lambda path: False) -> str | None:
    """The rule's condition over ``self``; None: CEL cannot express it.

    A rule holds where a field that it compares is not set, so those that may be missing are asked for first.
    ``optional``: whether the field at a dotted path, in Python's spelling, may be missing.
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
        case Items(path=path, constant=constant):
            text = f"!{_has(path, optional)} || self.{json_path(path)}.all(x, x == {literal(constant)})"
        case ItemRows(path=path, item=item):
            each = f"!(x.{json_path(item)} in {cel_list(condition.failing())})"
            text = f"!{_has(path, optional)} || self.{json_path(path)}.all(x, {each})"
        case AtDefaults(leaves=leaves):
            text = " && ".join(_at_default(path, default, optional) for path, default in leaves)
            return f"({text})"
        case AnyOf(parts=parts):
            text = " || ".join(_condition(part, optional, isinstance(part, AllOf)) for part in _flat(parts))
        case AllOf(parts=parts):
            text = " && ".join(_condition(part, optional, True) for part in parts)
        case _:
            raise TypeError(f"CEL cannot express {condition!r}")
    return f"({text})" if nested else text


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
    """CEL that the field is there; a part above it may be missing, too. Empty: it always is."""
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


_RULES = "x-kubernetes-validations"
_WORTH_JOINING = 4
"""Rules that ask for one field first, from which they are one: fewer keep a path of their own."""


class CrdJsonSchema(GenerateJsonSchema):
    """pydantic's schema of models, each with its rules and descriptions."""

    def model_schema(self, schema: core_schema.ModelSchema) -> JsonSchemaValue:
        """Schema of a model."""
        generated, kind = super().model_schema(schema), schema["cls"]
        if issubclass(kind, Settings):
            _complete(kind, generated)
        return generated


def _complete(kind: type[Settings], schema: dict[str, Any]) -> None:
    properties, required = schema["properties"], required_fields(kind)
    for name, text in descriptions(kind).items():
        properties[name]["description"] = text
    for name in kind.model_fields:
        part, asked = properties[camel(name)], mark_of(kind, name, InCluster) or InCluster()
        keyed = mark_of(kind, name, Keyed)
        if keyed is not None:
            part |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [camel(keyed.key)]}
        elif part.get("type") == "array" and not issubclass(kind, ApiModel):
            part["x-kubernetes-list-type"] = "atomic"
        if asked.form is not None:
            part["pattern"] = asked.form.pattern
        if asked.immutable:
            part[_RULES] = [
                *part.get(_RULES, ()),
                *validations([immutable(camel(name), asked.immutable)]),
            ]
        if name in required or asked.required_with or asked.left_open:
            # Objects stay left out, too: what the API server stores for each job is what the job says.
            part.pop("default", None)
    if required:
        schema["required"] = [camel(name) for name in required]
    rules = list(_rules(kind))
    if rules:
        schema[_RULES] = list(_joined(rules))


def _joined(rules: list[dict[str, str]]) -> Iterator[dict[str, str]]:
    """The rules, where several that ask for one field first are one rule that asks for it once.

    The API server makes a map of all fields of an object each time CEL reads one of them, and the rules of
    a TrainingJob are mostly about fields that a job does not have. A rule has one path, so where several
    have become one, its message names the field of each that does not hold. A rule about the object before
    an update stays alone: on create the API server skips what reads ``oldSelf``, with all that is in it.
    """
    alone = {place: _alternatives(each["rule"]) for place, each in enumerate(rules)}
    while alone:
        asked = collections.Counter(
            part
            for found in alone.values()
            for part in dict.fromkeys(found)
            if len(found) > 1 and re.fullmatch(r"!?has\(self\.\w+\)|self\.\w+ != '\w+'", part)
        )
        ((guard, count),) = asked.most_common(1) or [("", 0)]
        if count < _WORTH_JOINING:
            break
        places = [place for place, found in alone.items() if guard in found]
        conditions = [" || ".join(part for part in alone.pop(place) if part != guard) for place in places]
        told = [
            f"({condition} ? '' : {literal(_with_path(rules[place]))})"
            for condition, place in zip(conditions, places, strict=True)
        ]
        yield {
            "rule": f"{guard} || {' && '.join(f'({each})' for each in conditions)}",
            "messageExpression": " + ".join(told),
        }
    yield from (rules[place] for place in alone)


def _with_path(rule: dict[str, str]) -> str:
    """The rule's message, after its field."""
    path = rule.get("fieldPath", "").removeprefix(".")
    return f"{path}: {rule['message']}. " if path else f"{rule['message']}. "


def _alternatives(expression: str) -> list[str]:
    """Expressions of which CEL's expression needs one to hold; itself, if it cannot be taken apart."""
    if "oldSelf" in expression:
        return [expression]
    parts, depth, quoted, start = [], 0, False, 0
    for place, character in enumerate(expression):
        if character == "'" and expression[place - 1] != "\\":
            quoted = not quoted
        elif not quoted:
            depth += (character in "([") - (character in ")]")
            if depth == 0 and character == "?":
                return [expression]
            if depth == 0 and expression.startswith(" || ", place):
                parts.append(expression[start:place])
                start = place + len(" || ")
    return [*parts, expression[start:]]


def _rules(kind: type[Settings]) -> Iterator[dict[str, str]]:
    """Rules of each class, of a class above first."""
    optional = functools.partial(_optional, kind)
    for each in reversed(kind.__mro__):
        own = [name for name in inspect.get_annotations(each) if name in kind.model_fields]
        marks = {name: mark_of(kind, name, Named) for name in own}
        names = [registered(camel(n), m.registry, m.own_names()) for n, m in marks.items() if m is not None]
        yield from validations([*each.__dict__.get("RULES", ()), *names], optional)
        for name in own:
            yield from _needed_with(kind, name)


def validations(
    rules: Iterable[Rule], optional: Callable[[str], bool] = lambda path: False
) -> list[dict[str, str]]:
    """Entries of ``x-kubernetes-validations``, without what CEL cannot say: the operator's condition does.

    ``optional``: as :func:`cel_rule` has it.
    """
    return [
        {"rule": expression, "message": rule.message} | ({"fieldPath": f".{rule.path}"} if rule.field else {})
        for rule in rules
        if (expression := cel_rule(rule, optional)) is not None
    ]


def descriptions(kind: type[Model]) -> dict[str, str]:
    """Field, as JSON spells it -> the docstring under it, also where a base class has the field."""
    documented = {
        name: text
        for base in reversed(kind.__mro__)
        if issubclass(base, Model)
        for name, text in field_docs(base).items()
    }
    return {
        camel(name): inspect.cleandoc(documented[name]) for name in kind.model_fields if name in documented
    }


def required_fields(kind: type[Model]) -> list[str]:
    """Fields that an object in a cluster has to set, in Python's spelling."""
    return [
        name
        for name, field in kind.model_fields.items()
        if field.is_required()
        or ((asked := mark_of(kind, name, InCluster)) is not None and asked.required)
        or ((part := _model(field.annotation)) is not None and required_fields(part))
    ]


def _needed_with(kind: type[Settings], name: str) -> Iterator[dict[str, str]]:
    """Rules of the whole for the fields of a part that have to be set where another one is."""
    part = _model(kind.model_fields[name].annotation)
    if part is None:
        return
    for inner in part.model_fields:
        other = (mark_of(part, inner, InCluster) or InCluster()).required_with
        if not other or other not in kind.model_fields:
            continue
        path = f"{camel(name)}.{camel(inner)}"
        there = path if name in required_fields(kind) else camel(name)
        has = f"has(self.{path})"
        if _optional(kind, name):
            has = f"(has(self.{camel(name)}) && {has})"
        yield {
            "rule": f"{has} || !has(self.{camel(other)})",
            "message": f"{path} is missing, which a job with {camel(other)} needs. To fix: give it a value",
            "fieldPath": f".{there}",
        }


def _optional(kind: Any, path: str) -> bool:
    """True if the field at ``path`` may be missing, where the parts above it are there.

    The API server fills in the defaults of an object that is there before it checks its rules. ``path`` is
    dotted, in Python's spelling.
    """
    first, _, rest = path.partition(".")
    if rest:
        return _optional(_inner(kind.model_fields[first].annotation), rest)
    if first in required_fields(kind):
        return False
    asked = mark_of(kind, first, InCluster) or InCluster()
    field = kind.model_fields[first]
    if asked.required_with or asked.left_open or _model(field.annotation) is not None:
        return True
    default = field.get_default(call_default_factory=True)
    return not worth_defaulting(list(default) if isinstance(default, tuple) else default, is_model=False)


def worth_defaulting(default: Any, *, is_model: bool) -> bool:
    """True if the default says something: an empty list or map is as good as an absent one.

    ``default``: as JSON has it; None: there is none. ``is_model``: the field is an object with fields of its
    own.
    """
    if isinstance(default, dict):
        return is_model and any(value not in ({}, []) for value in default.values())
    return default is not None and default != []


def _inner(hint: Any) -> Any:
    """The type without its None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [argument for argument in typing.get_args(hint) if argument is not type(None)]
    return hint


def _model(hint: Any) -> type[Model] | None:
    """The type, if it is a model."""
    return hint if isinstance(hint, type) and issubclass(hint, Model) else None
