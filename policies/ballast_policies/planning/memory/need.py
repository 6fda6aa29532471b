"""The need of memory of measured layers on the GPUs of a pipeline, at a given number of positions.

By the formula of :mod:`.rank_bytes`: a launch then has a cut that fits, and the trainer's forecast agrees.
Where ranks have several stages each, cuts are judged by the forecast.
"""

import dataclasses
from collections.abc import Callable

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.several_stages import refine
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.moments import schedule_of
from ballast_policies.planning.memory.rank_bytes import rank_bytes
from ballast_policies.planning.memory.stage_bytes import ROUNDING, stage_bytes, sums_of_layers
from ballast_policies.planning.partition import Partition, even_partition

MOST_PLAYED = 200_000
"""Actions that are played in search of a cut."""


def bytes_of_cuts(
    layers: MeasuredLayers, form: PipelineForm
) -> Callable[[Partition], tuple[float, ...]] | None:
    """Bytes of each rank by cut, as forecast; None: ranks have one stage, or the schedule is not known."""
    if form.positions == 1 or any(count != 1 for count in form.replicas):
        return None
    found = schedule_of(form)
    if found is None or found[0].stages <= found[0].ranks or found[0].stages > len(layers.held_bytes):
        return None
    schedule, facts = found
    sums = sums_of_layers(layers)
    return lambda cut: tuple(each.total for each in rank_bytes(cut, schedule, facts, sums, form))


def smallest_cut(
    layers: MeasuredLayers, form: PipelineForm, fullness: Callable[[Partition], float]
) -> Partition:
    """A cut of little ``fullness``: the even one or that of the smallest largest stage, improved.

    Its pipeline has several stages a rank, and as many layers at least.
    """
    found = schedule_of(form)
    assert found is not None
    schedule, facts = found
    kept = max(facts.stage_in_flight)
    activations = layers.activation_bytes or (0,) * len(layers.held_bytes)
    sizes = [held + kept * each for held, each in zip(layers.held_bytes, activations, strict=True)]
    starts = [even_partition(len(sizes), schedule.stages), exact_partition(sizes, schedule.stages)]
    actions = sum(len(row) for row in schedule.actions)
    return refine(min(starts, key=fullness), fullness, most_evaluations=max(2, MOST_PLAYED // actions))


MOST_CUTS = 20_000
"""Stages x layers, beyond which looking for a cut would take above a second; stages are even then."""


class MemoryNeed:
    """Memory that a pipeline of ``layers`` needs of its GPUs, at any number of positions; a cache."""

    def __init__(self, layers: MeasuredLayers, form: PipelineForm, cut: Partition | None = None) -> None:
        """``form``: of any number of positions; ``cut``: the only one that is launched, None: the best."""
        self.layers = layers
        self._form, self._cut = form, cut
        self._least: dict[int, float] = {}

    def fits(self, positions: int, memory: float) -> bool:
        """True if some partition of the layers lets every position fit ``memory`` bytes.

        True where the layers' bytes were not measured, and where there are fewer layers than positions: then
        something else is wrong.
        """
        return self.least(positions) <= memory * ROUNDING

    def least(self, positions: int) -> float:
        """Bytes of the fullest position under the best cut for memory; 0: unknown.

        Of several stages a rank under the best cut that a search finds; of many layers over many positions
        under the even one.
        """
        if positions not in self._least:
            self._least[positions] = self._found_least(positions)
        return self._least[positions]

    def _found_least(self, positions: int) -> float:
        count = len(self.layers.held_bytes)
        if not count >= max(1, positions):
            return 0.0
        form = dataclasses.replace(self._form, positions=positions)
        taken, cut = bytes_of_cuts(self.layers, form), self._cut
        if cut is not None and (cut.layers, cut.ranks) == (count, positions * form.stages_per_rank):
            return float(max(taken(cut) if taken else stage_bytes(self.layers, form).of_cut(cut)))
        if taken is not None:
            return max(taken(smallest_cut(self.layers, form, lambda cut: max(taken(cut)))))
        found = stage_bytes(self.layers, form)
        if count * positions > MOST_CUTS:
            return float(found.of_cut(even_partition(count, positions)).max())
        return found.least()
