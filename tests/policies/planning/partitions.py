"""All partitions of a few layers, for comparison with every other one."""

import itertools
from collections.abc import Iterator

from ballast_policies.planning.partition import Partition


def all_partitions(layers: int, ranks: int) -> Iterator[Partition]:
    """Each way to cut ``layers`` into ``ranks`` stages."""
    for cuts in itertools.combinations(range(1, layers), ranks - 1):
        yield Partition(bounds=(0, *cuts, layers))
