"""Local search over partitions with any cost function, e.g. the simulated step time.

Used where no closed form applies: several uneven stages a rank, split backwards over slow links.
"""

import itertools
from collections.abc import Callable, Iterator

from ballast_policies.planning.partition import Partition


def refine(
    partition: Partition, cost: Callable[[Partition], float], *, most_evaluations: int = 400
) -> Partition:
    """A partition of no greater cost: the best neighbour is taken until none is better.

    Neighbours shift one boundary, or several next to one another, by one layer.

    Args:
        partition: where to begin.
        cost: what to minimise; infinite for a partition that is not allowed.
        most_evaluations: of ``cost``, the first included.
    """
    best, value, spent = partition, cost(partition), 1
    while True:
        found, least = best, value
        for neighbour in _neighbours(best):
            if spent == most_evaluations:
                return found
            spent += 1
            tried = cost(neighbour)
            # Rounding errors do not count as progress.
            if tried < least * (1 - 1e-12):
                found, least = neighbour, tried
        if found is best:
            return best
        best, value = found, least


def _neighbours(partition: Partition) -> Iterator[Partition]:
    for first in range(1, partition.ranks):
        for last in range(first, partition.ranks):
            for shift in (-1, 1):
                bounds = list(partition.bounds)
                for boundary in range(first, last + 1):
                    bounds[boundary] += shift
                if all(a < b for a, b in itertools.pairwise(bounds)):
                    yield Partition(bounds=tuple(bounds))
