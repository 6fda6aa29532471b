"""JSON form of the contract's dataclasses: camelCase keys, strict both ways.

Unknown keys are ignored on reading, so that an operator and a trainer one release apart still
talk; a missing key or a value of the wrong type is refused with the name of the field.
"""

import dataclasses
import enum
import functools
import json
import types
import typing
from typing import Any, Self


class ContractError(ValueError):
    """A message of the other side cannot be read; the text names the field, the value and the reason."""


@functools.cache
def _camel(name: str) -> str:
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


def _encode(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return {_camel(f.name): _encode(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [_encode(item) for item in value]
    return value


def _decode(kind: Any, value: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return _decode(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list):
            raise ContractError(f"{where}: expected a list, got {value!r}")
        return tuple(_decode(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _decode_object(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        try:
            return kind(value)
        except ValueError:
            allowed = ", ".join(str(member.value) for member in kind)
            raise ContractError(f"{where}: {value!r} is not one of {allowed}") from None
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ContractError(f"{where}: expected {kind.__name__}, got {value!r}")
    return value


def _decode_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, dict):
        raise ContractError(f"{where}: expected an object, got {value!r}")
    hints = _type_hints(kind)
    arguments = {}
    for field in dataclasses.fields(kind):
        key = _camel(field.name)
        if key in value:
            arguments[field.name] = _decode(hints[field.name], value[key], f"{where}.{key}")
        elif field.default is dataclasses.MISSING:
            raise ContractError(f"{where}.{key}: missing")
    try:
        return kind(**arguments)
    except ContractError:
        raise
    except ValueError as error:
        raise ContractError(f"{where}: {error}") from error


@functools.cache
def _type_hints(kind: type) -> dict[str, Any]:
    """Resolved once a class: it costs more than decoding a value."""
    return typing.get_type_hints(kind)


class Wire:
    """Mixin: the JSON form of a frozen dataclass."""

    __slots__ = ()

    def to_json(self) -> str:
        """One line of JSON with sorted keys, so that equal values are equal bytes."""
        return json.dumps(_encode(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the value back.

        Raises:
            ContractError: the text is not JSON, or a field is missing or has a wrong type or value.
        """
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ContractError(f"{cls.__name__}: not JSON: {error}") from error
        decoded: Self = _decode_object(cls, value, cls.__name__)
        return decoded
