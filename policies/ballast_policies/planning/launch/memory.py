"""Whether layers, as measured, fit the GPUs of a pipeline at a given number of positions.

Of layer l on position i with one stage, with n_i microbatches in flight, h_i of them between the halves of a
split backward, and v_i versions of the weights held there,

    bytes[i, l] = held_l + n_i activation_l + h_i (gradients_l + repeated_l) + (v_i - 1) weights_l

and besides, whatever the cut, a reserve for what depends on where it is: outputs and messages, and what is
there while one layer's backward runs. So a cut that fits here fits by the forecast (:mod:`.rank_bytes`),
which may find a little less. With several stages a rank, the forecast itself judges cuts.
"""

import dataclasses

import numpy as np

from ballast_policies.planning.launch.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.launch.position_bytes import bytes_on_positions, reserves
from ballast_policies.planning.launch.several_stages import bytes_of_cuts, smallest_cut

ROUNDING = 1 + 1e-9
"""What fits exactly fits, also after rounding."""


class MemoryNeed:
    """What a pipeline of ``layers`` needs of its GPUs, at any number of positions; answers are kept."""

    def __init__(self, layers: MeasuredLayers, form: PipelineForm) -> None:
        """``form``: of any number of positions."""
        self.layers = layers
        self._form = form
        self._fits: dict[tuple[int, float], bool] = {}
        self._least: dict[int, float] = {}

    def fits(self, positions: int, memory: float) -> bool:
        """Whether there is a cut of the layers with which every position fits ``memory`` bytes.

        True where the layers' bytes were not measured, and where there are fewer layers than positions: then
        something else is wrong.
        """
        asked = positions, memory
        if asked not in self._fits:
            self._fits[asked] = self._unknown(positions) or self._fit(positions, memory)
        return self._fits[asked]

    def least(self, positions: int) -> float:
        """Bytes of the fullest position under the best cut for memory, to a thousandth; 0: unknown."""
        if positions not in self._least:
            self._least[positions] = self._found_least(positions)
        return self._least[positions]

    def _found_least(self, positions: int) -> float:
        if self._unknown(positions):
            return 0.0
        form = self._at(positions)
        taken = bytes_of_cuts(self.layers, form)
        if taken is not None:
            return max(taken(smallest_cut(self.layers, form, lambda cut: max(taken(cut)))))
        rows, reserve = bytes_on_positions(self.layers, form), reserves(self.layers, form)
        low, high = 0.0, float((rows.sum(axis=1) + reserve).max())
        while high - low > high / 1000:
            middle = (low + high) / 2
            low, high = (low, middle) if _fits(rows, middle - reserve) else (middle, high)
        return high

    def _fit(self, positions: int, memory: float) -> bool:
        form = self._at(positions)
        if bytes_of_cuts(self.layers, form) is not None:
            return self.least(positions) <= memory * ROUNDING
        return _fits(bytes_on_positions(self.layers, form), memory - reserves(self.layers, form))

    def _unknown(self, positions: int) -> bool:
        return not len(self.layers.held_bytes) >= max(1, positions)

    def _at(self, positions: int) -> PipelineForm:
        return dataclasses.replace(self._form, positions=positions)


def _fits(rows: np.ndarray, memory: np.ndarray) -> bool:
    """Whether consecutive parts of the layers, at least one each, are all within ``memory``, (positions,).

    The set of layers that the first positions may end with is followed from position to position: with
    rows that differ, the furthest end is not always the best.
    """
    count = rows.shape[1]
    limits = memory * ROUNDING
    if (limits < 0).any() or rows.min(axis=0).sum() > limits.sum():
        return False
    ends = np.zeros(count + 1, dtype=bool)
    ends[0] = True
    for row, limit in zip(rows, limits, strict=True):
        sums = np.concatenate([[0.0], np.cumsum(row)])
        furthest = np.searchsorted(sums, sums + limit, side="right") - 1
        steps = np.zeros(count + 2, dtype=np.int64)
        begins = np.flatnonzero(ends[:count])
        begins = begins[furthest[begins] > begins]
        np.add.at(steps, begins + 1, 1)
        np.add.at(steps, furthest[begins] + 1, -1)
        ends = np.cumsum(steps)[: count + 1] > 0
        if not ends.any():
            return False
    return bool(ends[count])
