"""Parts of a job's status that say what it has cost."""

from typing import Annotated

from pydantic import Field

from ballast_operator.api.base import StatusModel

_Name = Annotated[str, Field(max_length=253)]


class PoolCost(StatusModel):
    """What GPUs of one pool have cost the job, up to ``costAt``."""

    pool: _Name
    """The pool's name."""
    gpu_type: _Name = ""
    """Its GPU type."""
    gpu_seconds: Annotated[float, Field(ge=0)] = 0.0
    """GPUs held x seconds."""
    cost: Annotated[float, Field(ge=0)] = 0.0
    """What they cost."""
    startup_cost: Annotated[float, Field(ge=0)] = 0.0
    """The part of ``cost`` in which no step was done: before all ranks train, and while they leave."""
