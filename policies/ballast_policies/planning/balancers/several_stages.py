"""Balance of a pipeline whose ranks hold several stages each.

The largest stage no longer decides the step: small and large stages of one rank make up for each other,
but stages of one round of an interleaved schedule wait for each other.  So the schedule is played.

The search is local, over partitions with any cost function, e.g. the simulated step time: it is used where no
closed form applies, also for split backwards over slow links.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.memory.stage_bytes import ROUNDING
from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.schedule import Schedule
from ballast_policies.planning.schedules.simulate import simulate

_ACTIONS = 2_000, 50_000
"""Fewest and most actions played in one search; ranks wait for it, and 10,000 take about 0.1 s."""

_GLANCE = 60
"""Partitions whose unevenness is compared where a step must not wait for the search."""

_ACTIONS_A_STEP_SECOND = 20_000
"""A search takes about a hundredth of twenty steps."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StagedPipeline:
    """A schedule with several stages a rank, and what its layers cost.

    Attributes:
        forward, backward, optimizer: seconds per step of each layer, shape (L,).
        capacity: speed and memory by stage.
        taken: bytes of each rank under a partition; None: the sum of its stages'.
        rank_memory: bytes that each rank can hold, with ``taken``.
    """

    schedule: Schedule
    forward: Sequence[float]
    backward: Sequence[float]
    optimizer: Sequence[float]
    capacity: RankCapacity
    taken: Callable[[Partition], Sequence[float]] | None = None
    rank_memory: float = math.inf

    def step_seconds(self, partition: Partition) -> float:
        """Seconds per step under a partition, by playing the schedule."""
        microbatches, speeds = self.schedule.microbatches, self.capacity.speeds
        costs = StageCosts(
            forward=tuple((partition.loads(self.forward, speeds) / microbatches).tolist()),
            backward=tuple((partition.loads(self.backward, speeds) / microbatches).tolist()),
            update=tuple(partition.loads(self.optimizer, speeds).tolist()),
        )
        return simulate(self.schedule, costs).makespan

    def fits(self, partition: Partition) -> bool:
        """True if each rank can hold the layers of all its stages."""
        if self.taken is not None:
            return max(self.taken(partition)) <= self.rank_memory * ROUNDING
        if self.capacity.memory is None:
            return True
        taken = self.rank_sums(self.capacity.bytes_taken(partition))
        return bool((taken <= self.rank_sums(self.capacity.memory_array(partition.ranks))).all())

    def rank_sums(self, by_stage: np.ndarray) -> np.ndarray:
        """Sum over the stages of each rank, shape (ranks,)."""
        return np.bincount([ranks[0] for ranks in self.schedule.stage_ranks], by_stage, self.schedule.ranks)

    def balanced(self, partition: Partition, weights: Sequence[float] | None = None) -> Partition:
        """The partition with the shortest step that the search finds, never longer than the one given.

        All partitions are tried where they are few; else the search begins with the one in force, the
        most even stages and the most even ranks.

        ``weights``: what to make even over ranks in place of the step time, e.g. parameters, shape (L,).

        Raises:
            PlanningError: the search finds nothing that fits the memory.
        """
        seconds = self._seconds() if weights is None else weights
        starts = self._starts(partition, seconds, most_evaluations=400)
        if weights is not None:
            return min(starts, key=lambda start: self._unevenness(start, seconds))
        costs: dict[Partition, float] = {}

        def cost(candidate: Partition) -> float:
            if candidate not in costs:
                costs[candidate] = self.step_seconds(candidate) if self.fits(candidate) else float("inf")
            return costs[candidate]

        fewest, most = _ACTIONS
        actions = min(most, max(fewest, _ACTIONS_A_STEP_SECOND * self.step_seconds(partition)))
        evaluations = int(actions / sum(map(len, self.schedule.actions)))
        layers, stages = partition.layers, partition.ranks
        if math.comb(layers - 1, stages - 1) <= evaluations:
            for cut in itertools.combinations(range(1, layers), stages - 1):
                starts.append(Partition(bounds=(0, *cut, layers)))
        # From the best start first; from the others with the evaluations that it leaves.
        for start in sorted(dict.fromkeys(starts), key=cost):
            refine(start, cost, most_evaluations=max(1, evaluations - len(costs)))
        # Of equals the first, which is the one in force.
        return min(costs, key=costs.__getitem__)

    def evened(self, partition: Partition) -> Partition:
        """The best of the partition in force, the most even stages and the most even ranks.

        Where :meth:`balanced` begins its search: quick enough to be asked after each step.

        Raises:
            PlanningError: none of them fits the memory.
        """
        starts = self._starts(partition, self._seconds(), most_evaluations=_GLANCE)
        return min((start for start in starts if self.fits(start)), key=self.step_seconds, default=partition)

    def _starts(
        self, partition: Partition, seconds: Sequence[float], *, most_evaluations: int
    ) -> list[Partition]:
        starts = [partition]
        try:
            starts.append(exact_partition(seconds, partition.ranks, self.capacity))
        except PlanningError:
            # Stages that share a rank may fit its memory though each does not fit its part.
            if self.taken is None and not self.fits(partition):
                raise
        taken = self.taken
        if taken is not None and not any(map(self.fits, starts)):
            starts.append(refine(partition, lambda cut: max(taken(cut)), most_evaluations=most_evaluations))
            if not self.fits(starts[-1]):
                raise PlanningError(
                    f"{partition.layers} layers do not fit {self.schedule.ranks} ranks with "
                    f"{self.rank_memory:.0f} bytes: the fullest would have {max(taken(starts[-1])):.0f}"
                )
        return starts + [self._even_ranks(start, seconds, most_evaluations) for start in starts]

    def _seconds(self) -> list[float]:
        return [sum(parts) for parts in zip(self.forward, self.backward, self.optimizer, strict=True)]

    def _even_ranks(self, start: Partition, weights: Sequence[float], most_evaluations: int) -> Partition:
        return refine(
            start,
            lambda partition: self._unevenness(partition, weights),
            most_evaluations=most_evaluations,
        )

    def _unevenness(self, partition: Partition, weights: Sequence[float]) -> float:
        """The largest load of a rank; the squares, a thousandth of it at most, decide between equals."""
        if not self.fits(partition):
            return float("inf")
        loads = self.rank_sums(partition.loads(weights, self.capacity.speeds))
        largest = float(loads.max())
        return largest + 1e-3 * float((loads**2).mean()) / largest if largest > 0 else 0.0


def refine(
    partition: Partition, cost: Callable[[Partition], float], *, most_evaluations: int = 400
) -> Partition:
    """A partition of no greater cost: neighbours are tried in turn, and a better one is taken at once.

    Neighbours shift one boundary, or several next to one another, by one layer. The result has no better
    neighbour, unless the evaluations ended the search.

    ``cost``: infinite for a partition that is not allowed; evaluated at most ``most_evaluations`` times.
    """
    best, value, spent = partition, cost(partition), 1
    shifts = _shifts(partition.ranks)
    tried_in_vain = 0
    for first, last, shift in itertools.cycle(shifts):
        if tried_in_vain == len(shifts) or spent >= most_evaluations:
            break
        tried_in_vain += 1
        # A shift that helped is tried again before the next one.
        while (neighbour := _shifted(best, first, last, shift)) and spent < most_evaluations:
            spent += 1
            found = cost(neighbour)
            # Rounding errors do not count as progress.
            if not found < value * (1 - 1e-12):
                break
            best, value, tried_in_vain = neighbour, found, 0
    return best


def _shifts(ranks: int) -> list[tuple[int, int, int]]:
    """First and last boundary, and the layers they move by: single boundaries first."""
    return [
        (first, first + more, shift)
        for more in range(ranks - 1)
        for first in range(1, ranks - more)
        for shift in (-1, 1)
    ]


def _shifted(partition: Partition, first: int, last: int, shift: int) -> Partition | None:
    """The neighbour, or None where a rank would be left without a layer."""
    bounds = list(partition.bounds)
    for boundary in range(first, last + 1):
        bounds[boundary] += shift
    grows = all(before < after for before, after in itertools.pairwise(bounds))
    return Partition(bounds=tuple(bounds)) if grows else None
