"""A rank of a plan, and the stage of layers that it runs."""

from typing import Self

from pydantic import Field, model_validator

from ballast_policies.contract.limits import LONGEST_NAME, MOST_LAYERS, MOST_RANKS
from ballast_policies.contract.model import Model
from ballast_policies.contract.names import process_name


class Rank(Model):
    """One process of the gang.

    Attributes:
        rank: position in the process group, 0-based; rank 0 hosts the rendezvous and reports.
        pod: name of the pod that runs it. A pod keeps its name over epochs, its ranks may change.
        local_rank: position among the processes of the pod, 0-based; the GPU of the pod that it uses.
        address: IP address of the pod.
        gpu_type: the pool's GPU type, e.g. ``v100``.
        node: the pod's; empty: not known.
    """

    rank: int = Field(ge=0, le=MOST_RANKS)
    pod: str = Field(max_length=LONGEST_NAME)
    local_rank: int = Field(0, ge=0, le=MOST_RANKS)
    address: str = Field(max_length=LONGEST_NAME)
    gpu_type: str = Field(max_length=LONGEST_NAME)
    node: str = Field("", max_length=LONGEST_NAME)

    @property
    def process(self) -> str:
        """Name of the process, the same over epochs: see :func:`~ballast_policies.contract.process_name`."""
        return process_name(self.pod, self.local_rank)


class Stage(Model):
    """Consecutive layers ``first_layer`` (inclusive) to ``end_layer`` (exclusive) on one rank."""

    rank: int = Field(ge=0, le=MOST_RANKS)
    first_layer: int = Field(ge=0, le=MOST_LAYERS)
    end_layer: int = Field(ge=1, le=MOST_LAYERS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not 0 <= self.first_layer < self.end_layer:
            raise ValueError(
                f"stage on rank {self.rank} has layers [{self.first_layer}, {self.end_layer}): "
                "a stage needs at least one layer"
            )
        return self
