"""Ranks that join a running job know and do what the others do; those that leave it are not missed."""

import json
import shutil

import pytest

from tests.support.changes import SHORT, change
from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import EVALUATED, Gates
from tests.support.jobs import small_job
from tests.support.plans import local_plan
from tests.support.replans import grow, stages_at
from tests.support.waiting import eventually

pytestmark = pytest.mark.processes

USERS = "tests.trainer.models.users_module"
TENSOR = {
    "parallelism": {"tensor": 2},
    "dynamics": [{"kind": "freezing", "everySteps": 1, "freezing": {"criterion": "gradientNorm"}}],
}
EXPERTS = {
    "parallelism": {"data": 2},
    "dynamics": [{"kind": "mixtureOfExperts", "experts": {"parallel": True}}],
}
SHARED = {"parallelism": {"data": 2, "zeroStage": 3}}
ALONE = {"dynamics": [{"kind": "mixtureOfExperts"}]}
"""The experts of a job with one replica cannot be shared; they compute the same."""


@pytest.mark.parametrize(
    ("fields", "reference"),
    first_daily([(TENSOR, TENSOR), (EXPERTS, ALONE), (SHARED, {})]),
    ids=["tensor", "experts", "ZeRO-3"],
)
def test_a_job_that_grows_keeps_the_curve(pods, small_config, same_curve, tmp_path, fields, reference):
    """Ranks join a group that was all of the job: its layers communicate over the new groups."""
    config = small_config(totalSteps=6, **fields)
    config["model"]["layers"] = 4
    config["pipeline"] = {"microbatches": 4, "globalBatchSize": 4}
    names = ["job-1-0", "job-1-1"]
    gates = Gates(tmp_path / "gates", 3)
    folder, several = tmp_path / "channel", {"BALLAST_POD_RANKS": "2"}
    first, grown = (local_plan(names[:n], epoch=n, network=18, ranks_per_pod=2) for n in (1, 2))
    pods.start_job(folder, gates.hold(config), first, several)
    pods.wait_for_step(2, names[0])
    grow(pods, folder, grown, several)
    gates.open()
    same_curve(pods, {**config, **reference}, names[0])
    (grew,) = pods.events("grow", names[0])
    assert (grew["ranks_before"], grew["ranks_after"]) == (2, 4)


def test_ranks_that_join_keep_the_curve(pods, small_config, same_curve, tmp_path):
    """A pod joins where a rebalance, evaluation and checkpoint are due, and saves its part from there on."""
    config = small_config(totalSteps=8, rebalance={"enabled": True, "everySteps": 1})
    saved = {"checkpoint": {"path": str(tmp_path / "saved"), "everySteps": 1, "keep": 8}}
    gates = Gates(tmp_path / "gates", 5)
    folder, names = tmp_path / "channel", ["job-1-0", "job-1-1", "job-1-2"]
    held = gates.hold(config | saved | {"evaluation": EVALUATED})
    pods.start_job(folder, held, local_plan(names[:2], network=17))
    pods.wait_for_step(3, "job-1-0")
    grow(pods, folder, local_plan(names, epoch=2, network=17))
    gates.open()
    same_curve(pods, config, "job-1-0")
    (grew,) = pods.events("grow", "job-1-0")
    assert (grew["ranks_before"], grew["ranks_after"]) == (2, 3)
    evaluated = [event["step"] for event in pods.events("evaluation", "job-1-0")]
    assert evaluated == list(range(1, 9))
    for step in range(grew["step"], 9):
        checkpoint = tmp_path / "saved" / f"step-{step:08}"
        listed = json.loads((checkpoint / "manifest.json").read_text())["files"]
        assert {f"__{rank}_0.distcp" for rank in range(3)} <= set(listed)
        assert all((checkpoint / name).exists() for name in listed)


def test_ranks_that_join_know_of_a_checkpoint_that_failed(pods, small_config, same_curve, tmp_path):
    """It is tried again after the step in which they join, with their parts."""
    saved = tmp_path / "saved"
    config = small_config(totalSteps=12)
    gates = Gates(tmp_path / "gates", 5, 10)
    folder, names = tmp_path / "channel", ["job-1-0", "job-1-1", "job-1-2"]
    kept = {"path": str(saved), "everySteps": 10, "keep": 2, "asyncMode": "disabled"}
    pods.start_job(folder, gates.hold(config | {"checkpoint": kept}), local_plan(names[:2], network=22))
    eventually(gates.waiting, "the sixth step", pods.errors)
    shutil.rmtree(saved)
    saved.touch()
    gates.open()
    eventually(gates.waiting, "the eleventh step", pods.errors)
    saved.unlink()
    grow(pods, folder, local_plan(names, epoch=2, network=22))
    gates.open()
    same_curve(pods, config, names[0])
    assert [event["step"] for event in pods.events("checkpointFailed", names[0])] == [10]
    assert [event["step"] for event in pods.events("grow", names[0])] == [11]
    listed = json.loads((saved / "step-00000011/manifest.json").read_text())["files"]
    assert {f"__{rank}_0.distcp" for rank in range(3)} <= set(listed)


def test_ranks_join_in_the_evaluation_that_a_launch_begins_with(
    gang, pods, small_config, single_process_losses, tmp_path
):
    """And do with the others what is due after the step: here a rebalance, whose figures all gather."""
    fields = {
        "rebalance": {"enabled": True, "everySteps": 2},
        "checkpoint": {"path": str(tmp_path / "saved"), "everySteps": 4},
    }
    config = small_config(totalSteps=8, dynamics=TENSOR["dynamics"], **fields)
    gang({**config, "totalSteps": 4}, ranks=2).succeeded()
    gates = Gates(tmp_path / "gates", 1)
    data = gates.hold(config)["data"]
    evaluated = {"evaluation": {"everySteps": 4, "batches": 2, "data": data}}
    folder, names = tmp_path / "channel", ["job-1-0", "job-1-1", "job-1-2"]
    pods.start_job(folder, config | evaluated, local_plan(names[:2], network=16))
    eventually(gates.waiting, "the second batch of the evaluation", pods.errors)
    grow(pods, folder, local_plan(names, epoch=2, network=16))
    gates.open()
    pods.succeeded()
    reference = single_process_losses(config)
    assert_same_curve(pods.losses(names[0]), {step: reference[step] for step in range(5, 9)})
    assert [event["step"] for event in pods.events("grow", names[0])] == [4]


def test_ranks_that_join_read_on_where_the_others_are(gang, pods, tmp_path):
    """After steps of another size: inputs and targets, on the first rank and the last, are of one sample."""
    gates = Gates(tmp_path / "gates", 1)
    names = ["job-1-0", "job-1-1", "job-1-2"]

    def job(path, steps, batch, **fields):
        data = {"name": f"{USERS}:unequal", "args": {"samples": 40, "fewer": 0}}
        fields |= {"checkpoint": {"path": str(tmp_path / path)}, "data": data}
        return small_job(f"{USERS}:regression", steps=steps, microbatches=4, batch=batch, **fields)

    gang(job("one", 3, 4), ranks=2).succeeded()
    shutil.copytree(tmp_path / "one", tmp_path / "other")
    reference = gang(job("one", 8, 8), ranks=2)
    reference.succeeded()
    held = gates.hold_own(job("other", 8, 8))
    evaluated = {"everySteps": 3, "batches": 2, "data": held["data"]}
    folder = tmp_path / "channel"
    pods.start_job(folder, job("other", 8, 8, evaluation=evaluated), local_plan(names[:2], network=15))
    eventually(gates.waiting, "the second batch of the evaluation", pods.errors)
    grow(pods, folder, local_plan(names, epoch=2, network=15))
    gates.open()
    pods.succeeded()
    assert_same_curve(pods.losses(names[0]), reference.losses())
    assert [event["step"] for event in pods.events("grow", names[0])] == [3]


STEPS = {"startStep": 1, "endStep": 10, "everySteps": 2}
PLASTICITY = {"criterion": "plasticity", "threshold": 0.9, "patience": 1, "thawSteps": 3}
RESHAPED = {
    "all but early exit": {"dynamics": [change(kind, **STEPS) for kind in SHORT if kind != "earlyExit"]},
    "all but depths": {"dynamics": [change(kind, **STEPS) for kind in SHORT if kind != "mixtureOfDepths"]},
    "replicas and plasticity": {
        "parallelism": {"data": 2},
        "dynamics": [{"kind": "freezing", "everySteps": 1, "freezing": PLASTICITY}],
    },
}


@pytest.mark.parametrize("fields", first_daily(RESHAPED.values()), ids=RESHAPED)
def test_a_job_that_gives_ranks_back_and_takes_more_keeps_the_curve(
    pods, small_config, same_curve, tmp_path, fields
):
    """Of three positions one leaves while layers change; then two join, one of them by the name that left."""
    config = small_config(totalSteps=12, **fields)
    config["model"]["layers"] = 6
    config["pipeline"] = {"microbatches": 8, "globalBatchSize": 8}
    each = fields.get("parallelism", {}).get("data", 1)
    several = {"BALLAST_POD_RANKS": str(each)}
    names = [f"job-1-{number}" for number in range(4)]
    gates = Gates(tmp_path / "gates", 3, 6)
    folder = tmp_path / "channel"
    first = local_plan(names[:3], network=19, ranks_per_pod=each)
    channel = pods.start_job(folder, gates.hold(config), first, several)
    pods.wait_for_step(2, names[0])
    channel.publish(first.keep((names[0], names[2]), "another job waits"))
    pods.wait_for_plan(2, names[0])
    gates.open()
    assert pods.exit_code(names[1]) == 0, pods.errors()
    assert pods.termination(names[1])["reason"] == "Released"
    pods.wait_for_step(5, names[0])
    order = [names[0], names[2], names[1], names[3]]
    grow(pods, folder, local_plan(order, epoch=3, network=19, ranks_per_pod=each), several)
    gates.open()
    alone = {key: value for key, value in config.items() if key != "parallelism"}
    same_curve(pods, alone, names[0])
    changes = [pods.events(kind, names[0])[0] for kind in ("repack", "grow")]
    assert [(one["ranks_before"] // each, one["ranks_after"] // each) for one in changes] == [(3, 2), (2, 4)]


def test_a_plan_that_comes_in_the_last_step_is_not_followed(pods, small_config, tmp_path):
    """No step is left for which layers could move, and whose data a trial could read."""
    gates, names = Gates(tmp_path / "gates", 3), ["job-1-0", "job-1-1", "job-1-2"]
    config = gates.hold(small_config(totalSteps=4, training={"dataloaderNumWorkers": 1}))
    folder = tmp_path / "channel"
    pods.start_job(folder, config, local_plan(names[:2], network=21))
    pods.wait_for_step(3, names[0])
    grow(pods, folder, local_plan(names, epoch=2, network=21))
    gates.open()
    assert {pods.exit_code(name) for name in names[:2]} == {0}, pods.errors()
    assert not pods.events("grow", names[0])
    assert pods.termination(names[0])["reason"] == "Finished"


def test_a_planned_gang_has_the_splits_of_its_plans(pods, small_config, same_curve, tmp_path):
    """It gives a rank back and takes two; those are launched with another ``plan.layers`` than the first."""
    plain = small_config(totalSteps=12)
    plain["model"]["layers"] = 6
    plain["pipeline"] = {"microbatches": 8, "globalBatchSize": 8}
    splits = (1, 2, 3), (1, 5), (2, 1, 2, 1)
    configs = [plain | {"plan": {"layers": split}} for split in splits]
    names = [f"job-1-{number}" for number in range(5)]
    gates = Gates(tmp_path / "gates", 3, 6)
    folder = tmp_path / "channel"
    first = local_plan(names[:3], network=20)
    channel = pods.start_job(folder, gates.hold(configs[0]), first)
    pods.wait_for_step(2, names[0])
    smaller = first.keep(names[:2], "another job waits")
    channel.publish(smaller.replace(stages=stages_at((0, 1, 6), range(2))))
    pods.wait_for_plan(2, names[0])
    gates.open()
    pods.wait_for_step(5, names[0])
    (folder / "config.json").write_text(json.dumps(gates.hold(configs[2])))
    larger = local_plan((*names[:2], *names[3:]), epoch=3, network=20)
    grow(pods, folder, larger.replace(stages=stages_at((0, 2, 3, 5, 6), range(4))))
    gates.open()
    same_curve(pods, plain, names[0])
    changes = [pods.events(kind, names[0])[0] for kind in ("repack", "grow")]
    assert [tuple(e["endLayer"] - e["firstLayer"] for e in one["stages"]) for one in changes] == [*splits[1:]]
