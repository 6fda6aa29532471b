"""A whole plan: layers to stages, stages to GPUs, microbatches of a step; and the GPUs to plan for."""

import dataclasses
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.profile import GpuKind


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The GPUs of a cluster, in the order in which they fill the servers.

    Attributes:
        types, speeds, memory: by GPU; memory in bytes, infinite where it is not limited.
        servers: by GPU, the number of its server.
        inside, between: bytes/s of a link inside a server and between servers; infinite: transfers are free.
        inside_of: the same inside servers, of GPU types whose links are others.
        between_of: the same between servers, by two GPU types in alphabetical order.
    """

    types: tuple[str, ...]
    speeds: tuple[float, ...]
    memory: tuple[float, ...]
    servers: tuple[int, ...]
    inside: float = float("inf")
    between: float = float("inf")
    inside_of: Mapping[str, float] = dataclasses.field(default_factory=dict)
    between_of: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    @property
    def count(self) -> int:
        """Number of GPUs."""
        return len(self.types)

    @property
    def kinds(self) -> tuple[str, ...]:
        """The GPU types, each once."""
        return tuple(dict.fromkeys(self.types))

    @property
    def full_servers(self) -> tuple[int, int]:
        """GPUs of a full server, and how many of these there are."""
        per_server = self.servers.count(0)
        return per_server, self.count // per_server

    def links_of_types(self) -> tuple[np.ndarray, np.ndarray]:
        """Bytes/s between GPUs of two types in one server, and in two: shape (kinds, kinds) each."""
        kinds = self.kinds
        inside = np.array([self.inside_of.get(kind, self.inside) for kind in kinds])
        between = [[self.between_of.get((min(a, b), max(a, b)), self.between) for b in kinds] for a in kinds]
        return np.minimum(inside[:, None], inside[None, :]), np.array(between)

    def link(self, gpus: Sequence[int]) -> float:
        """Bytes/s of the slowest link among some GPUs; infinite for one alone."""
        if len(gpus) < 2:
            return float("inf")
        among = sorted({self.types[gpu] for gpu in gpus})
        if len({self.servers[gpu] for gpu in gpus}) == 1:
            return min(self.inside_of.get(kind, self.inside) for kind in among)
        pairs = itertools.combinations(among, 2) if len(among) > 1 else ((among[0], among[0]),)
        return min(self.between_of.get(pair, self.between) for pair in pairs)


def devices_of(
    kinds: Sequence[GpuKind],
    *,
    gpus_per_server: int | None = None,
    inside: float = float("inf"),
    between: float = float("inf"),
    inside_of: Mapping[str, float] | None = None,
    between_of: Mapping[tuple[str, str], float] | None = None,
) -> Devices:
    """The GPUs of some kinds, which fill servers in their order. Raises PlanningError: there are none."""
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
        inside_of=inside_of or {},
        between_of=between_of or {},
    )


Groups = tuple[tuple[int, ...], ...]
"""GPUs of the tensor-parallel group of each replica of a stage."""


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
        recompute: of every so-many-th layer only the input is kept for the backward; 0: all is kept.
    """

    stages: tuple[PlacedStage, ...]
    microbatch_size: int
    microbatches: int
    recompute: int = 0

    @classmethod
    def of(
        cls,
        bounds: Sequence[int],
        groups: Iterable[Groups],
        *,
        microbatch_size: int,
        microbatches: int,
        recompute: int = 0,
    ) -> Self:
        """The plan of stages cut at ``bounds``, 0 and L included, each on its ``groups``."""
        stages = tuple(
            PlacedStage(first_layer=first, end_layer=end, groups=of_stage)
            for (first, end), of_stage in zip(itertools.pairwise(bounds), groups, strict=True)
        )
        return cls(stages, microbatch_size, microbatches, recompute)

    def unsuited(self, layers: int, gpus: int) -> str | None:
        """Reason that it is no plan for so many layers and GPUs, and its remedy; None: it is one."""
        bounds = [0, *(stage.end_layer for stage in self.stages)]
        for number, stage in enumerate(self.stages):
            if stage.first_layer != bounds[number] or stage.end_layer <= stage.first_layer:
                return (
                    f"stage {number} has layers {stage.first_layer} to {stage.end_layer - 1}. "
                    f"To fix: begin with layer {bounds[number]}, one layer at least"
                )
        if bounds[-1] != layers:
            return f"they end with layer {bounds[-1] - 1} of {layers}. To fix: give each layer to a stage"
        used = [gpu for stage in self.stages for gpu in stage.gpus]
        if len(set(used)) < len(used) or not 0 <= min(used) <= max(used) < gpus:
            return f"they have GPUs {sorted(used)}. To fix: name each at most once, from 0 to {gpus - 1}"
        degrees = {len(group) for stage in self.stages for group in stage.groups}
        if len(degrees) > 1:
            return f"they have tensor degrees {sorted(degrees)}. To fix: as many GPUs in each group"
        return None

    @functools.cached_property
    def replicas(self) -> tuple[int, ...]:
        """Replicas by stage."""
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
        """Bounds of the stages in layers, 0 and L included."""
        return (0, *(stage.end_layer for stage in self.stages))

    @property
    def batch_size(self) -> int:
        """Samples of a step."""
        return self.microbatch_size * self.microbatches
