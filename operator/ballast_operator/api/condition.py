"""metav1.Condition, and the one place where a condition's transition time is decided."""

from collections.abc import Iterable
from typing import Annotated

from pydantic import Field

from ballast_operator.api.base import StatusModel, Time, schema

MAX_MESSAGE = 32768
"""Longest message that metav1.Condition allows, in characters."""


class Condition(StatusModel):
    """metav1.Condition."""

    type: Annotated[str, Field(max_length=316)]
    """Which condition."""
    status: Annotated[str, Field(json_schema_extra={"enum": ["True", "False", "Unknown"]})]
    """True, False or Unknown."""
    reason: Annotated[
        str, Field(min_length=1, max_length=1024, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$")
    ]
    """Why, in a stable word."""
    message: Annotated[str, Field(max_length=MAX_MESSAGE)] = ""
    """Why, in a sentence with numbers."""
    last_transition_time: Time
    """When the status flipped last."""
    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation of the spec that the condition is about."""

    @property
    def is_true(self) -> bool:
        """Whether the status is True."""
        return self.status == "True"


Conditions = Annotated[
    tuple[Condition, ...],
    Field(max_length=16, json_schema_extra=schema(list_type="map", list_map_keys=["type"])),
]
"""Conditions by type."""


def find_condition(conditions: Iterable[Condition], kind: str) -> Condition | None:
    """The condition of type ``kind``; None where there is none."""
    return next((condition for condition in conditions if condition.type == kind), None)


def set_condition(
    conditions: tuple[Condition, ...],
    kind: str,
    value: bool,
    reason: str,
    message: str,
    *,
    now: Time,
    generation: int,
) -> tuple[Condition, ...]:
    """``conditions`` with this one set; its transition time moves only when its status changes."""
    old, status = find_condition(conditions, kind), "True" if value else "False"
    new = Condition(
        type=kind,
        status=status,
        reason=reason,
        message=message[:MAX_MESSAGE],
        last_transition_time=old.last_transition_time if old is not None and old.status == status else now,
        observed_generation=generation,
    )
    if old is None:
        return (*conditions, new)
    return tuple(new if condition.type == kind else condition for condition in conditions)
