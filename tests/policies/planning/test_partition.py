"""Partitions, moves and repacks: optimal where promised, feasible always."""

import itertools

import numpy as np
import pytest
from ballast_lab.simulated_steps import simulated_step_seconds
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.fewest_moves import nearest_partition
from ballast_policies.planning.diffusion import diffuse
from ballast_policies.planning.launch import (
    first_stages,
    partition_of,
    stage_placement,
    stages_over,
    usable_stages,
)
from ballast_policies.planning.partition import (
    Partition,
    PlanningError,
    even_partition,
    imbalance,
    moved_layers,
)
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.schedules.registry import DEFAULT_STAGES_PER_RANK, SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import ScheduleError
from ballast_policies.planning.step_time import predict_step_seconds
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.planning.partitions import all_partitions
from tests.support.examples import examples

loads = st.lists(st.floats(0.01, 10.0), min_size=2, max_size=9)


@pytest.mark.slow
@examples(200)
@given(whole=st.booleans(), layers=st.integers(1, 9), data=st.data())
def test_the_exact_partition_equals_brute_force(whole, layers, data):
    """The smallest largest load, then the smallest sum: over heterogeneous ranks, within bytes by rank,
    where early ranks have more microbatches in flight; so has the nearest one. Whole seconds make many ties.
    """
    second = st.integers(1, 3) if whole else st.floats(0.01, 10.0)
    seconds = data.draw(st.lists(second, min_size=layers, max_size=layers))
    ranks = data.draw(st.integers(1, layers))
    speed = st.sampled_from([0.25, 0.5, 1.0, 3.0])
    speeds = data.draw(st.none() | st.lists(speed, min_size=ranks, max_size=ranks))
    row = st.lists(st.integers(1, 9), min_size=layers, max_size=layers)
    held = data.draw(st.lists(row, min_size=ranks, max_size=ranks))
    memory = data.draw(st.none() | st.lists(st.integers(1, 60), min_size=ranks, max_size=ranks))
    capacity = RankCapacity(speeds=speeds, memory=memory, rank_bytes=held)

    def fits(partition):
        taken = [partition.loads(of)[rank] for rank, of in enumerate(held)]
        return memory is None or (np.array(taken) <= np.array(memory)).all()

    fitting = list(filter(fits, all_partitions(layers, ranks)))
    if not fitting:
        with pytest.raises(PlanningError, match="do not fit"):
            exact_partition(seconds, ranks, capacity)
        return
    each = [p.loads(seconds, speeds) for p in fitting]
    largest = min(load.max() for load in each)
    least = min(load.sum() for load in each if load.max() <= largest * (1 + 1e-9))
    found = exact_partition(seconds, ranks, capacity)
    nearest = nearest_partition(even_partition(layers, ranks), seconds, capacity)
    for partition in (found, nearest):
        load = partition.loads(seconds, speeds)
        assert partition in fitting
        assert load.max() == pytest.approx(largest, rel=1e-9)
        assert speeds is None or load.sum() == pytest.approx(least, rel=1e-9)


@given(seconds=loads, data=st.data())
def test_diffusion_only_improves_and_every_step_is_a_chain_move(seconds, data):
    """Each step lowers the sorted loads; layers flow one way, over neighbouring boundaries."""
    ranks = data.draw(st.integers(2, len(seconds)))
    start = even_partition(len(seconds), ranks)
    passed = (start, *diffuse(start, seconds))
    for before, after in itertools.pairwise(passed):
        shifts = [b - a for a, b in zip(before.bounds, after.bounds, strict=True)]
        moved = [rank for rank, shift in enumerate(shifts) if shift]
        assert moved == list(range(moved[0], moved[-1] + 1))
        assert len({shift > 0 for shift in shifts if shift}) == 1
        assert sorted(after.loads(seconds), reverse=True) < sorted(before.loads(seconds), reverse=True)


@pytest.mark.slow
@examples(150)
@given(seconds=loads, data=st.data())
def test_diffusion_ends_at_the_optimum_also_with_heterogeneous_ranks_within_memory(seconds, data):
    """The smallest largest load that the exact balancer finds, from any partition that fits."""
    ranks = data.draw(st.integers(1, len(seconds)))
    speeds = data.draw(st.lists(st.sampled_from([0.25, 0.5, 1.0, 1.1, 3.7]), min_size=ranks, max_size=ranks))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=len(seconds), max_size=len(seconds)))
    start = even_partition(len(seconds), ranks)
    room = data.draw(st.none() | st.lists(st.integers(0, 20), min_size=ranks, max_size=ranks))
    held = start.loads(sizes)
    memory = None if room is None else [int(h) + extra for h, extra in zip(held, room, strict=True)]
    capacity = RankCapacity(speeds=speeds, memory=memory, layer_bytes=sizes)
    passed = (start, *diffuse(start, seconds, capacity))
    want = exact_partition(seconds, ranks, capacity).loads(seconds, speeds).max()
    assert passed[-1].loads(seconds, speeds).max() == pytest.approx(want, rel=1e-9)
    assert all(capacity.fits(partition) for partition in passed)


@given(loads=st.lists(st.integers(1, 50), min_size=2, max_size=40), data=st.data())
def test_diffusion_ends_within_the_published_number_of_rounds(loads, data):
    """60 N^2 ln(2 N) ln(S N^2 / g), N ranks, S the load, g = 1 its grain (DynMo supplement, lemma 2)."""
    ranks = data.draw(st.integers(2, min(8, len(loads))))
    rounds = len(diffuse(even_partition(len(loads), ranks), loads))
    assert rounds <= 60 * ranks**2 * np.log(2 * ranks) * np.log(sum(loads) * ranks**2)


@given(layers=st.integers(1, 12), data=st.data())
def test_the_layers_that_move_are_those_with_another_owner(layers, data):
    """Owners by the cuts themselves: as many cuts as are at or before a layer."""
    ranks = data.draw(st.integers(1, layers))
    cuts = st.lists(st.integers(1, max(1, layers - 1)), min_size=ranks - 1, max_size=ranks - 1, unique=True)
    before, after = (
        Partition(bounds=(0, *sorted(data.draw(cuts)), layers)) if ranks > 1 else even_partition(layers, 1)
        for _ in range(2)
    )
    first, then = (
        [sum(cut <= layer for cut in p.bounds) for layer in range(layers)] for p in (before, after)
    )
    assert moved_layers(before, after) == tuple(n for n in range(layers) if first[n] != then[n])


def test_fewer_layers_than_ranks_is_refused_with_the_numbers():
    """The reader learns both counts."""
    with pytest.raises(PlanningError, match="3 layers cannot be cut into 4 stages"):
        even_partition(3, 4)


@given(t=st.lists(st.floats(0.1, 3.0), min_size=1, max_size=6), m=st.integers(1, 10))
def test_the_simulated_step_is_never_longer_than_amps_closed_form(t, m):
    """The formula takes forward and backward for one task; 1F1B does no worse, and even stages equal it."""
    loads = np.array(t) * m
    simulated = 0.5 + simulated_step_seconds(loads / 3, loads * 2 / 3, m)
    assert simulated <= predict_step_seconds(loads, m, fixed_seconds=0.5) * (1 + 1e-9)
    assert simulated >= m * max(t) + 0.5 - 1e-9
    even = np.full(len(t), float(m))
    assert simulated_step_seconds(even / 3, even * 2 / 3, m) == pytest.approx(predict_step_seconds(even, m))


def test_imbalance_is_largest_over_mean_less_one():
    """B2's definition."""
    assert imbalance([2.0, 1.0, 1.0]) == pytest.approx(0.5)
    assert imbalance([0.0, 0.0]) == 0.0


def test_equal_sums_that_differ_by_rounding_give_the_same_partition():
    """The same layers in another unit are cut at the same places."""
    seconds = [0.1, 0.3, 0.2, 0.2, 0.1, 0.3, 0.1, 0.1, 0.4, 0.2]
    capacity = RankCapacity(speeds=[1.0, 0.5, 1.0, 0.5])
    found = {
        exact_partition([unit * each for each in seconds], 4, capacity).bounds
        for unit in (1.0, 1e-3, 7.3, 0.1, 1 / 3)
    }
    assert len(found) == 1


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_placement_is_that_of_the_schedule_that_is_built(schedule):
    """For each number of ranks and stages a rank, without building the schedule's actions."""
    for ranks in range(2, 6):
        for chunks in (None, 3) if SCHEDULES[schedule].stages_per_rank is None else (None,):
            built = build_schedule(
                schedule, ranks=ranks, microbatches=4 * ranks, chunks=chunks or DEFAULT_STAGES_PER_RANK
            )
            placement = stage_placement(schedule, ranks=ranks, stages_per_rank=chunks)
            assert placement == tuple(rank for (rank,) in built.stage_ranks)


def test_replicas_place_each_stage_behind_those_of_the_one_before():
    built = build_schedule("1F1B", ranks=4, microbatches=4, replicas=[2, 1, 1])
    assert stage_placement("1F1B", ranks=4, replicas=[2, 1, 1]) == tuple(h[0] for h in built.stage_ranks)


def test_one_rank_has_one_stage():
    """Whatever the schedule; an unknown schedule is refused."""
    assert {stage_placement(name, ranks=1) for name in SCHEDULES} == {(0,)}
    with pytest.raises(ScheduleError, match="is not one of"):
        stage_placement("2F2B", ranks=2)


@given(layers=st.integers(1, 60), data=st.data())
def test_the_first_stages_differ_by_one_layer_at_most(layers, data):
    """They cover the layers in order, so they make a plan, and the trainer uses them as they are."""
    count = data.draw(st.integers(1, layers))
    placement = tuple(range(count))
    stages = first_stages(layers, placement)
    sizes = [stage.end_layer - stage.first_layer for stage in stages]
    assert sum(sizes) == layers
    assert max(sizes) - min(sizes) <= 1
    assert usable_stages(stages, placement, layers) == stages


def test_a_partition_and_its_stages_are_two_forms_of_one_thing():
    partition = Partition(bounds=(0, 2, 5, 9))
    assert partition_of(stages_over(partition, (0, 1, 0))) == partition


@pytest.mark.parametrize(
    ("placement", "layers"), [((0, 1), 9), ((1, 0), 8), ((0,), 8)], ids=["layers", "order", "number"]
)
def test_stages_of_another_shape_are_not_used(placement, layers):
    """Other layers, another placement or another number of stages: the trainer makes its own."""
    assert usable_stages(first_stages(8, (0, 1)), placement, layers) is None
