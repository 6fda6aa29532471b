"""The schema of a part of the contract's configuration, for the TrainingJob's CRD.

Types, defaults, bounds, descriptions and rules are read from the dataclass: nothing is written twice.
"""

import collections.abc
import dataclasses
import enum
import functools
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

from ballast_policies.contract.errors import camel
from ballast_policies.contract.rules import Rule
from ballast_policies.contract.settings import Facts, Settings, facts_of
from ballast_policies.contract.wire import encode

from ballast_operator.api.base import immutable, registered
from ballast_operator.api.base import schema as extensions
from ballast_operator.api.schema.cel import cel_rule
from ballast_operator.api.schema.docstrings import field_docs, one_line
from ballast_operator.api.schema.structural import worth_defaulting

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string"}
_BOUNDS = {"ge": "minimum", "gt": "exclusiveMinimum", "le": "maximum"}

_hints: Callable[[Any], dict[str, Any]] = functools.cache(typing.get_type_hints)
"""Field -> its type; the rules ask for them some hundred times."""


def settings_schema(kind: type[Settings]) -> dict[str, Any]:
    """JSON schema of an object of this kind, in pydantic's form; see ``structural.structural_schema``."""
    hints = _hints(kind)
    docs = field_docs(cast("Any", kind))
    properties, required = {}, required_fields(kind)
    validations = [entry for rule in kind.RULES if (entry := _validation(kind, rule)) is not None]
    for field in dataclasses.fields(kind):  # type: ignore[arg-type]
        facts = facts_of(field)
        needed = field.name in required
        properties[camel(field.name)] = _field(field, hints[field.name], docs.get(field.name, ""), needed)
        if facts.registry is not None:
            name_rule = registered(camel(field.name), facts.registry, facts.own_names())
            validations.append(name_rule.to_schema())
    validations += _needed_with(kind)
    schema: dict[str, Any] = {
        "type": "object",
        "description": one_line(kind.__doc__),
        "properties": properties,
        "required": [camel(name) for name in required],
    }
    if validations:
        schema["x-kubernetes-validations"] = validations
    return schema


def required_fields(kind: type[Settings]) -> list[str]:
    """Fields that a TrainingJob has to set, in Python's spelling."""
    hints = _hints(kind)
    return [
        field.name
        for field in dataclasses.fields(kind)  # type: ignore[arg-type]
        if facts_of(field).required_in_cluster
        or (field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING)
        or (_is_settings(hints[field.name]) and required_fields(hints[field.name]))
    ]


def _validation(kind: type[Settings], rule: Rule) -> dict[str, str] | None:
    expression = cel_rule(rule, lambda path: _optional(kind, path))
    if expression is None:
        return None
    return {"rule": expression, "message": rule.message, "fieldPath": f".{rule.path}"}


def _needed_with(kind: type[Settings]) -> list[dict[str, str]]:
    """Rules of the whole configuration for the fields that have to be set where another one is."""
    found = []
    for name, inner in _hints(kind).items():
        if not _is_settings(inner):
            continue
        for field in dataclasses.fields(inner):
            other = facts_of(field).required_with
            if not other or other not in _hints(kind):
                continue
            path = f"{camel(name)}.{camel(field.name)}"
            there = path if name in required_fields(kind) else camel(name)
            has = f"has(self.{path})"
            if _optional(kind, name):
                has = f"(has(self.{camel(name)}) && {has})"
            found.append(
                {
                    "rule": f"{has} || !has(self.{camel(other)})",
                    "message": f"{path} is missing, which a job with {camel(other)} needs. "
                    "To fix: give it a value",
                    "fieldPath": f".{there}",
                }
            )
    return found


def _optional(kind: Any, path: str) -> bool:
    """Whether the field at ``path`` may be missing, where the parts above it are there.

    The API server fills in the defaults of an object that is there before it checks its rules.

    Args:
        kind: of the object.
        path: dotted, in Python's spelling.
    """
    first, _, rest = path.partition(".")
    if rest:
        return _optional(_inner(_hints(kind)[first]), rest)
    if first in required_fields(kind):
        return False
    (field,) = (field for field in dataclasses.fields(kind) if field.name == first)
    default = _default(field, required=False)
    return not worth_defaulting(
        None if default is None else encode(default, without_none=True), is_model=False
    )


def _field(field: "dataclasses.Field[Any]", hint: Any, doc: str, required: bool) -> dict[str, Any]:
    facts = facts_of(field)
    schema = _type(_inner(hint), facts)
    if doc or "description" not in schema:
        schema["description"] = one_line(doc)
    default = _default(field, required=required)
    if default is not None:
        schema["default"] = encode(default, without_none=True)
    if facts.immutable:
        rule = immutable(camel(field.name), facts.immutable).to_schema()
        schema["x-kubernetes-validations"] = [*schema.get("x-kubernetes-validations", []), rule]
    return schema


def _default(field: "dataclasses.Field[Any]", *, required: bool) -> Any:
    """What the schema says of a field that is left out; None: nothing.

    Objects stay left out: what the API server stores, checks and sends for each job is what the job says.
    """
    if required or facts_of(field).required_with or dataclasses.is_dataclass(field.default_factory):
        return None
    if field.default is not dataclasses.MISSING:
        return field.default
    return None if field.default_factory is dataclasses.MISSING else field.default_factory()


def _type(hint: Any, facts: Facts) -> dict[str, Any]:
    if _is_settings(hint):
        return settings_schema(hint)
    origin = typing.get_origin(hint)
    if origin is tuple:
        items = _type(typing.get_args(hint)[0], dataclasses.replace(facts, max_length=None, key=""))
        schema: dict[str, Any] = {"type": "array", "items": items}
        if facts.max_length is not None:
            schema["maxItems"] = facts.max_length
        if facts.key:
            return schema | extensions(list_type="map", list_map_keys=[camel(facts.key)])
        return schema | extensions(list_type="atomic")
    if origin in (dict, Mapping, collections.abc.Mapping):
        return {"type": "object", "additionalProperties": True}
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return {"type": "string", "enum": [member.value for member in hint]}
    schema = {"type": _TYPES[hint]}
    for name, key in _BOUNDS.items():
        if getattr(facts, name) is not None:
            schema[key] = getattr(facts, name)
    if hint is str:
        lengths = {"minLength": facts.min_length, "maxLength": facts.max_length}
        schema |= {key: value for key, value in lengths.items() if value is not None}
        pattern = facts.cluster_pattern or facts.pattern
        if pattern:
            schema["pattern"] = pattern
    return schema


def _inner(hint: Any) -> Any:
    """The type without its None."""
    if typing.get_origin(hint) in (typing.Union, types.UnionType):
        (hint,) = [argument for argument in typing.get_args(hint) if argument is not type(None)]
    return hint


def _is_settings(hint: Any) -> bool:
    return isinstance(hint, type) and issubclass(hint, Settings)
