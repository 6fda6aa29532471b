"""Stages of a plan: where each schedule places them, and the first partition of a job."""

import pytest
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.schedules.registry import DEFAULT_STAGES_PER_RANK, SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import ScheduleError
from ballast_policies.planning.stages import (
    first_stages,
    partition_of,
    stage_placement,
    stages_over,
    usable_stages,
)
from hypothesis import given
from hypothesis import strategies as st


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
