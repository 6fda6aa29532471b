"""Where a job's data is, and what reading it from another region costs."""

from typing import Annotated

from ballast_policies.contract.conditions import Cel
from ballast_policies.contract.rules import Rule
from pydantic import Field

from ballast_operator.api.base import ApiModel, MemoryQuantity, StatusModel, Step

Region = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
"""A region by its cloud's name: ``us-east-1``, ``europe-west4``, ``eastus``."""

_RegionOrAny = Annotated[
    str, Field(min_length=1, max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?|\*)$")
]


class DataLocation(ApiModel):
    """What a job reads from where it is stored, while it trains."""

    RULES = (
        Rule(
            condition=Cel(
                "has(self.readPerStep) != has(self.readInAll)",
                lambda data: (data.read_per_step is None) != (data.read_in_all is None),
            ),
            field="",
            reason="what is read is stated by readPerStep or readInAll",
            fix="set exactly one",
        ),
    )

    region: Region
    """Region of the bucket or file system, as the clouds call it, e.g. ``us-east-1``."""
    read_per_step: MemoryQuantity | None = None
    """What all ranks together read from there for one step, e.g. ``200Mi``. Data that a node caches is not
    read again: state the mean."""
    read_in_all: MemoryQuantity | None = None
    """In place of it, what all ``totalSteps`` read, e.g. ``2Ti`` for ten epochs over 200Gi."""
    checkpoint_size: MemoryQuantity | None = None
    """Size of a checkpoint: it is copied when a launch is in another region than the one before. Absent: not
    counted."""


class DataPrice(ApiModel):
    """What data between two regions costs."""

    from_region: _RegionOrAny
    """Where it is read; ``*``: any region without an entry of its own."""
    to_region: _RegionOrAny
    """Where the GPUs are; ``*`` likewise."""
    price_per_gb: Annotated[float, Field(ge=0, le=1e6)]
    """Price of a GB of 2^30 bytes, in the currency of ``pricePerGpuHour``. Inside a region data is free."""


class DataCost(StatusModel):
    """What a job has read from other regions."""

    region: Annotated[str, Field(max_length=63)] = ""
    """Region of its last launch, where its checkpoints are; empty: not known."""
    steps: Step = 0
    """Steps whose data is counted, those that were done twice included."""
    gigabytes: Annotated[float, Field(ge=0)] = 0.0
    """Read from another region, and checkpoints copied there, in GB of 2^30 bytes."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """What they cost: a part of ``costSoFar``."""
