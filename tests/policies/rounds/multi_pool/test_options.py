"""Divisions of a gang over pools: the fastest that fits, in the order that fits."""

import dataclasses
import itertools

import numpy as np
import pytest
from ballast_policies.planning.launch import LaunchedPipeline
from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.rounds.divisions import best_parts, sizes_over_pools
from ballast_policies.rounds.gangs import MixedGang, PlannedSpeed
from ballast_policies.rounds.values import PoolPart
from ballast_policies.throughput.speeds import SpeedKey


def a_gang(*, sizes=(4,), layers=12, held=(), kept=(), **changes):
    form = PipelineForm(schedule="1F1B", positions=1, microbatches=8)
    known = MeasuredLayers(held_bytes=held, activation_bytes=kept)
    values = {"speeds": {"fast": 4.0, "slow": 2.0}, "base": 4, **changes}
    return MixedGang(pipeline=LaunchedPipeline(layers=known, count=layers, form=form), sizes=sizes, **values)


def part(pool, gpus):
    return PoolPart(pool=pool, gpu_type=pool, gpus=gpus)


ROOM = {"fast": ("fast", 2), "slow": ("slow", 6)}


def test_the_faster_type_gives_as_many_gpus_as_it_has():
    assert set(best_parts(a_gang(), ROOM)) == {part("fast", 2), part("slow", 2)}


def test_more_gpus_are_taken_where_they_make_it_faster():
    found = best_parts(a_gang(sizes=(4, 6, 8)), ROOM)
    assert sum(one.gpus for one in found) == 8


def test_nothing_is_found_above_a_speed_that_no_division_reaches():
    gang = a_gang()
    fastest = gang.speed(best_parts(gang, ROOM))
    assert best_parts(gang, ROOM, above=fastest) == ()
    assert best_parts(gang, ROOM, above=fastest * 0.9)


def test_the_order_is_the_one_in_which_the_memory_suffices():
    """A slow GPU holds one layer with up to two microbatches in flight: it comes last."""
    gang = a_gang(layers=4, held=(1,) * 4, kept=(1,) * 4, memory={"fast": 100.0, "slow": 3.0})
    assert best_parts(gang, ROOM) == (part("fast", 2), part("slow", 2))


def test_three_pools_are_used_where_no_two_hold_the_least_size():
    room = {"fast": ("fast", 2), "slow": ("slow", 1), "other": ("slow", 1)}
    found = best_parts(a_gang(), room)
    assert {one.pool: one.gpus for one in found} == {"fast": 2, "slow": 1, "other": 1}


def test_pods_with_several_gpus_are_not_divided():
    found = best_parts(a_gang(per_pod=2, sizes=(4, 6)), {"fast": ("fast", 2), "slow": ("slow", 4)})
    assert all(one.gpus % 2 == 0 for one in found)


def test_a_position_is_in_one_pool():
    """Four ranks share each, of tensor and data parallelism: those of a pool that fill none are left."""
    gang = a_gang(sizes=(8, 12), layers=12)
    gang = dataclasses.replace(gang, pipeline=dataclasses.replace(gang.pipeline, ranks_per_position=4))
    assert set(best_parts(gang, {"fast": ("fast", 7), "slow": ("slow", 11)})) == {
        part("fast", 4),
        part("slow", 8),
    }
    assert best_parts(gang, {"fast": ("fast", 3), "slow": ("slow", 7)}) == ()


def test_a_plan_allows_its_own_division_alone():
    """In its order, each type in one pool that has the GPUs; one pool alone is none."""
    gang = a_gang(planned={(("slow", 3), ("fast", 1)): ()})
    room = {"fast": ("fast", 4), "few": ("slow", 2), "slow": ("slow", 6)}
    assert best_parts(gang, room, one_pool=True) == (part("slow", 3), part("fast", 1))
    assert best_parts(gang, {"fast": ("fast", 4), "few": ("slow", 2)}, one_pool=True) == ()


def planned_gang(**changes):
    """Six GPUs are planned to be faster than four, and four slow ones alone the slowest."""
    plans = {
        (("fast", 2), ("slow", 2)): (PlannedSpeed(3.0, (8.0, 4.0)),),
        (("fast", 2), ("slow", 4)): (PlannedSpeed(4.0, (8.0, 6.0)),),
        (("slow", 4),): (PlannedSpeed(1.0, (8.0,)),),
    }
    return a_gang(sizes=(4, 6), planned=plans, **changes)


def test_of_mixes_with_plans_the_fastest_that_fits_is_taken():
    """By the planned speeds and the bytes of each part; the order is the plan's; nothing in between."""
    gang = planned_gang()
    assert best_parts(gang, ROOM) == (part("fast", 2), part("slow", 4))
    assert gang.speed(best_parts(gang, ROOM)) == 4.0
    assert best_parts(gang, {**ROOM, "slow": ("slow", 3)}) == (part("fast", 2), part("slow", 2))
    assert best_parts(gang, {**ROOM, "fast": ("fast", 1)}) == ()
    tight = planned_gang(memory={"fast": 8.0, "slow": 5.0})
    assert best_parts(tight, ROOM) == (part("fast", 2), part("slow", 2))
    assert (sizes_over_pools(gang, ROOM), sizes_over_pools(tight, ROOM)) == ([4, 6], [4])
    assert gang.speed([part("fast", 1), part("slow", 3)]) == gang.speed([part("slow", 3)]) == 0.0


@pytest.mark.parametrize("seed", range(20))
def test_the_fastest_planned_division_is_found_whatever_was_measured(seed):
    """Also where types are slower than planned, and mixes as fast as nobody planned."""
    draw = np.random.default_rng(seed)
    kinds = ("fast", "middle", "slow")
    mixes = [
        tuple((kind, count) for kind, count in zip(kinds, counts, strict=True) if count)
        for counts in itertools.product(range(4), repeat=3)
        if sum(counts) > 1
    ]
    plans = {mix: (PlannedSpeed(float(draw.uniform(1, 9)), (1.0,) * len(mix)),) for mix in mixes}
    ordered = sorted(plans.items(), key=lambda each: -each[1][0].steps_per_second)
    known = draw.choice(len(mixes), size=3, replace=False)
    gang = a_gang(
        sizes=tuple(range(2, 10)),
        planned=dict(ordered),
        speeds={"fast": 4.0, "middle": 3.0, "slow": 2.0},
        known_over_planned={"fast": float(draw.uniform(0.2, 3)), "slow": float(draw.uniform(0.2, 3))},
        measured={SpeedKey.of_types(mixes[number]): float(draw.uniform(1, 20)) for number in known},
    )
    room = {kind: (kind, int(draw.integers(0, 4))) for kind in kinds}
    fitting = [mix for mix in mixes if len(mix) > 1 and all(n <= room[kind][1] for kind, n in mix)]
    speeds = [gang.speed([part(kind, n) for kind, n in mix]) for mix in fitting]
    found = best_parts(gang, room)
    assert gang.speed(found) == max(speeds, default=0.0)
    assert sizes_over_pools(gang, room) == sorted({sum(n for _, n in mix) for mix in fitting})


def test_gpus_of_a_type_that_no_pool_has_are_taken_from_several_stage_by_stage():
    """The plan of two GPUs a stage is faster; three of each pool hold one of its stages, and a rest."""
    plans = {(("fast", 6),): (PlannedSpeed(5.0, (8.0,), 2), PlannedSpeed(4.0, (8.0,)))}
    gang = a_gang(sizes=(6,), planned=plans)

    def of(**gpus):
        return tuple(PoolPart(pool=pool, gpu_type="fast", gpus=count) for pool, count in gpus.items())

    odd = best_parts(gang, {"a": ("fast", 3), "b": ("fast", 3)})
    even = best_parts(gang, {"a": ("fast", 4), "b": ("fast", 3)})
    assert (odd, gang.speed(odd)) == (of(a=3, b=3), 4.0)
    assert (even, gang.speed(even)) == (of(a=4, b=2), 5.0)
    assert best_parts(gang, {"a": ("fast", 6), "b": ("fast", 3)}) == ()


def test_a_pool_without_the_memory_for_a_planned_mix_does_not_hide_one_that_has_it():
    """Nine pools of the type are roomier, and a long list of plans leaves few choices to each."""
    plans = {(("fast", 2), ("slow", 2)): (PlannedSpeed(3.0, (8.0, 4.0)),)}
    plans |= {(("fast", 2), ("slow", count)): (PlannedSpeed(1.0, (8.0, 4.0)),) for count in range(3, 35)}
    small = {f"small-{i}": ("fast", 4) for i in range(9)}
    room = {**small, "fast": ("fast", 2), **{f"slow-{i}": ("slow", 2) for i in range(4)}}
    gang = a_gang(sizes=(4,), planned=plans, memory=dict.fromkeys(small, 7.0))
    assert best_parts(gang, room) == (part("fast", 2), PoolPart(pool="slow-0", gpu_type="slow", gpus=2))


def test_one_pool_is_taken_in_place_of_a_planned_mix_only_with_a_plan_for_it():
    gang = planned_gang()
    assert best_parts(gang, {"slow": ("slow", 6)}, one_pool=True) == (part("slow", 4),)
    assert best_parts(gang, {"fast": ("fast", 6)}, one_pool=True) == ()


def test_what_a_mix_with_a_plan_has_reported_counts_where_it_fits():
    known = {SpeedKey.of_types([("fast", 2), ("slow", 4)]): 2.5}
    gang = planned_gang(measured=known)
    assert gang.speed([part("fast", 2), part("slow", 4)]) == 2.5
    assert best_parts(gang, ROOM) == (part("fast", 2), part("slow", 2))
    tight = dataclasses.replace(gang, memory={"slow": 5.0})
    assert tight.speed([part("fast", 2), part("slow", 4)]) == 0.0


def test_types_that_cannot_run_it_are_left_out():
    assert best_parts(a_gang(speeds={"fast": 4.0, "slow": 0.0}), ROOM) == ()
    assert best_parts(a_gang(speeds={"fast": 0.0, "slow": 0.0}), ROOM) == ()


def test_alike_gpus_in_two_pools_are_as_fast_as_in_one():
    gang = a_gang(speeds={"fast": 4.0})
    assert gang.speed((part("fast", 4),)) == pytest.approx(4.0)
    parts = (PoolPart(pool="a", gpu_type="fast", gpus=2), PoolPart(pool="b", gpu_type="fast", gpus=2))
    assert gang.speed(parts) == pytest.approx(4.0)


def test_what_the_gang_has_reported_counts_before_a_prediction():
    gang = a_gang(measured={SpeedKey.of_types([("fast", 2), ("slow", 2)]): 0.5})
    assert gang.speed((part("slow", 2), part("fast", 2))) == 0.5


def test_rank_0_is_on_the_faster_type_unless_the_other_order_wins():
    """A gang shrinks live only while rank 0 stays; a cut's rounding is no reason to move it."""
    for layers in range(8, 30):
        found = best_parts(a_gang(layers=layers), ROOM)
        other = found[::-1]
        gang = a_gang(layers=layers)
        assert found[0].pool == "fast" or gang.speed(found) > 1.01 * gang.speed(other)
