"""The speed of a gang by its size: bubble, uneven layers, schedules."""

import pytest
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.schedules.registry import SCHEDULES
from ballast_policies.planning.step_time import predict_step_seconds
from ballast_policies.throughput.by_size import PipelineShape, relative_speed, rounded
from hypothesis import given
from hypothesis import strategies as st


@given(st.lists(st.floats(0.01, 10.0), min_size=2, max_size=12), st.integers(1, 16), st.data())
def test_measured_layers_are_cut_and_timed_as_the_planner_does(seconds, microbatches, data):
    """The closed form over the exact partition."""
    positions = data.draw(st.integers(1, len(seconds)))
    shape = PipelineShape(schedule="1F1B", microbatches=microbatches, layer_seconds=tuple(seconds))

    def step(ranks: int) -> float:
        return predict_step_seconds(exact_partition(seconds, ranks).loads(seconds), microbatches)

    assert relative_speed(shape, positions) == pytest.approx(step(1) / step(positions))


@pytest.mark.parametrize("schedule", SCHEDULES.builtin)
def test_more_ranks_are_faster_and_less_than_in_proportion(schedule):
    """By every schedule; those without a flush are in proportion."""
    kind = SCHEDULES[schedule]
    shape = PipelineShape(
        schedule=schedule, microbatches=16, stages_per_rank=kind.stages_on_a_rank(), layers=64
    )
    speeds = [relative_speed(shape, ranks) for ranks in (1, 2, 4, 8)]
    assert speeds == sorted(speeds)
    for ranks, speed in zip((1, 2, 4, 8), speeds, strict=True):
        assert speed <= ranks + 1e-9
        assert speed < ranks or ranks == 1 or kind.asynchronous


def test_layers_that_do_not_divide_leave_a_rank_with_more_of_them():
    """Seven layers over six ranks are no faster than over four."""
    shape = PipelineShape(schedule="1F1B", microbatches=8, layers=7)
    assert relative_speed(shape, 6) == pytest.approx(relative_speed(shape, 4))


def test_an_unknown_schedule_and_one_too_large_to_play_have_the_bubble_of_1f1b():
    """A schedule of another distribution that is not installed here, or a thousand ranks."""
    known = PipelineShape(schedule="1F1B", microbatches=8)
    assert relative_speed(PipelineShape(schedule="their.own", microbatches=8), 4) == relative_speed(known, 4)
    huge = PipelineShape(schedule="ZeroBubbleH1", microbatches=4096)
    assert 800 < relative_speed(huge, 1024) < 1024


def test_layers_are_told_apart_by_two_digits():
    """So that a new measurement is mostly the same shape."""
    assert rounded((1.0, 2.0, 3.01)) == rounded((1.001, 2.0, 3.0)) == (0.17, 0.33, 0.5)
    assert rounded(()) == rounded((0.0,)) == rounded((float("inf"), 1.0)) == ()
