"""PipeDream's partitioner: stages, and how many ranks replicate each (dissertation 2.4.1).

A cluster of levels: level k joins m_k components of level k - 1 by links of B_k bytes/s; level 0 is
one GPU.  With T_l a layer's seconds (forward and backward), w_l its weight bytes, a_l its output bytes:

    T^k(i..j, m) = max(A^{k-1}(i..j, m_{k-1}), 2 (m - 1) sum of w_l / B_k) / m
    A^k(i..j, m) = min(T^k(i..j, m),
                       min over s, m' of max(T^k(i..s, m'), 2 a_s / B_k, A^k(s+1..j, m - m')))

with A^0 = sum of T_l and A^k(., 1) = A^{k-1}(., m_{k-1}).  The dissertation prints A^k without the
first alternative (one stage on all m), without which data parallelism alone could not be found, and
cuts off the last stage where this cuts off the first, which is the same minimum.
A is the seconds per microbatch of the slowest stage in the steady state.

Memory (which the dissertation takes into account without printing how): a stage of r ranks with a ranks
after it has n = ceil((a + r) / r) microbatches in flight (2.4.2), each with a version of the weights; the
rest is the formula of :mod:`ballast_policies.planning.memory`.  Since stages are cut off from the front,
the ranks after each are known.
"""

import dataclasses
import functools
from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.memory.moments import RUN_ALONE, stashed
from ballast_policies.planning.memory.rank_bytes import LayerSums
from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.planning.partition import PlanningError, sums_of
from ballast_policies.planning.planners.layout import PlacedStage


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    """One level of the network.

    Attributes:
        components: how many components of the level below it joins (m_k).
        bandwidth: bytes/s between them (B_k).
    """

    components: int
    bandwidth: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeviceMemory:
    """Memory of each GPU, and the bytes of the layers in it.

    Attributes:
        limit: bytes of a GPU.
        layers: their bytes.
    """

    limit: float
    layers: LayerSums


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipeDreamPlan:
    """A pipeline with replicated stages.

    Attributes:
        stages: by layer; together they have all GPUs, each of which is a replica.
        seconds_per_microbatch: of the slowest stage or transfer.
    """

    stages: tuple[PlacedStage, ...]
    seconds_per_microbatch: float

    @property
    def configuration(self) -> str:
        """Replicas of the stages as the dissertation writes them: ``15-1``."""
        return "-".join(str(stage.replicas) for stage in self.stages)


def plan_pipedream(
    layer_seconds: Sequence[float],
    weight_bytes: Sequence[float],
    output_bytes: Sequence[float],
    levels: Sequence[Level],
    memory: DeviceMemory | None = None,
) -> PipeDreamPlan:
    """The pipeline over all ranks whose slowest stage is fastest; O(sum over k of L^3 m_k^2).

    With a memory limit a level's table is solved once for each number of copies and of ranks after it.

    Args:
        layer_seconds: T, forward and backward of one microbatch, shape (L,).
        weight_bytes: w, shape (L,).
        output_bytes: a, activations after each layer, shape (L,); the last is not used.
        levels: from the fastest links to the slowest.
        memory: of a GPU; None: not limited.

    Raises:
        PlanningError: no layers, shapes that do not match, a level without components or bandwidth, or
            nothing fits the memory.
    """
    layers = len(layer_seconds)
    if not layers or len(weight_bytes) != layers or len(output_bytes) != layers:
        raise PlanningError(
            f"seconds, weights and outputs of {layers}, {len(weight_bytes)}, {len(output_bytes)} layers: "
            "all three need one value a layer"
        )
    for level in levels:
        if level.components < 1 or not level.bandwidth > 0:
            raise PlanningError(f"{level}: a level needs at least one component and a bandwidth above 0")
    solver = _Solver(layer_seconds, weight_bytes, output_bytes, levels, memory)
    return solver.plan()


class _Solver:
    """The recursion; tables are by (first layer, end layer), shape (L + 1, L + 1).

    ``copies`` replicas of all of a table's stages exist, and ``after`` ranks come after them.
    """

    def __init__(
        self,
        layer_seconds: Sequence[float],
        weight_bytes: Sequence[float],
        output_bytes: Sequence[float],
        levels: Sequence[Level],
        memory: DeviceMemory | None,
    ) -> None:
        self.layers, self.levels, self.memory = len(layer_seconds), tuple(levels), memory
        self.seconds, self.weights = _between(layer_seconds), _between(weight_bytes)
        self.outputs = np.asarray(output_bytes, dtype=float)
        self.sizes = [1]
        for level in levels:
            self.sizes.append(self.sizes[-1] * level.components)
        self.solved = functools.cache(self._solved)

    def plan(self) -> PipeDreamPlan:
        top = len(self.levels)
        value = float(self._table(top, 1, 0)[0, self.layers])
        if not np.isfinite(value):
            assert self.memory is not None
            raise PlanningError(
                f"{self.layers} layers do not fit {self.sizes[-1]} GPUs of {self.memory.limit:.4g} bytes "
                "with the weight versions and activations of the microbatches in flight. To fix: use more "
                "GPUs or more memory, or --planner best, which also recomputes"
            )
        ranks = tuple(range(self.sizes[-1]))
        return PipeDreamPlan(
            stages=tuple(self._stages(top, (ranks,), 0, 0, self.layers)), seconds_per_microbatch=value
        )

    def _table(self, level: int, copies: int, after: int) -> np.ndarray:
        """A of a whole component of ``level``."""
        if self.memory is None:
            copies, after = 1, 0  # They only matter to the memory.
        if level == 0:
            return self._one_gpu(copies, after)
        return self.solved(level, copies, after)[-1]

    def _one_gpu(self, copies: int, after: int) -> np.ndarray:
        if self.memory is None:
            return self.seconds
        alone = after + copies == 1
        active = -(-(after + copies) // copies)
        moments = [RUN_ALONE] if alone else stashed(active)
        every = np.arange(self.layers + 1)
        first, end = np.minimum(every[:, None], self.layers - 1), np.maximum(every, 1)
        first = np.minimum(first, end - 1)
        form = PipelineForm(schedule="PipeDream", positions=1, microbatches=1)
        taken = self.memory.layers.taken(np.array(moments, dtype=float), active, first, end, form)
        return np.where(taken <= self.memory.limit * ROUNDING, self.seconds, np.inf)

    def _single(self, level: int, replicas: int, left: int, copies: int, after: int) -> np.ndarray:
        """T: one stage on ``replicas`` of the ``left`` components that remain."""
        below = self.sizes[level - 1]
        inner = self._table(level - 1, copies * replicas, after + copies * (left - replicas) * below)
        exchange = 2 * (replicas - 1) * self.weights / self.levels[level - 1].bandwidth
        single: np.ndarray = np.maximum(inner, exchange) / replicas
        return single

    def _solved(self, level: int, copies: int, after: int) -> list[np.ndarray]:
        """A on 1, 2, ... of the level's components, the last ones of it."""
        tables: list[np.ndarray] = []
        send = 2 * self.outputs / self.levels[level - 1].bandwidth
        for left in range(1, self.levels[level - 1].components + 1):
            best = self._single(level, left, left, copies, after).copy()
            for first in range(1, left):
                single, rest = self._single(level, first, left, copies, after), tables[left - first - 1]
                for cut in range(1, self.layers):
                    head = np.maximum(single[:cut, cut], send[cut - 1])
                    value = np.maximum(head[:, None], rest[cut, None, cut + 1 :])
                    np.minimum(best[:cut, cut + 1 :], value, out=best[:cut, cut + 1 :])
            tables.append(best)
        return tables

    def _stages(
        self, level: int, components: tuple[tuple[int, ...], ...], after: int, first: int, end: int
    ) -> list[PlacedStage]:
        """Unfold the tables into stages of GPUs; ``components`` are copies of the same pipeline."""
        if level == 0:
            groups = tuple((gpu,) for component in components for gpu in component)
            return [PlacedStage(first_layer=first, end_layer=end, groups=groups)]
        copies, below = len(components), self.sizes[level - 1]
        tables = self.solved(level, *((copies, after) if self.memory is not None else (1, 0)))
        left, start = self.levels[level - 1].components, 0
        found: list[PlacedStage] = []
        while left:
            replicas, cut = self._first_stage(level, tables, left, copies, after, first, end)
            parts = tuple(
                component[index * below : (index + 1) * below]
                for component in components
                for index in range(start, start + replicas)
            )
            later = after + copies * (left - replicas) * below
            found += self._stages(level - 1, parts, later, first, cut)
            start, left, first = start + replicas, left - replicas, cut
        return found

    def _first_stage(
        self,
        level: int,
        tables: list[np.ndarray],
        left: int,
        copies: int,
        after: int,
        first: int,
        end: int,
    ) -> tuple[int, int]:
        """(components, end layer) of the best pipeline's first stage; of several, the most components."""
        value = tables[left - 1][first, end]
        if self._single(level, left, left, copies, after)[first, end] <= value:
            return left, end
        send = 2 * self.outputs / self.levels[level - 1].bandwidth
        cuts = np.arange(first + 1, end)
        for replicas in range(left - 1, 0, -1):
            single = self._single(level, replicas, left, copies, after)[first, cuts]
            whole = np.maximum(np.maximum(single, send[cuts - 1]), tables[left - replicas - 1][cuts, end])
            k = int(np.argmin(whole)) if len(whole) else 0
            if len(whole) and whole[k] <= value:
                return replicas, int(cuts[k])
        raise AssertionError("the tables have a way back")


def _between(values: Sequence[float]) -> np.ndarray:
    """[i, j]: sum of values i..j-1."""
    sums = sums_of(values)
    between: np.ndarray = np.maximum(sums[None, :] - sums[:, None], 0.0)
    return between
