"""DeepSpeed's rule for balancing a pipeline, for comparison; not the default of Ballast.

``partition_balanced`` of DeepSpeed (deepspeed/runtime/utils.py) minimises the largest less the smallest
load with a table that keeps one answer for each (layers, stages).  The spread of a whole partition is
not determined by the best spread of its first part, so the answer can miss the optimum of this
objective, and of the largest load, which determines the time of a step.
"""

from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, even_partition


def deepspeed_partition(seconds: Sequence[float], ranks: int) -> Partition:
    """The partition that DeepSpeed's rule makes of these loads.

    Raises:
        PlanningError: fewer layers than ranks.
    """
    layers = len(seconds)
    even = even_partition(layers, ranks)
    if layers == ranks:
        return even
    S = np.concatenate([[0.0], np.cumsum(np.asarray(seconds, dtype=float))])
    largest = np.full((layers + 1, ranks + 1), np.inf)
    smallest = np.full((layers + 1, ranks + 1), np.inf)
    cut = np.zeros((layers + 1, ranks + 1), dtype=int)
    largest[0, 0] = 0.0
    for end in range(1, layers + 1):
        for stage in range(1, min(end, ranks) + 1):
            load = S[end] - S[:end]
            high = np.maximum(largest[:end, stage - 1], load)
            low = np.minimum(smallest[:end, stage - 1], load)
            # Of equal spreads DeepSpeed takes the last cut.
            first = end - 1 - int(np.argmin((high - low)[::-1]))
            largest[end, stage], smallest[end, stage] = high[first], low[first]
            cut[end, stage] = first
    bounds = [layers]
    for stage in range(ranks, 0, -1):
        bounds.append(int(cut[bounds[-1], stage]))
    return Partition(bounds=tuple(reversed(bounds)))
