"""Whether two jobs may share a GPU: what a pool offers, and what a job allows."""

import enum
from typing import Annotated

from ballast_policies.contract.conditions import at
from ballast_policies.contract.rules import Rule
from pydantic import Field

from ballast_operator.api.base import ApiModel


class SharingKind(enum.StrEnum):
    """How a device plugin lets two pods use one GPU."""

    TIME_SLICING = "TimeSlicing"
    """By turns of milliseconds; their memory is not separated."""
    MPS = "MPS"
    """Refused as yet."""


class Sharing(ApiModel):
    """How the GPUs of a pool are shared."""

    RULES = (
        Rule(
            condition=at("kind") != SharingKind.MPS,
            field="kind",
            reason="sharing.kind MPS: under it a job that is alone has half of a GPU's memory and threads as "
            "well, and its speed would be taken for that of the whole GPU",
            fix="kind: TimeSlicing",
        ),
    )

    kind: SharingKind = SharingKind.TIME_SLICING
    """As the device plugin is configured."""
    jobs_per_gpu: Annotated[int, Field(ge=2, le=2)] = 2
    """Jobs on a GPU, at most: the plugin's ``replicas``."""


class SharesGpu(enum.StrEnum):
    """Whether a job may share its GPU with another job."""

    NEVER = "Never"
    """Its GPU is its own."""
    ALLOWED = "Allowed"
    """In pools with ``sharing``, where both together do more than by turns."""
