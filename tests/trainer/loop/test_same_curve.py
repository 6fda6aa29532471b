"""However the layers move, the loss curve is that of the uninterrupted single process."""

import signal

import pytest
from ballast_policies.contract.messages import Ack, ExitCode, Proposal
from ballast_policies.planning.schedules.registry import trained_schedules
from ballast_trainer.pipeline.layout import ScheduleRequest

from tests.support.changes import SHORT, change
from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import EVALUATED, Gates
from tests.support.replans import replan, replan_at_random, stages_at
from tests.support.waiting import eventually

pytestmark = pytest.mark.processes

FREEZING = {"kind": "freezing", "startStep": 4, "endStep": 12, "everySteps": 4, "target": 0.5}
PRUNING = {"kind": "pruning", "startStep": 4, "endStep": 12, "everySteps": 2, "target": 0.95}


FLUSHING = trained_schedules(asynchronous=False)
ALONE_HERE = ("GPipe", "LoopedBFS")
"""Schedules whose curve no other daily test compares; ``test_executor.py`` has the gradients of all."""


@pytest.mark.parametrize("schedule", first_daily(sorted(FLUSHING, key=lambda s: s not in ALONE_HERE), 2))
@pytest.mark.parametrize("model", first_daily(["gpt", "recurrent"]))
def test_a_pipeline_learns_as_one_process_does(gang, small_config, same_curve, schedule, model):
    """Every schedule and model family gives the losses of the unpartitioned model, dropout on.

    The head's weight is the embedding's.
    """
    config = small_config(totalSteps=6)
    config["pipeline"]["schedule"] = schedule
    config["model"]["args"]["tied"] = True
    if model == "recurrent":
        config["model"] = {"name": "recurrent", "layers": 6, "args": {"dim": 24, "context": 8}}
    same_curve(gang(config, ranks=2), config)


@pytest.mark.parametrize("schedule", first_daily(["InterleavedZeroBubble", "Interleaved1F1B", "LoopedBFS"]))
def test_three_stages_a_rank_learn_as_one_process_does(gang, small_config, same_curve, schedule, tmp_path):
    """Six stages on two ranks, in turn, also when layers move."""
    config = small_config(totalSteps=12)
    config["pipeline"] |= {"schedule": schedule, "stagesPerRank": 3}
    placement = ScheduleRequest(name=schedule, ranks=2, microbatches=4, stages_per_rank=3).placement()
    assert placement == (0, 1, 0, 1, 0, 1)
    gates = Gates(tmp_path / "gates", 3, 6)
    running = gang(gates.hold(config), ranks=2, options=["--channel", str(tmp_path / "channel")])
    replan_at_random(running, tmp_path, gates, seed=5, epochs=2, placement=placement)
    same_curve(running, config)
    assert {len(line["stages"]) for line in running.lines("rank-0") if "event" not in line} == {6}


@pytest.mark.parametrize("dynamic", first_daily([FREEZING, PRUNING]), ids=["freezing", "pruning"])
def test_rebalance_and_repack_keep_the_curve(gang, small_config, same_curve, dynamic, tmp_path):
    """Layers get cheaper, move, and leave some of four ranks: 30 losses equal to 1e-5."""
    config = small_config(
        totalSteps=30,
        dynamics=[dynamic],
        rebalance={"enabled": True, "everySteps": 5, "minGain": 0.0},
        # Not when layers move, whose times are then measured anew: noise may move some at each look.
        repack={"enabled": True, "minStages": 2, "everySteps": 9, "maxSlowdown": 5.0},
    )
    gates = Gates(tmp_path / "gates", 3, 24)
    held = gates.hold(config) | {"evaluation": EVALUATED | {"everySteps": 7}}
    running = gang(held, ranks=4, options=["--channel", str(tmp_path / "channel")])
    lopsided = stages_at((0, 5, 6, 7, 8), (0, 1, 2, 3))
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=lopsided))
    eventually(lambda: running.events("rebalance"), "layers are rebalanced", running.errors)
    eventually(lambda: proposed(tmp_path) is not None, "a repack is proposed", running.errors)
    proposal = proposed(tmp_path)
    replan(running, tmp_path, gates, lambda plan: plan.shrink(proposal))
    same_curve(running, config)
    (repacked,) = running.events("repack")
    assert repacked["ranks_after"] == len(proposal.kept_pods) < 4
    assert sorted(repacked["released"]) == sorted(proposal.released_pods)
    assert min(repacked["step_seconds_before"], repacked["step_seconds_after"]) > 0
    ack = Ack.from_json((tmp_path / "channel/ack.json").read_text())
    assert (ack.epoch, ack.step) == (3, repacked["step"])
    assert ack.pause_ms == pytest.approx(repacked["pause_ms"])
    assert [event["step"] for event in running.events("evaluation")] == [7, 14, 21, 28, 30]


def test_layers_balanced_over_measured_links_keep_the_curve(
    gang, small_config, single_process_losses, tmp_path
):
    """The network-aware balancer measures each link in the running job, says so, and moves layers.

    Where links are slow for a while, on a busy machine, no move gains: the job lasts until one does.
    """
    config = small_config(
        totalSteps=100_000,
        rebalance={"enabled": True, "everySteps": 5, "minGain": 0.0, "balancer": "network"},
    )
    gates = Gates(tmp_path / "gates", 3)
    running = gang(gates.hold(config), ranks=3, options=["--channel", str(tmp_path / "channel")])
    lopsided = stages_at((0, 6, 7, 8), (0, 1, 2))
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=lopsided))
    (rebalanced, *_) = eventually(lambda: running.events("rebalance"), "layers move", running.errors)
    after = rebalanced["step"] + 3
    running.wait_for_step(after)
    running.signal("rank-0", signal.SIGTERM)
    assert set(running.exit_codes().values()) == {ExitCode.STOPPED}, running.errors()
    assert len(rebalanced["link_seconds"]) == 2
    assert min(rebalanced["link_seconds"]) > 0
    losses = {step: loss for step, loss in running.losses().items() if step <= after}
    assert_same_curve(losses, single_process_losses({**config, "totalSteps": after}))


def proposed(folder):
    """The newest proposal of epoch 2, if any."""
    path = folder / "channel/proposal.json"
    proposal = Proposal.from_json(path.read_text()) if path.exists() else None
    return proposal if proposal is not None and proposal.epoch == 2 else None


def all_kinds_but(left_out):
    """Early exits and depths exclude each other."""
    return [change(kind, startStep=2, endStep=11, everySteps=3) for kind in SHORT if kind != left_out]


CHANGED = {
    # Layers lose heads, freeze by what they tell apart, and let positions out by softmax.
    "ZeroBubbleV": [
        change("pruning", startStep=3, endStep=12, everySteps=3)
        | {"target": 0.6, "pruning": {"structure": "heads"}},
        {
            "kind": "freezing",
            "everySteps": 2,
            "freezing": {"criterion": "plasticity", "threshold": 0.9, "patience": 1, "thawSteps": 6},
        },
        {
            "kind": "earlyExit",
            "target": 0.6,
            "exits": {
                "confidence": "softmax",
                "vocabulary": 256,
                "rank": 8,
                "threshold": 0.02,
                "headWeight": 0.3,
            },
        },
    ],
}
for number, name in enumerate(FLUSHING):
    CHANGED.setdefault(name, all_kinds_but(("mixtureOfDepths", "earlyExit")[number % 2]))


@pytest.mark.parametrize(("schedule", "changes"), first_daily(CHANGED.items()), ids=CHANGED)
def test_every_schedule_keeps_the_curve_with_all_dynamic_cases_and_random_replans(
    gang, small_config, same_curve, schedule, changes, tmp_path
):
    """Several kinds at once, on every placement, while layers move."""
    config = small_config(totalSteps=16, dynamics=changes)
    config["model"]["args"]["context"] = 32
    config["pipeline"]["schedule"] = schedule
    gates = Gates(tmp_path / "gates", 3, 8)
    running = gang(gates.hold(config), ranks=2, options=["--channel", str(tmp_path / "channel")])
    placement = ScheduleRequest(name=schedule, ranks=2, microbatches=4).placement()
    replan_at_random(running, tmp_path, gates, seed=3, epochs=4, placement=placement)
    same_curve(running, config)
    assert running.events("migrate")
