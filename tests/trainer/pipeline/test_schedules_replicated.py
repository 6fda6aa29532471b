"""Stages on several ranks, round-robin, on real ranks; and what is refused before any rank starts."""

import pytest
from ballast_policies.planning.stages import first_stages
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.loop.migrate import LayerMove, plan_moves
from ballast_trainer.pipeline.layout import ScheduleRequest, holders_of

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
    first = gang({**config, "totalSteps": 5}, ranks=3)
    assert set(first.exit_codes().values()) == {0}, first.errors()
    second = gang(alone(config), ranks=1, options=["--single-process"])
    assert second.exit_codes() == {"rank-0": 0}, second.errors()
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
