"""Bases and value types of the API models, and how they say what the CRD generator has to know.

A :class:`Rule` stands once and is checked twice: by the API server (CEL) and on reading an object here.
"""

import dataclasses
import datetime
import inspect
import math
import sys
from collections.abc import Callable, Iterable
from typing import Annotated, Any, ClassVar, Self

from ballast_policies.registry import PREFIXED, Registry
from kubernetes.utils.quantity import parse_quantity
from pydantic import (
    AfterValidator,
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    model_validator,
)
from pydantic.alias_generators import to_camel
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from ballast_operator.api.schema.docstrings import field_docs


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One entry of ``x-kubernetes-validations``.

    Attributes:
        expression: CEL over ``self`` (and ``oldSelf``: then it is checked on updates only); empty: CEL cannot
            say it, and the operator's condition does.
        message: what is wrong, and what to change.
        field: path below ``self`` that the refusal names, e.g. ``.maxStages``; empty: ``self``.
        holds: the same in Python; None for rules that compare with the old object.
    """

    expression: str
    message: str
    field: str = ""
    holds: Callable[[Any], bool] | None = None

    def to_schema(self) -> dict[str, str]:
        """The entry."""
        entry = {"rule": self.expression, "message": self.message}
        if self.field:
            entry["fieldPath"] = self.field
        return entry


def immutable(what: str, why: str) -> Rule:
    """A rule that refuses changes of the field it stands on."""
    return Rule("self == oldSelf", f"{what} is immutable: {why}. To fix: make a new TrainingJob")


def cel_list(names: Iterable[str]) -> str:
    """The names as a list in CEL."""
    return f"[{', '.join(repr(name) for name in names)}]"


def registered(
    field: str,
    registry: Registry[Any],
    usable: Iterable[str] | None = None,
    *,
    also: str = "",
    described: str = "",
) -> Rule:
    """A rule that a name is one of Ballast's own, or may be one that another distribution registers.

    Which of these are installed, only the operator knows: a validator of the field refuses the others,
    which shows as a condition of the object.

    Args:
        field: the name's field, below ``self``.
        registry: where names are registered.
        usable: those of Ballast's own names that the field takes; None: all.
        also: regular expression of what the field takes besides.
        described: the same for people.
    """
    own = tuple(registry.builtin if usable is None else usable)
    pattern = (f"{PREFIXED}|{also}" if also else PREFIXED).replace("\\", "\\\\")
    return Rule(
        f"!has(self.{field}) || self.{field} in {cel_list(own)} || self.{field}.matches('^({pattern})$')",
        f"{field} is not one of {', '.join(own)}. To fix: name one of these, or one of another distribution "
        f"as prefix.name{f', {described}' if described else ''}",
        field=f".{field}",
    )


def schema(*rules: Rule, **extensions: Any) -> dict[str, Any]:
    """``json_schema_extra`` of a field: CEL rules and ``x-kubernetes-*`` extensions (``list_type="map"``)."""
    extra: dict[str, Any] = {
        f"x-kubernetes-{name.replace('_', '-')}": value for name, value in extensions.items()
    }
    if rules:
        extra["x-kubernetes-validations"] = [rule.to_schema() for rule in rules]
    return extra


@dataclasses.dataclass(frozen=True, slots=True)
class Refused:
    """A planned field that is refused until it is implemented.

    Without it, the API server would drop the field in silence.

    Attributes:
        name: the field, camelCase.
        type: its JSON type.
        message: what to do instead.
    """

    name: str
    type: str
    message: str

    def to_schema(self) -> dict[str, Any]:
        """The field, so that the API server does not drop it before the rule sees it."""
        anything = {"type": "object", "additionalProperties": True}
        part: dict[str, Any] = {"description": f"Refused: {self.message}.", "type": self.type}
        if self.type == "object":
            part |= anything
        if self.type == "array":
            part["items"] = anything
        return part


class ApiModel(BaseModel):
    """A part of an object: camelCase outside, frozen, described by its attributes' docstrings.

    The docstrings are read when a schema is made, not when the operator starts.
    """

    RULES: ClassVar[tuple[Rule, ...]] = ()
    REFUSED: ClassVar[tuple[Refused, ...]] = ()

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        strict=True,
        extra="forbid",
        allow_inf_nan=False,
    )

    def to_dict(self) -> dict[str, Any]:
        """JSON as the API server has it: camelCase, defaults filled in, without what is None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)

    @model_validator(mode="after")
    def _check_rules(self) -> Self:
        for rule in type(self).RULES:
            if rule.holds is not None and not rule.holds(self):
                # The text is given as a value, so that braces in it are not taken for placeholders.
                raise PydanticCustomError("rule", "{text}", {"text": rule.message, "field": rule.field})
        return self

    @classmethod
    def __get_pydantic_json_schema__(
        cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the rules and the fields' descriptions to the schema."""
        generated = handler(core_schema)
        own = handler.resolve_ref_schema(generated)
        for name, text in descriptions(cls).items():
            own["properties"][name]["description"] = text
        for refused in cls.REFUSED:
            own["properties"][refused.name] = refused.to_schema()
        rules = [
            *cls.RULES,
            *(Rule(f"!has(self.{r.name})", f"{r.name}: {r.message}", f".{r.name}") for r in cls.REFUSED),
        ]
        if rules:
            own["x-kubernetes-validations"] = [rule.to_schema() for rule in rules if rule.expression]
        return generated


def storable(content: Any) -> Any:
    """JSON with numbers that the API server can store: sums of what others have written may be too large."""
    if isinstance(content, dict):
        return {name: storable(value) for name, value in content.items()}
    if isinstance(content, list):
        return [storable(value) for value in content]
    if isinstance(content, float) and not math.isfinite(content):
        return 0.0 if math.isnan(content) else math.copysign(sys.float_info.max, content)
    if isinstance(content, int) and abs(content) >= MOST_WHOLE:
        return MOST_WHOLE - 1 if content > 0 else 1 - MOST_WHOLE
    return content


MOST_WHOLE = 2**63
"""Whole numbers of the API server are below it."""


def descriptions(model: type[ApiModel]) -> dict[str, str]:
    """Field, as JSON spells it -> the docstring under it, also where a base class has the field."""
    documented = {
        name: text
        for base in reversed(model.__mro__)
        if issubclass(base, ApiModel)
        for name, text in field_docs(base).items()
    }
    return {
        field.alias or name: inspect.cleandoc(documented[name])
        for name, field in model.model_fields.items()
        if name in documented
    }


class StatusModel(ApiModel):
    """A part of a status: an operator one release apart may have written more than this one knows."""

    # Not strict: the API server has checked the types, and JSON has neither times nor enums.
    model_config = ConfigDict(extra="ignore", strict=False)

    def replace(self, **changes: Any) -> Self:
        """A copy with other values for some fields. Not validated: the status is, as a whole, when written.

        Raises:
            TypeError: there is no such field.
        """
        unknown = changes.keys() - type(self).model_fields.keys()
        if unknown:
            raise TypeError(f"{type(self).__name__} has no field {', '.join(sorted(unknown))}")
        return self.model_copy(update=changes)


def _in_utc(time: datetime.datetime) -> datetime.datetime:
    """The same moment in UTC; a zone can make one of the year 0 or 10000, which nothing can show."""
    try:
        return time.astimezone(datetime.UTC)
    except OverflowError:
        raise ValueError("not between the years 1 and 9999 in UTC. To fix: give the time in UTC") from None


Time = Annotated[AwareDatetime, AfterValidator(_in_utc)]
"""metav1.Time: RFC 3339 with a zone."""

GpuType = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")
]
"""Name of a GPU type, e.g. ``v100``; free to choose, the same in jobs and pools."""

DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""Lower case letters, digits and hyphens."""

MemoryQuantity = Annotated[
    str,
    Field(max_length=16, pattern=r"^([1-9][0-9]{0,5}(\.[0-9]{1,3})?(M|G|T|Mi|Gi|Ti)|[1-9][0-9]{6,14})$"),
]
"""Bytes as Kubernetes writes them, from a megabyte on: ``80G``, ``79.5Gi``, ``85899345920``."""


def memory_bytes(quantity: str) -> float:
    """The bytes of a :data:`MemoryQuantity`."""
    return float(parse_quantity(quantity))


Step = Annotated[int, Field(ge=0, le=2**53)]
"""A number of optimizer steps."""


class ObjectMeta(ApiModel):
    """metav1.ObjectMeta, as far as it is read here. The API server checks it; the CRD does not repeat it."""

    model_config = ConfigDict(extra="ignore")

    name: str
    """The object's name."""
    namespace: str = ""
    """Empty for cluster-scoped objects."""
    uid: str = ""
    """Empty before the object exists."""
    generation: int = 0
    """Counts changes of the spec."""
    creation_timestamp: Time | None = None
    """When it was made."""
    deletion_timestamp: Time | None = None
    """When its deletion was asked for; None: it was not."""
