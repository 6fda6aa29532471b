"""Where ranks hold several stages, looks, predictions and first stages go by the schedule that is played."""

import dataclasses

import pytest
from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.stages import partition_of, stages_over
from ballast_trainer.loop.progress import Progress
from ballast_trainer.loop.rebalance_monitor import RebalanceMonitor
from ballast_trainer.loop.replanning import (
    best_stages,
    predicted_step_seconds,
    staged_pipeline,
)

from tests.trainer.loop.test_rebalance import LAYERS, SECONDS, decided, job, run_of


def staged_job(bounds, *, schedule="ZeroBubbleV", seconds=SECONDS):
    """Two ranks with two stages each, whose layers were measured in eight steps."""
    training = job((0, 4, LAYERS), schedule=schedule, minGain=0.0)
    placement = training.placement(2)
    assert len(placement) == 4
    partition = dataclasses.replace(exact_partition(seconds, 4), bounds=bounds)
    training.stages = stages_over(partition, placement)
    training.profile.forget()
    for _ in range(8):
        training.profile.add([*(s / 3 for s in seconds), *(s * 2 / 3 for s in seconds), *[0.0] * LAYERS])
    return training


@pytest.mark.parametrize("schedule", ["ZeroBubbleV", "Interleaved1F1B"])
def test_a_look_is_due_only_where_the_balancer_moves_layers(schedule):
    """The same judge says what a step loses and what a move gains."""
    training = staged_job((0, 1, 2, 3, 8), schedule=schedule)
    monitor = RebalanceMonitor(training, Progress(training, run_of(training)))
    for _ in range(50):
        monitor.step_done()
    assert monitor.due()
    decision = decided(training, move_seconds=0.0)
    assert decision.rebalance
    training.stages = stages_over(decision.partition, training.placement(2))
    settled = RebalanceMonitor(training, Progress(training, run_of(training)))
    for _ in range(50):
        settled.step_done()
    assert not settled.due()


@pytest.mark.parametrize("schedule", ["ZeroBubbleV", "Interleaved1F1B", "LoopedBFS"])
def test_first_stages_over_other_ranks_have_the_shortest_step_played(schedule):
    """After a growth or a repack: never longer than that of the most even stages."""
    training = staged_job((0, 2, 4, 6, 8), schedule=schedule)
    costs, placement = training.profile.costs(), training.placement(2)
    played = staged_pipeline(training, costs, placement)
    stages = best_stages(training, costs, placement)
    assert tuple(stage.rank for stage in stages) == placement
    by_stage = exact_partition(costs.total, len(placement))
    assert played.step_seconds(partition_of(stages)) <= played.step_seconds(by_stage)
    assert predicted_step_seconds(training, costs, stages) == played.step_seconds(partition_of(stages))


def test_one_stage_a_rank_needs_no_schedule_played():
    """The closed form is exact enough, and at no cost."""
    training = job((0, 4, 8))
    assert staged_pipeline(training, training.profile.costs(), (0, 1)) is None
