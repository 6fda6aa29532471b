"""JSON form of the contract's dataclasses: camelCase keys, strict both ways."""

import dataclasses
import enum
import json
from collections.abc import Mapping
from typing import Any, ClassVar, Self

from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.errors import ContractError, camel
from ballast_policies.contract.limits import MESSAGE, Limits

__all__ = ["ContractError", "Wire", "encode"]


def encode(value: Any, *, without_none: bool = False) -> Any:
    """A value of the contract as JSON has it: dict, list, text, number, truth value or None.

    Args:
        value: a dataclass, an enum's member, a tuple, a mapping, or what JSON has anyway.
        without_none: leave out fields that are None, as Kubernetes does.
    """
    if dataclasses.is_dataclass(value):
        fields = ((field.name, getattr(value, field.name)) for field in dataclasses.fields(value))
        return {
            camel(name): encode(item, without_none=without_none)
            for name, item in fields
            if item is not None or not without_none
        }
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, tuple):
        return [encode(item, without_none=without_none) for item in value]
    if isinstance(value, Mapping):
        return dict(value)
    return value


class Wire:
    """Mixin: the JSON form of a message.

    Keys that are not known are ignored on reading, so that an operator and a trainer one release apart
    understand each other.
    """

    __slots__ = ()

    LIMITS: ClassVar[Limits] = MESSAGE

    def to_json(self) -> str:
        """One line of JSON with sorted keys, so that equal values are equal bytes."""
        return json.dumps(encode(self), sort_keys=True, separators=(",", ":"), allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Read the value back.

        Raises:
            ContractError: the text is not JSON or above :attr:`LIMITS`, or a field is missing or has a wrong
                type or value.
        """
        return decode_text(cls, text, unknown="ignore", path=cls.__name__, limits=cls.LIMITS)
