"""Fewest moves, slow links, mixed GPUs, and DeepSpeed's rule beside the exact partition."""

import itertools

import numpy as np
import pytest
from ballast_policies.planning.balancers.exact import exact_partition, fill_in_order, partition_by_rank
from ballast_policies.planning.balancers.fewest_moves import nearest_partition
from ballast_policies.planning.balancers.network import network_aware_partition, steady_period_seconds
from ballast_policies.planning.balancers.registry import deepspeed_partition
from ballast_policies.planning.balancers.several_stages import refine
from ballast_policies.planning.partition import PlanningError, even_partition, moved_layers
from ballast_policies.planning.pipeline_plan import arrange_ranks
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.builders.synchronous import one_forward_one_backward
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.simulate import simulate
from ballast_policies.planning.step_time import predict_step_seconds
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.planning.partitions import all_partitions

seconds = st.lists(st.floats(0.01, 10.0), min_size=2, max_size=9)


@given(loads=seconds, data=st.data())
def test_the_nearest_partition_moves_the_fewest_bytes(loads, data):
    """Equal to brute force over all partitions that are as good."""
    layers = len(loads)
    ranks = data.draw(st.integers(1, layers))
    sizes = data.draw(st.lists(st.integers(1, 99), min_size=layers, max_size=layers))
    start = data.draw(st.sampled_from(list(all_partitions(layers, ranks))))
    found = nearest_partition(start, loads, RankCapacity(layer_bytes=sizes))
    limit = exact_partition(loads, ranks).loads(loads).max() * (1 + 1e-9)

    def moved(partition):
        return sum(sizes[layer] for layer in moved_layers(start, partition))

    assert found.loads(loads).max() <= limit
    assert moved(found) <= min(
        moved(p) for p in all_partitions(layers, ranks) if p.loads(loads).max() <= limit
    )


@given(loads=seconds, microbatches=st.sampled_from([1, 4, 32]), data=st.data())
def test_over_heterogeneous_ranks_the_nearest_partition_has_the_shortest_step_of_the_most_even(
    loads, microbatches, data
):
    """Partitions with the same largest load differ in the time to fill the pipeline; bytes come after it."""
    layers = len(loads)
    ranks = data.draw(st.integers(1, layers))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=ranks, max_size=ranks))
    start = data.draw(st.sampled_from(list(all_partitions(layers, ranks))))
    capacity = RankCapacity(speeds=speeds)
    found = nearest_partition(start, loads, capacity)
    limit = exact_partition(loads, ranks, capacity).loads(loads, speeds).max() * (1 + 1e-9)

    def step(partition):
        return predict_step_seconds(partition.loads(loads, speeds), microbatches)

    even = [p for p in all_partitions(layers, ranks) if p.loads(loads, speeds).max() <= limit]
    shortest = min(map(step, even))
    assert found in even
    assert step(found) <= shortest * (1 + 1e-9)
    moved = [len(moved_layers(start, p)) for p in even if step(p) <= shortest * (1 + 1e-14)]
    assert len(moved_layers(start, found)) <= min(moved)


@pytest.mark.slow
@pytest.mark.parametrize("microbatches", [2, 4, 8])
def test_over_heterogeneous_ranks_filling_the_pipeline_counts_beside_the_slowest_rank(microbatches):
    """Within 1 % of the shortest step of all partitions; by the largest load alone it is longer."""
    random = np.random.default_rng(microbatches)
    longer = []
    for _ in range(20):
        loads = random.uniform(0.3, 1.0, 11)
        speeds = random.choice([0.5, 0.7, 1.0], 4).tolist()
        capacity, start = RankCapacity(speeds=speeds), even_partition(11, 4)

        def step(partition, speeds=speeds, loads=loads):
            return predict_step_seconds(partition.loads(loads, speeds), microbatches)

        shortest = min(map(step, all_partitions(11, 4)))
        longer.append(step(nearest_partition(start, loads, capacity)) / shortest - 1)
        found = nearest_partition(start, loads, capacity, microbatches=microbatches)
        assert step(found) <= shortest * 1.01
    assert max(longer) > 0.001


@pytest.mark.slow
def test_deepspeeds_rule_is_close_to_the_optimum_and_sometimes_misses_it():
    """Over 100 cases never below the exact partition, 1 % above it in the mean, not always equal."""
    random = np.random.default_rng(0)
    ratios = []
    for _ in range(100):
        loads = random.uniform(0.1, 1.0, int(random.integers(24, 57)))
        ranks = int(random.choice([2, 4, 8]))
        got = deepspeed_partition(loads, ranks).loads(loads).max()
        ratios.append(got / exact_partition(loads, ranks).loads(loads).max())
    assert min(ratios) >= 1 - 1e-12
    assert np.mean(ratios) < 1.01
    assert max(ratios) > 1.001


@pytest.mark.slow
@given(
    t=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=6),
    data=st.data(),
    share=st.floats(0.1, 0.9),
)
def test_steady_period_is_the_simulators(t, data, share):
    """Seconds between microbatches of a long 1F1B run, with any loads and transfers."""
    e = data.draw(st.lists(st.floats(0.0, 3.0), min_size=len(t) - 1, max_size=len(t) - 1))
    costs = StageCosts(
        forward=tuple(share * x for x in t),
        backward=tuple((1 - share) * x for x in t),
        transfer=tuple(e),
    )
    # The differences between circles of nearly the same length take long to show: any whole number
    # of periods of every window is one of 60 microbatches.
    short, long = (simulate(one_forward_one_backward(len(t), m), costs).makespan for m in (240, 300))
    assert (long - short) / 60 == pytest.approx(steady_period_seconds(t, e), rel=2e-2)


@given(loads=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=8), data=st.data())
def test_network_aware_partition_equals_brute_force(loads, data):
    """No contiguous partition has a shorter period."""
    layers = len(loads)
    ranks = data.draw(st.integers(1, layers))
    transfer = data.draw(st.lists(st.floats(0.0, 5.0), min_size=layers - 1, max_size=layers - 1))
    factors = data.draw(st.lists(st.floats(1.0, 4.0), min_size=ranks - 1, max_size=ranks - 1))

    def period(partition):
        links = [transfer[cut - 1] * f for cut, f in zip(partition.bounds[1:-1], factors, strict=True)]
        return steady_period_seconds(partition.loads(loads), links)

    found = network_aware_partition(loads, ranks, boundary_seconds=transfer, link_factors=factors)
    assert period(found) <= min(map(period, all_partitions(layers, ranks))) * (1 + 1e-6)


@given(data=st.data(), layers=st.integers(1, 7))
def test_the_partition_by_rank_equals_brute_force(data, layers):
    """Also where each rank has its own seconds for each layer."""
    ranks = data.draw(st.integers(1, layers))
    row = st.lists(st.floats(0.01, 5.0), min_size=layers, max_size=layers)
    matrix = np.array([data.draw(row) for _ in range(ranks)])

    def largest(partition):
        bounds = itertools.pairwise(partition.bounds)
        return max(matrix[rank, a:b].sum() for rank, (a, b) in enumerate(bounds))

    assert largest(partition_by_rank(matrix)) == pytest.approx(
        min(map(largest, all_partitions(layers, ranks))), rel=1e-9
    )


def test_mixed_gpus_are_arranged_so_that_each_type_has_the_layers_it_is_good_at():
    """The V100 is 4 x slower on the first half only: it goes to the end."""
    arrangement = arrange_ranks({"a100": [1.0] * 8, "v100": [4.0] * 4 + [1.0] * 4}, {"a100": 1, "v100": 1})
    assert arrangement.gpu_types == ("a100", "v100")
    assert arrangement.partition.bounds == (0, 4, 8)
    assert arrangement.loads == (4.0, 4.0)


@pytest.mark.slow
def test_swapping_types_finds_nearly_the_best_order():
    """Beyond the exhaustive search, over 12 models of four types: at most 10 % above it, 2 % in the mean."""
    random, ratios = np.random.default_rng(0), []
    for _ in range(12):
        by_type = {name: random.uniform(0.5, 5.0, 12) for name in "abcd"}
        gpus = {"a": 2, "b": 1, "c": 2, "d": 1}
        exhaustive, swapped = arrange_ranks(by_type, gpus), arrange_ranks(by_type, gpus, most_orders=1)
        ratios.append(max(swapped.loads) / max(exhaustive.loads))
    assert min(ratios) >= 1 - 1e-12
    assert max(ratios) <= 1.10
    assert np.mean(ratios) <= 1.02


def test_gpus_of_a_type_follow_each_other():
    """Alternating types would be faster here, and no gang could have them."""
    arrangement = arrange_ranks({"a": [1.0, 9.0, 1.0, 9.0], "b": [9.0, 1.0, 9.0, 1.0]}, {"a": 2, "b": 2})
    assert arrangement.gpu_types in {("a", "a", "b", "b"), ("b", "b", "a", "a")}


def test_mixed_gpus_with_little_memory_get_few_layers():
    """The fast GPU would take most layers, but holds only three."""
    arrangement = arrange_ranks(
        {"fast": [0.5] * 6, "slow": [1.0] * 6},
        {"fast": 1, "slow": 1},
        taken=lambda rank, first, end: end - first,
        memory_by_type={"fast": 3.0, "slow": 5.0},
    )
    counts = np.diff(arrangement.partition.bounds)
    assert dict(zip(arrangement.gpu_types, counts.tolist(), strict=True)) == {"fast": 3, "slow": 3}
    with pytest.raises(PlanningError, match="in any order tried"):
        arrange_ranks(
            {"fast": [0.5] * 6},
            {"fast": 1},
            taken=lambda rank, first, end: end - first,
            memory_by_type={"fast": 3.0},
        )


@given(loads=seconds, data=st.data())
def test_refining_by_a_cost_never_makes_it_worse(loads, data):
    """Whatever the start; with one evaluation it stays there."""
    ranks = data.draw(st.integers(1, len(loads)))
    start = even_partition(len(loads), ranks)

    def largest(partition):
        return float(partition.loads(loads).max())

    assert largest(refine(start, largest)) <= largest(start)
    assert largest(refine(start, largest, most_evaluations=1)) == largest(start)


@given(
    st.lists(st.sampled_from([0.0, 0.1, 0.5, 1.0, 1.7]), min_size=1, max_size=12).filter(any),
    st.lists(st.sampled_from([0.3, 1.0, 1.9, 3.0]), min_size=1, max_size=12),
)
def test_filling_ranks_in_the_order_of_their_speed_is_the_exact_partition(seconds, speeds):
    """The same largest load and the same sum of loads, ties and layers that take no time included."""
    speeds = sorted(speeds, reverse=True)[: len(seconds)]
    exact = exact_partition(seconds, len(speeds), RankCapacity(speeds=speeds)).loads(seconds, speeds)
    filled = fill_in_order(seconds, speeds).loads(seconds, speeds)
    assert filled.max() == pytest.approx(exact.max(), rel=1e-11)
    assert filled.sum() == pytest.approx(exact.sum(), rel=1e-11)
