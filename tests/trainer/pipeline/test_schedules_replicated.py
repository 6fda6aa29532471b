"""Stages on several ranks, round-robin, on real ranks; and what is refused before any rank starts."""

import pytest
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.planning.launch import first_stages
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.loop.migrate import LayerMove, plan_moves
from ballast_trainer.pipeline.layout import (
    LONGEST_RUN,
    ScheduleRequest,
    holders_of,
    next_drain,
    steps_between_drains,
)

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import Gates
from tests.support.replans import replan, stages_at

PLACES = (0, 1, 3)
"""First ranks of 1-2-1."""


@pytest.fixture
def replicated(small_config):
    """Makes a configuration with replicas of stages."""

    def make(replicas, *, schedule="1F1B", **fields):
        config = small_config(**{"totalSteps": 10, **fields})
        config["pipeline"].update(schedule=schedule, replicas=replicas)
        return config

    return make


def alone(config):
    """The same job without replicas, which one process knows nothing of."""
    pipeline = {key: value for key, value in config["pipeline"].items() if key != "replicas"}
    return {**config, "pipeline": pipeline}


@pytest.mark.processes
@pytest.mark.parametrize(
    ("replicas", "schedule"),
    first_daily(
        [
            ([1, 2, 1], "1F1B"),
            ([2, 1], "1F1B"),
            ([1, 2], "GPipe"),
            ([1, 3], "1F1B"),
            ([3, 1], "GPipe"),
            ([3], "1F1B"),
        ]
    ),
)
def test_replicas_of_a_stage_learn_as_one_process_does(gang, replicated, same_curve, replicas, schedule):
    """Dropout, AdamW and clipping by the norm over all, which counts each layer once.

    Of four microbatches, the first of three replicas has two, the others one each.
    """
    config = replicated(replicas, schedule=schedule)
    same_curve(gang(config, ranks=sum(replicas)), alone(config))


@pytest.mark.processes
def test_a_checkpoint_of_replicated_stages_is_loaded_by_one_process(
    gang, replicated, single_process_losses, tmp_path
):
    """A layer that several ranks hold is saved once; the curve continues without replicas."""
    config = replicated([2, 1], checkpoint={"path": str(tmp_path / "c")})
    first = gang({**config, "totalSteps": 5}, ranks=3).succeeded()
    second = gang(alone(config), ranks=1, options=["--single-process"]).succeeded()
    assert_same_curve({**first.losses(), **second.losses()}, single_process_losses(alone(config)))


@pytest.mark.processes
def test_layers_of_replicated_stages_move_and_freeze(gang, replicated, same_curve, tmp_path):
    """A new partition of 1-2-1, and freezing: a layer reaches every replica, and leaves every one it must."""
    freezing = {"kind": "freezing", "startStep": 4, "endStep": 12, "everySteps": 4, "target": 0.5}
    config = replicated([1, 2, 1], totalSteps=20, dynamics=[freezing])
    gates = Gates(tmp_path / "gates", 3)
    running = gang(gates.hold(config), ranks=4, options=["--channel", str(tmp_path / "channel")])
    moved = stages_at((0, 4, 5, 8), PLACES)
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=moved))
    same_curve(running, alone(config))
    (migrated,) = running.events("migrate")
    assert migrated["layers"] == [2, 3, 5]


def test_a_layer_comes_to_every_replica_that_does_not_have_it_yet():
    """From the first rank that holds it; a replica that keeps it gets nothing."""
    old, new = (stages_at(bounds, PLACES) for bounds in ((0, 2, 6, 8), (0, 4, 5, 8)))
    assert holders_of(old, [1, 2, 1]) == ((0,), (1, 2), (3,))
    assert plan_moves(old, new, [1, 2, 1]) == (
        LayerMove(layer=2, source=1, target=0),
        LayerMove(layer=3, source=1, target=0),
        LayerMove(layer=5, source=1, target=3),
    )
    assert plan_moves(new, old, [1, 2, 1]) == tuple(
        LayerMove(layer=layer, source=source, target=target)
        for layer, source in [(2, 0), (3, 0), (5, 3)]
        for target in (1, 2)
    )


def test_a_stage_with_replicas_starts_with_as_many_more_layers():
    """2-1 over nine layers: six and three."""
    placement = ScheduleRequest(name="1F1B", ranks=3, microbatches=4, replicas=(2, 1)).placement()
    assert placement == (0, 2)
    assert [stage.end_layer for stage in first_stages(9, placement, [2, 1])] == [6, 9]


@pytest.mark.parametrize(
    ("replicas", "schedule", "reason"),
    [
        ([5, 1], "1F1B", "a stage's 5 replicas are more than the microbatches, 4"),
        ([3, 1], "PipeDream", "4 microbatches do not divide over 3 replicas of a stage"),
    ],
)
def test_microbatches_that_replicas_cannot_share_are_refused(replicated, replicas, schedule, reason):
    """Before any rank starts: fewer than replicas; uneven shares where each update takes one of each."""
    config = replicated(replicas, schedule=schedule)
    config["training"] = {**config.get("training", {}), "clipNorm": 0.0}
    with pytest.raises(ConfigurationError, match=reason):
        ValidatedJob.from_mapping(config)


def test_replicas_that_do_not_add_up_to_the_ranks_are_refused(replicated):
    """The job has three."""
    job = ValidatedJob.from_mapping(replicated([2, 1]))
    with pytest.raises(ConfigurationError, match="need 3 ranks, there are 4"):
        job.check_ranks(4)


def test_2bw_with_fewer_microbatches_than_ranks_is_refused(small_config):
    """It would need a third version of the weights."""
    config = small_config()
    config["pipeline"]["schedule"] = "PipeDream2BW"
    with pytest.raises(ConfigurationError, match="more than two versions would be needed"):
        ValidatedJob.from_mapping(config).check_ranks(5)


PLAIN = {"totalSteps": 1000, "model": {"name": "gpt"}, "rebalance": {"enabled": False}}


def drains(fields, count=5):
    """The first steps at which the pipeline is empty."""
    config = JobConfig.from_mapping({**PLAIN, **fields})
    found = [next_drain(config, 0)]
    while len(found) < count and found[-1] < config.total_steps:
        found.append(next_drain(config, found[-1]))
    return found


@pytest.mark.parametrize(
    ("fields", "steps"),
    [
        ({}, [LONGEST_RUN, 2 * LONGEST_RUN, 3 * LONGEST_RUN, 4 * LONGEST_RUN, 5 * LONGEST_RUN]),
        ({"totalSteps": 50}, [50]),
        ({"rebalance": {"everySteps": 20}}, [20, 40, 60, 80, 100]),
        ({"repack": {"enabled": True, "everySteps": 30}}, [30, 60, 90, 120, 150]),
        ({"checkpoint": {"path": "/tmp/c", "everySteps": 25}}, [25, 50, 75, 100, 125]),
        ({"checkpoint": {"everySteps": 25}, "totalSteps": 100}, [100]),
        (
            {"rebalance": {"everySteps": 20}, "checkpoint": {"path": "/tmp/c", "everySteps": 30}},
            [20, 30, 40, 60, 80],
        ),
        (
            {
                "dynamics": [
                    {"kind": "freezing", "startStep": 5, "endStep": 12, "everySteps": 5, "target": 0.5}
                ]
            },
            [5, 10, 12, 12 + LONGEST_RUN, 12 + 2 * LONGEST_RUN],
        ),
    ],
)
def test_it_drains_where_all_ranks_must_stand_at_one_step(fields, steps):
    """Rebalances, repacks and checkpoints in force, changes of layers, the end; else every 128 steps."""
    assert drains(fields) == steps


def test_with_a_flush_every_step_fills_and_drains():
    """What the predicted time of a step is made from."""
    fields = {**PLAIN, "rebalance": {"everySteps": 20}}
    flowing = {**fields, "pipeline": {"schedule": "PipeDream2BW"}}
    assert steps_between_drains(JobConfig.from_mapping(fields)) == 1
    assert steps_between_drains(JobConfig.from_mapping(flowing)) == 20
