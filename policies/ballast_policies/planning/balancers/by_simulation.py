"""Local search over partitions with any cost function, e.g. the simulated step time.

Used where no closed form applies: several uneven stages a rank, split backwards over slow links.
"""

import itertools
from collections.abc import Callable

from ballast_policies.planning.partition import Partition


def refine(
    partition: Partition, cost: Callable[[Partition], float], *, most_evaluations: int = 400
) -> Partition:
    """A partition of no greater cost: neighbours are tried in turn, and a better one is taken at once.

    Neighbours shift one boundary, or several next to one another, by one layer. The result has no better
    neighbour, unless the evaluations ended the search.

    Args:
        partition: where to begin.
        cost: what to minimise; infinite for a partition that is not allowed.
        most_evaluations: of ``cost``, the first included.
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
