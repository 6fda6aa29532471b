"""From JSON or YAML values to the dataclasses of a configuration, strictly."""

import dataclasses
import types
import typing
from collections.abc import Mapping
from typing import Any

from ballast_trainer.errors import ConfigurationError


def require(condition: bool, field: str, reason: str) -> None:
    """Refuse ``field`` for ``reason`` where the condition does not hold.

    Raises:
        ConfigurationError: it does not.
    """
    if not condition:
        raise ConfigurationError(field, reason)


def one_of(field: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a word that is none of the known ones.

    Raises:
        ConfigurationError: it is not; the nearest is suggested.
    """
    if value not in known:
        raise ConfigurationError.unknown(field, value, known)


def camel(name: str) -> str:
    """``snake_case`` as ``camelCase``."""
    head, *rest = name.split("_")
    return head + "".join(part.title() for part in rest)


def read_fields(kind: Any, value: Any, where: str) -> Any:
    """``value`` as a ``kind``: a dataclass, a tuple of them, or a plain value.

    Args:
        kind: the type, as annotated.
        value: what JSON or YAML gave.
        where: dotted path of the value, for refusals; empty for the whole.

    Raises:
        ConfigurationError: a field is missing, unknown or of the wrong type.
    """
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        (kind,) = [argument for argument in arguments if argument is not type(None)]
        return None if value is None else read_fields(kind, value, where)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigurationError(where, f"expected a list, got {value!r}")
        return tuple(read_fields(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(value))
    if dataclasses.is_dataclass(kind):
        return _read_object(kind, value, where)
    if origin is not None:
        kind = origin
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, kind) or (kind is not bool and isinstance(value, bool)):
        raise ConfigurationError(where, f"expected {kind.__name__}, got {value!r}")
    return value


def _read_object(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ConfigurationError(where or "configuration", f"expected an object, got {value!r}")
    prefix = f"{where}." if where else ""
    hints = typing.get_type_hints(kind)
    fields = {camel(field.name): field for field in dataclasses.fields(kind)}
    for key in value:
        if key not in fields:
            raise ConfigurationError.unknown(f"{prefix}{key}", str(key), fields)
    arguments = {}
    for key, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if value.get(key) is not None:
            arguments[field.name] = read_fields(hints[field.name], value[key], f"{prefix}{key}")
        elif required:
            raise ConfigurationError(f"{prefix}{key}", "missing. To fix: give it in the file, or by --set")
        elif key in value and field.default is not None and type(None) in typing.get_args(hints[field.name]):
            arguments[field.name] = None
    return kind(**arguments)
