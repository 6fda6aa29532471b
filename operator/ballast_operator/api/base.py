"""Bases and value types of the API models, and how they say what the CRD generator has to know."""

from typing import Annotated, Any

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field
from pydantic.alias_generators import to_camel


class ApiModel(BaseModel):
    """A part of an object: camelCase outside, frozen, described by its attributes' docstrings."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        frozen=True,
        strict=True,
        use_attribute_docstrings=True,
        extra="forbid",
        allow_inf_nan=False,
    )

    def to_dict(self) -> dict[str, Any]:
        """JSON as the API server has it: camelCase, defaults filled in, absent what is None."""
        return self.model_dump(mode="json", by_alias=True, exclude_none=True)


class StatusModel(ApiModel):
    """A part of a status: an operator one release apart may have written more than this one knows."""

    model_config = ConfigDict(extra="ignore")


def rule(expression: str, message: str, *, field: str | None = None, reason: str | None = None) -> dict[str, str]:
    """One entry of ``x-kubernetes-validations``.

    Args:
        expression: CEL over ``self`` (and ``oldSelf``: then it is checked on updates only).
        message: what is wrong and what to change.
        field: path below ``self`` that the refusal names, e.g. ``.maxStages``.
        reason: machine-readable; FieldValueInvalid where missing.
    """
    entry = {"rule": expression, "message": message}
    if field is not None:
        entry["fieldPath"] = field
    if reason is not None:
        entry["reason"] = reason
    return entry


def immutable(what: str, why: str) -> dict[str, str]:
    """A rule that refuses changes of the field it stands on."""
    return rule("self == oldSelf", f"{what} is immutable: {why}. To fix: make a new TrainingJob")


def schema(*rules: dict[str, str], **extensions: Any) -> dict[str, Any]:
    """``json_schema_extra`` with CEL rules and ``x-kubernetes-*`` extensions (``list_type="map"`` etc.)."""
    extra: dict[str, Any] = {
        f"x-kubernetes-{name.replace('_', '-')}": value for name, value in extensions.items()
    }
    if rules:
        extra["x-kubernetes-validations"] = list(rules)
    return extra


Time = AwareDatetime
"""metav1.Time: RFC 3339 with a zone."""

GpuType = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$")]
"""Name of a GPU type, e.g. ``v100``; free to choose, the same in jobs and pools."""

DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A name of Kubernetes' kind."""

Step = Annotated[int, Field(ge=0, le=2**53)]
"""A number of optimizer steps."""

Count = Annotated[int, Field(ge=1, le=2**31 - 1)]
"""A whole number from 1."""


class Condition(StatusModel):
    """metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Which condition."""
    status: Annotated[str, Field(json_schema_extra={"enum": ["True", "False", "Unknown"]})]
    """True, False or Unknown."""
    reason: Annotated[str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")]
    """Why, in a stable word."""
    message: Annotated[str, Field(max_length=32768)]
    """Why, in a sentence with numbers."""
    last_transition_time: Time
    """When the status flipped last."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation of the spec that the condition is about."""


Conditions = Annotated[
    tuple[Condition, ...], Field(max_length=16, json_schema_extra=schema(list_type="map", list_map_keys=["type"]))
]
"""Conditions by type."""
