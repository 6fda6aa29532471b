"""Refusals of GPUs, with their reasons."""

import dataclasses
import enum


class Obstacle(enum.StrEnum):
    """Cause that a decision gives a job no GPUs: the reason of its condition ``Admitted``."""

    CAPACITY = "WaitingForCapacity"
    """Other jobs hold the GPUs this round."""
    SPOT_LIMIT = "SpotLimit"
    """Limits of spot machines keep it off, and no others are free."""
    TENANT_LIMIT = "NamespaceLimit"
    """Its tenant's other jobs have the GPUs that their limit leaves, or have to give them back first."""
    TEAM_LIMIT = "TeamLimit"
    """As that, of its team."""
    DRY_RUN = "DryRun"
    """Nothing that is decided is carried out."""
    EXCEEDS_CAPACITY = "ExceedsCapacity"
    """No pools have so many GPUs."""
    EXCEEDS_MEMORY = "ExceedsMemory"
    """No pools have them with the memory."""
    NO_MATCHING_GPU_TYPE = "NoMatchingGpuType"
    """No pool has a GPU type that it allows."""
    MISCONFIGURED = "Misconfigured"
    """No gang can be as it asks."""


@dataclasses.dataclass(frozen=True, slots=True)
class Refusal:
    """Reason that a job gets no GPUs, or must hold none.

    Attributes:
        reason: of its condition Admitted, and of Failed.
        message: what is the case, with the field or the API server's words, and what to change.
        fails: it has failed for good once it holds nothing.
        may_pass: the job itself may be right; it is looked at again.
    """

    reason: str
    message: str
    fails: bool = False
    may_pass: bool = False
