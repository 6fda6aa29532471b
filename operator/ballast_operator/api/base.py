"""Bases and value types of the API models, and how they say what the CRD generator has to know.

A :class:`Rule` stands once and is checked twice: by the API server (CEL) and on reading an object here.
A docstring under a field is its description; it is read when a schema is made, not when the operator starts.
"""

import datetime
import math
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Self

from ballast_policies.contract.conditions import Cel, Rule, json_path
from ballast_policies.contract.model import Settings
from ballast_policies.registry import PREFIXED, Registry
from kubernetes.utils.quantity import parse_quantity
from pydantic import AfterValidator, AwareDatetime, ConfigDict, Field


def exactly_one(first: str, second: str) -> Cel:
    """One of two optional fields is given, and the other is not."""
    return Cel(
        f"has(self.{json_path(first)}) != has(self.{json_path(second)})",
        lambda of: (getattr(of, first) is None) != (getattr(of, second) is None),
    )


def immutable(what: str, why: str) -> Rule:
    """A rule that refuses changes of the field it stands on."""
    return Rule(
        condition=Cel("self == oldSelf"),
        field="",
        reason=f"{what} is immutable: {why}",
        fix="make a new TrainingJob",
    )


def literal(value: Any) -> str:
    """The value in CEL."""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return "'" + str(value).replace("\\", "\\\\").replace("'", "\\'") + "'"
    return str(value)


def cel_list(values: Iterable[Any]) -> str:
    """The values as a list in CEL."""
    return f"[{', '.join(literal(value) for value in values)}]"


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
    which shows as a condition of the object. ``usable``: those of Ballast's own names that the field takes;
    None: all. ``also``: regular expression of what it takes besides, ``described`` for people.
    """
    own = tuple(registry.builtin if usable is None else usable)
    pattern = (f"{PREFIXED}|{also}" if also else PREFIXED).replace("\\", "\\\\")
    return Rule(
        condition=Cel(
            f"!has(self.{field}) || self.{field} in {cel_list(own)} || self.{field}.matches('^({pattern})$')"
        ),
        field=field,
        reason=f"{field} is not one of {', '.join(own)}",
        fix="name one of these, or one of another distribution as prefix.name"
        f"{f', {described}' if described else ''}",
    )


def listed(most: int, *keys: str, least: int | None = None, unique: bool = False) -> Any:
    """List of at most ``most``; merged by ``keys`` of rows, as a set if ``unique``, else replaced whole."""
    kind = "map" if keys else "set" if unique else "atomic"
    extra: dict[str, Any] = {"x-kubernetes-list-type": kind}
    if keys:
        extra["x-kubernetes-list-map-keys"] = list(keys)
    return Field(min_length=least, max_length=most, json_schema_extra=extra)


class ApiModel(Settings):
    """A part of an object."""


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

    @classmethod
    def written(cls, status: Mapping[str, Any] | None, *parts: str) -> Self | None:
        """These parts of a stored status, by their names in JSON; None: one of them cannot be read."""
        try:
            return cls.model_validate(
                {name: status[name] for name in parts if status and status.get(name) is not None}
            )
        except ValueError:
            return None


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

Name = Annotated[str, Field(max_length=253)]
"""Name of a Kubernetes object or label, or of something else that a user has named."""

Text = Annotated[str, Field(max_length=4096)]
"""Sentences for people."""

DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""Lower case letters, digits and hyphens."""

LABEL_KEY = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"

LabelKey = Annotated[str, Field(min_length=1, max_length=316, pattern=LABEL_KEY)]
"""Name of a label, with or without a prefix."""

MemoryQuantity = Annotated[
    str,
    Field(max_length=16, pattern=r"^([1-9][0-9]{0,5}(\.[0-9]{1,3})?(M|G|T|Mi|Gi|Ti)|[1-9][0-9]{6,14})$"),
]
"""Bytes as Kubernetes writes them, from a megabyte on: ``80G``, ``79.5Gi``, ``85899345920``."""


def memory_bytes(quantity: str) -> float:
    """The bytes of a :data:`MemoryQuantity`."""
    return float(parse_quantity(quantity))


MOST_STEPS = 2**53

Step = Annotated[int, Field(ge=0, le=MOST_STEPS)]
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
    """Time of its creation."""
    deletion_timestamp: Time | None = None
    """Time of its deletion's request; None: none."""


MAX_MESSAGE = 32768
"""Longest message that metav1.Condition allows, in characters."""

HALVES = re.compile("[\ud800-\udfff]")
"""Halves of a surrogate pair without the other: no character, and nothing that is stored."""


class Condition(StatusModel):
    """metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Type of the condition."""
    status: Annotated[str, Field(json_schema_extra={"enum": ["True", "False", "Unknown"]})]
    """True, False or Unknown."""
    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Reason, as a stable word."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """Reason, in a sentence with numbers."""
    last_transition_time: Time
    """Time of the status's last change."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation of the spec that the condition is about."""

    @property
    def is_true(self) -> bool:
        """True if the status is True."""
        return self.status == "True"


Conditions = Annotated[tuple[Condition, ...], listed(32, "type")]
"""Conditions by type."""


def find_condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of type ``kind``; None where there is none."""
    for condition in conditions:
        if condition.type == kind:
            return condition
    return None


def set_condition(
    conditions: tuple[Condition, ...],
    kind: str,
    value: bool | None,
    reason: str,
    message: str,
    *,
    now: Time,
    generation: int,
) -> tuple[Condition, ...]:
    """``conditions`` with this one set, None: Unknown; its transition time moves only with its status."""
    old, status = find_condition(conditions, kind), "Unknown" if value is None else str(value)
    new = Condition(
        type=kind,
        status=status,
        reason=reason,
        message=HALVES.sub("\ufffd", message[:MAX_MESSAGE]),
        last_transition_time=old.last_transition_time if old is not None and old.status == status else now,
        observed_generation=generation,
    )
    if old is None:
        return (*conditions, new)
    return tuple(new if condition.type == kind else condition for condition in conditions)
