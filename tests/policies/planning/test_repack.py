"""Repacking: the fewest ranks that keep the pace, exactly the best of them, whole pods, fewest bytes."""

import dataclasses
import importlib
import itertools
import random

import pytest
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.subset import PlaceBytes, RankSubsets
from ballast_policies.planning.partition import Partition, PlanningError, even_partition
from ballast_policies.planning.rank_capacity import RankCapacity
from ballast_policies.planning.repack import RepackDecision, kept_positions, repack
from ballast_policies.planning.step_time import predict_step_seconds
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.planning.partitions import all_partitions
from tests.support.examples import examples


@pytest.mark.slow
@examples(150)
@given(seconds=st.lists(st.floats(0.01, 10.0), min_size=2, max_size=7), data=st.data())
def test_the_kept_ranks_equal_brute_force(seconds, data):
    """Smallest largest load of all subsets with rank 0 and all cuts, then fewest bytes; memory holds, also
    where a layer takes the more bytes the earlier it is in the pipeline that stays, and places need more.
    """
    layers = len(seconds)
    ranks = data.draw(st.integers(2, min(5, layers)))
    start = data.draw(st.sampled_from(list(all_partitions(layers, ranks))))
    speeds = data.draw(st.lists(st.sampled_from([0.5, 1.0, 2.0]), min_size=ranks, max_size=ranks))
    sizes = data.draw(st.lists(st.integers(1, 9), min_size=layers, max_size=layers))
    memory = data.draw(st.lists(st.integers(1, 60), min_size=ranks, max_size=ranks))
    keep = data.draw(st.integers(1, ranks - 1))
    besides = data.draw(st.integers(0, 9))
    extra = data.draw(st.lists(st.integers(0, 9), min_size=layers, max_size=layers))

    def bytes_on(count):
        rows = [[sizes[j] + (count - i) * extra[j] for j in range(layers)] for i in range(count)]
        return PlaceBytes(rows=rows, reserved=[besides * (i % 2) for i in range(count)])

    rows, reserved = bytes_on(keep).rows, bytes_on(keep).reserved

    def candidates():
        for rest in itertools.combinations(range(1, ranks), keep - 1):
            kept = (0, *rest)
            for partition in all_partitions(layers, keep):
                held = [partition.loads(rows[i])[i] + reserved[i] for i in range(keep)]
                if all(held[i] <= memory[rank] for i, rank in enumerate(kept)):
                    loads = partition.loads(seconds, [speeds[rank] for rank in kept])
                    moved = sum(
                        sizes[layer]
                        for layer in range(layers)
                        if kept[partition.rank_of(layer)] != start.rank_of(layer)
                    )
                    yield float(loads.max()), moved

    every = list(candidates())
    subsets = RankSubsets(
        start,
        seconds,
        RankCapacity(speeds=speeds, layer_bytes=sizes, memory=memory),
        bytes_on=bytes_on,
    )
    found = subsets.best(keep)
    if not every:
        assert found is None
        return
    least = min(load for load, _ in every)
    loads = found.partition.loads(seconds, [speeds[rank] for rank in found.ranks])
    moved = sum(
        sizes[layer]
        for layer in range(layers)
        if found.ranks[found.partition.rank_of(layer)] != start.rank_of(layer)
    )
    assert found.ranks[0] == 0
    assert loads.max() == pytest.approx(least, rel=1e-9)
    assert moved <= min(m for load, m in every if load <= least * (1 + 1e-13))


@given(
    seconds=st.lists(st.floats(0.01, 10.0), min_size=3, max_size=7),
    speeds=st.lists(st.sampled_from([0.4, 1.0, 2.5]), min_size=3, max_size=4),
    microbatches=st.integers(1, 3),
    slower=st.floats(0.5, 2.5),
)
def test_ranks_of_different_speeds_are_released_wherever_some_choice_has_a_step_within_the_limit(
    seconds, speeds, microbatches, slower
):
    """Also where another choice than the one with the smallest largest load has it."""
    ranks, layers = min(len(speeds), len(seconds)), len(seconds)
    speeds, start = speeds[:ranks], even_partition(layers, ranks)
    before = predict_step_seconds(start.loads(seconds, speeds), microbatches)
    limit = before * slower
    fewest = min(
        (
            count
            for count in range(1, ranks)
            for rest in itertools.combinations(range(1, ranks), count - 1)
            for cut in all_partitions(layers, count)
            if predict_step_seconds(cut.loads(seconds, [speeds[rank] for rank in (0, *rest)]), microbatches)
            <= limit * (1 - 1e-9)
        ),
        default=ranks,
    )
    found = repack(
        RankSubsets(start, seconds, RankCapacity(speeds=speeds)),
        microbatches=microbatches,
        max_slowdown=0.0,
        reference_step_seconds=limit,
    )
    assert len(found.kept_ranks) <= fewest
    assert not found.repack or found.step_seconds_after <= limit


def test_a_larger_load_on_the_fast_rank_makes_a_shorter_step():
    """14 s on a rank four times as fast and 2 s on the other: 4 s a step of two microbatches, not 4.5."""
    found = repack(
        RankSubsets(
            Partition(bounds=(0, 2, 3, 4)), [3.0, 6.0, 5.0, 2.0], RankCapacity(speeds=[4.0, 2.0, 1.0])
        ),
        microbatches=2,
        min_ranks=2,
        max_slowdown=0.0,
        reference_step_seconds=4.0,
    )
    assert (found.kept_ranks, found.partition.bounds) == ((0, 1), (0, 3, 4))
    assert found.step_seconds_after == 4.0


def test_a_slow_rank_that_cannot_hold_the_next_layer_takes_the_one_before_it():
    """As many layers as possible on each rank would leave the slow rank before a heavy layer, with none."""
    seconds = [1.0, 1.0, 4.0, 1.0]
    start = Partition(bounds=(0, 1, 2, 3, 4))
    capacity = RankCapacity(speeds=[2.0, 0.5, 2.0, 1.0])
    found = RankSubsets(start, seconds, capacity).best(3)
    assert found.partition.loads(seconds, [capacity.speeds[rank] for rank in found.ranks]).max() == 2.0
    assert RankSubsets(start, seconds, capacity).best(4).partition == Partition(bounds=(0, 1, 2, 3, 4))


def test_memory_that_is_not_enough_is_the_reason():
    """An explicit "cannot", for each number of ranks."""
    decision = repack(
        RankSubsets(
            even_partition(4, 2),
            [1.0] * 4,
            RankCapacity(memory=[2, 2]),
            bytes_on=lambda ranks: PlaceBytes(rows=[[1] * 4] * ranks, reserved=[0] * ranks),
        ),
        microbatches=2,
        max_slowdown=9.0,
    )
    assert not decision.repack
    assert "1: the layers do not fit the memory of any 1 ranks with rank 0" in decision.why
    with pytest.raises(PlanningError, match="memory needs bytes"):
        RankSubsets(even_partition(4, 2), [1.0] * 4, RankCapacity(memory=[2, 2]))


def test_ranks_on_which_the_schedule_does_not_exist_are_passed_over():
    """Fewer are too slow, so one more stays; each number says why not."""
    start = RankSubsets(even_partition(8, 4), [1.0] * 8)
    odd = repack(start, microbatches=8, max_slowdown=0.7, schedulable=lambda ranks: ranks != 3)
    free = repack(start, microbatches=8, max_slowdown=0.7)
    assert free.partition.ranks == 2
    two = repack(start, microbatches=8, max_slowdown=0.7, schedulable=lambda ranks: ranks != 2)
    assert two.partition.ranks == 3
    assert odd.partition.ranks == 2
    none = repack(start, microbatches=8, max_slowdown=0.7, schedulable=lambda ranks: False)
    assert "3: the schedule does not exist on 3 ranks" in none.why


def test_a_target_is_met_exactly_or_not_at_all():
    """Algorithm 3 with a target: three of four ranks though two would do; none where three are too slow."""
    start = RankSubsets(even_partition(8, 4), [1.0] * 8)
    best = repack(start, microbatches=8, max_slowdown=5.0)
    assert best.partition.ranks == 1
    asked = repack(start, microbatches=8, max_slowdown=5.0, target_ranks=3)
    assert asked.partition.ranks == len(asked.kept_ranks) == 3
    assert asked.step_seconds_after == predict_step_seconds(asked.partition.loads([1.0] * 8), 8)
    assert not repack(start, microbatches=8, max_slowdown=0.1, target_ranks=3).repack
    assert not repack(start, microbatches=8, max_slowdown=5.0, target_ranks=4).repack
    assert not repack(start, microbatches=8, max_slowdown=5.0, target_ranks=2, min_ranks=3).repack


def instances(count=40):
    """Unlike layers and ranks, few microbatches and many, tight limits and loose ones."""
    generator = random.Random(5)
    for _ in range(count):
        ranks = generator.randint(2, 6)
        seconds = [generator.choice([0.1, 1.0, 1.0, 3.0]) for _ in range(generator.randint(ranks, 12))]
        speeds = (
            [generator.choice([1.0, 1.0, 2.0]) for _ in range(ranks)] if generator.random() < 0.5 else None
        )
        capacity = RankCapacity(speeds=speeds)
        options = {
            "microbatches": generator.choice([1, 4, 32]),
            "max_slowdown": generator.choice([0.0, 0.1, 1.0]),
        }
        yield RankSubsets(exact_partition(seconds, ranks), seconds, capacity), options


def test_counts_of_ranks_that_are_passed_over_could_not_have_been_enough(monkeypatch):
    """The bound changes no decision."""
    bounded = [repack(subsets, **options) for subsets, options in instances()]
    module = importlib.import_module("ballast_policies.planning.repack")
    monkeypatch.setattr(module, "_ranks_needed", lambda *_: 1)
    every = [repack(subsets, **options) for subsets, options in instances()]
    assert [(d.repack, d.kept_ranks, d.partition) for d in bounded] == [
        (d.repack, d.kept_ranks, d.partition) for d in every
    ]
    assert {d.repack for d in every} == {True, False}


def test_512_layers_on_64_ranks_that_are_all_needed_cost_no_search(monkeypatch):
    """The usual answer, asked for every few steps: no subset of the ranks is looked at."""
    monkeypatch.setattr(RankSubsets, "best", None)
    seconds = [0.01] * 512
    decision = repack(RankSubsets(exact_partition(seconds, 64), seconds), microbatches=256, max_slowdown=0.0)
    assert not decision.repack
    assert "over the limit" in decision.why


def decided(after, before):
    return RepackDecision(
        repack=True,
        kept_ranks=tuple(range(after.ranks)),
        partition=after,
        step_seconds_before=1.0,
        step_seconds_after=1.0,
        why="",
    )


def travelling(positions, before, after, layer_bytes):
    return sum(
        size
        for layer, size in enumerate(layer_bytes)
        if positions[after.rank_of(layer)] != before.rank_of(layer)
    )


@st.composite
def repacks(draw):
    block, old = draw(st.integers(1, 3)), draw(st.integers(2, 4))
    new = draw(st.integers(1, old - 1))
    layers = draw(st.integers(old * block, old * block + 6))

    def partition(ranks):
        cuts = draw(st.sets(st.integers(1, layers - 1), min_size=ranks - 1, max_size=ranks - 1))
        return Partition(bounds=(0, *sorted(cuts), layers))

    sizes = draw(st.lists(st.integers(1, 100), min_size=layers, max_size=layers))
    return block, partition(old * block), partition(new * block), sizes


@pytest.mark.slow
@examples(200)
@given(repacks(), st.data())
def test_whole_pods_stay_on_the_fewest_nodes_and_the_fewest_bytes_travel(case, data):
    """The first block of positions among them; as good as every choice that keeps the order."""
    block, before, after, sizes = case
    per_node = data.draw(st.integers(1, before.ranks)) if block == 1 else data.draw(st.integers(0, 3))
    nodes = [(f"n{at // per_node}",) for at in range(before.ranks)] if per_node else []
    kept = kept_positions(decided(after, before), before, block, sizes, nodes)
    if len(set(nodes)) < 2 and block == 1:
        assert kept == decided(after, before).kept_ranks
        return
    blocks = [kept[i : i + block] for i in range(0, len(kept), block)]
    assert kept[0] == 0
    assert list(kept) == sorted(kept)
    assert all(b[0] % block == 0 and b == tuple(range(b[0], b[0] + block)) for b in blocks)

    def badness(positions):
        return (
            len({name for at in positions for name in (nodes[at] if nodes else ())}),
            travelling(positions, before, after, sizes),
        )

    choices = itertools.combinations(range(1, before.ranks // block), after.ranks // block - 1)
    best = min(badness([old * block + k for old in (0, *others) for k in range(block)]) for others in choices)
    assert badness(kept) == best


def test_positions_that_fill_no_whole_pods_are_refused():
    before, after = even_partition(8, 4), even_partition(8, 3)
    with pytest.raises(PlanningError, match="no multiples of the 2 that fill whole pods"):
        kept_positions(decided(after, before), before, 2, [1.0] * 8)


def test_a_repack_frees_a_whole_node():
    """Of two nodes with two ranks each, the second node's ranks go, though fewer bytes would travel."""
    before, after = even_partition(8, 4), even_partition(8, 2)
    nodes = [("a",), ("a",), ("b",), ("b",)]
    assert kept_positions(decided(after, before), before, 1, [1.0] * 8, nodes) == (0, 1)
    nodes = [("a",), ("b",), ("a",), ("b",)]
    assert kept_positions(decided(after, before), before, 1, [1.0] * 8, nodes) == (0, 2)


def test_ranks_that_are_slower_than_the_decisions_do_not_stay_in_their_place():
    """Neither on fewer nodes nor in whole pods; where no pods are as fast but for noise, none stay."""
    before, after = even_partition(8, 4), even_partition(8, 2)
    decision, nodes = dataclasses.replace(decided(after, before), kept_ranks=(0, 2)), [("a",), ("a",), ("b",)]
    assert kept_positions(decision, before, 1, [1.0] * 8, [*nodes, ("b",)], [1, 0.5, 1, 1]) == (0, 2)
    before, after = even_partition(8, 6), even_partition(8, 4)
    decision = dataclasses.replace(decided(after, before), kept_ranks=(0, 1, 2, 4))
    assert kept_positions(decision, before, 2, [1.0] * 8, speeds=[1, 1, 0.5, 0.5, 1, 1]) == (0, 1, 4, 5)
    decision = dataclasses.replace(decision, kept_ranks=(0, 1, 3, 4))
    assert kept_positions(decision, before, 2, [1.0] * 8, speeds=[1, 1, 0.5, 1, 1, 0.5]) == ()
    assert kept_positions(decision, before, 2, [1.0] * 8, speeds=[1, 1, 0.5, 0.51, 0.51, 0.5])
