"""A whole plan: layers to stages, stages to GPUs, microbatches of a step; and the GPUs to plan for."""

import dataclasses
import functools
from collections.abc import Sequence

from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.profile import GpuKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPUs of a cluster, in the order in which they fill the servers.

    Attributes:
        types, speeds, memory: by GPU; memory in bytes, infinite where it is not limited.
        servers: by GPU, the number of its server.
        inside, between: bytes/s of a link inside a server and between servers; infinite: transfers are free.
    """

    types: tuple[str, ...]
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    servers: tuple[int, ...]
    inside: float = float("inf")
    between: float = float("inf")

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.types)

    def link(self, gpus: Sequence[int]) -> float:
        """Bytes/s of the slowest link among some GPUs; infinite for one alone."""
        if len(gpus) < 2:
            return float("inf")
        return self.inside if len({self.servers[gpu] for gpu in gpus}) == 1 else self.between


def devices_of(
    kinds: Sequence[GpuKind],
    *,
    gpus_per_server: int | None = None,
    inside: float = float("inf"),
    between: float = float("inf"),
) -> Devices:
    """The GPUs of some kinds, which fill servers in their order.

    Raises:
        PlanningError: there are none.
    """
    each = [kind for kind in kinds for _ in range(kind.count)]
    if not each:
        raise PlanningError("no GPUs to plan for: give at least one of a type")
    per_server = gpus_per_server or len(each)
    return Devices(
        types=tuple(kind.gpu_type for kind in each),
        speeds=tuple(float(kind.speed) for kind in each),
        memory=tuple(float("inf") if k.memory_bytes is None else float(k.memory_bytes) for k in each),
        servers=tuple(index // per_server for index in range(len(each))),
        inside=inside,
        between=between,
    )


Groups = tuple[tuple[int, ...], ...]
"""By replica of a stage, the GPUs of its tensor-parallel group."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacedStage:
    """Layers ``first_layer`` to ``end_layer - 1`` on ``groups``."""

    first_layer: int
    end_layer: int
    groups: Groups

    @property
    def replicas(self) -> int:
        """Ranks, or tensor-parallel groups, that share its microbatches."""
        return len(self.groups)

    @property
    def gpus(self) -> tuple[int, ...]:
        """All its GPUs."""
        return tuple(gpu for group in self.groups for gpu in group)


@dataclasses.dataclass(frozen=True)
class Layout:
    """A whole plan.

    Attributes:
        stages: by layer.
        microbatch_size: samples.
        microbatches: of a step, over all replicas; microbatch k goes to replica k mod r of a stage.
        recompute: only each layer's input is kept for the backward.
    """

    stages: tuple[PlacedStage, ...]
    microbatch_size: int
    microbatches: int
    recompute: bool = False

    @functools.cached_property
    def replicas(self) -> tuple[int, ...]:
        """By stage."""
        return tuple(stage.replicas for stage in self.stages)

    @property
    def pipeline(self) -> int:
        """Number of stages."""
        return len(self.stages)

    @property
    def tensor(self) -> int:
        """Ranks that share the matrices of each layer."""
        return len(self.stages[0].groups[0])

    @property
    def data(self) -> int | None:
        """Replicas of the whole pipeline; None where stages have different numbers of replicas."""
        return self.replicas[0] if len(set(self.replicas)) == 1 else None

    @property
    def bounds(self) -> tuple[int, ...]:
        """Where the layers are cut, 0 and L included."""
        return (0, *(stage.end_layer for stage in self.stages))

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.microbatch_size * self.microbatches
