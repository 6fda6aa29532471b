"""Which of several partitions with the smallest largest load the exact one is."""

import pytest
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.rank_capacity import RankCapacity
from hypothesis import assume, given
from hypothesis import strategies as st

from tests.policies.planning.partitions import all_partitions


@given(data=st.data(), layers=st.integers(1, 9))
def test_of_equal_largest_loads_the_exact_partition_has_the_smallest_sum(data, layers):
    """As brute force does, within memory that differs by rank; whole seconds make many ties."""
    seconds = data.draw(st.lists(st.integers(1, 3), min_size=layers, max_size=layers))
    ranks = data.draw(st.integers(1, layers))
    speeds = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 3.0]), min_size=ranks, max_size=ranks))
    row = st.lists(st.integers(1, 3), min_size=layers, max_size=layers)
    held = data.draw(st.lists(row, min_size=ranks, max_size=ranks))
    memory = data.draw(st.lists(st.integers(6, 30), min_size=ranks, max_size=ranks))
    capacity = RankCapacity(speeds=speeds, memory=memory, rank_bytes=held)
    fitting = [p for p in all_partitions(layers, ranks) if capacity.fits(p)]
    assume(fitting)
    found = exact_partition(seconds, ranks, capacity).loads(seconds, speeds)
    best = min((round(load.max(), 9), load.sum()) for load in (p.loads(seconds, speeds) for p in fitting))
    assert (found.max(), found.sum()) == pytest.approx(best, rel=1e-9)


def test_layers_that_do_not_lengthen_the_slowest_stage_are_on_fast_ranks():
    """Ten layers on two fast and two slow ranks: 4, 4, 1, 1 fill and drain sooner than 3, 3, 2, 2."""
    speeds = [1.0, 1.0, 0.5, 0.5]
    assert exact_partition([1.0] * 10, 4, RankCapacity(speeds=speeds)).bounds == (0, 4, 8, 9, 10)


def test_equal_sums_that_differ_by_rounding_give_the_same_partition():
    """The same layers in another unit are cut at the same places."""
    seconds = [0.1, 0.3, 0.2, 0.2, 0.1, 0.3, 0.1, 0.1, 0.4, 0.2]
    capacity = RankCapacity(speeds=[1.0, 0.5, 1.0, 0.5])
    found = {
        exact_partition([unit * each for each in seconds], 4, capacity).bounds
        for unit in (1.0, 1e-3, 7.3, 0.1, 1 / 3)
    }
    assert len(found) == 1
