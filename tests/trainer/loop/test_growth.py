"""Ranks that join a running job, under each layout and schedule, know and do what the others do."""

import json
from types import SimpleNamespace

import pytest
from ballast_policies.contract import RENDEZVOUS_PORT, Directive
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.distributed.joining import new_ranks_ready
from ballast_trainer.distributed.process_group import reach_store

from tests.support.changes import SHORT, change
from tests.support.examples import first_daily
from tests.support.held_data import Gates
from tests.support.plans import local_plan
from tests.support.waiting import WAIT_SECONDS, eventually

pytestmark = pytest.mark.processes

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


def assert_same_curve(losses, reference, total):
    assert sorted(losses) == list(range(1, total + 1))
    assert max(abs(losses[step] - reference[step]) for step in reference) < 1e-5


def grow(pods, channel, before, plan, folder, environment=None):
    """Start the pods that are new in a plan, and wait until rank 0 has read it and they are there."""
    grown = plan.replace(directive=Directive.GROW)
    channel.publish(grown)
    for pod in sorted(set(grown.pods) - set(before.pods)):
        pods.start_pod(pod, folder, environment)
    store = reach_store(before.ranks[0].address, RENDEZVOUS_PORT, WAIT_SECONDS)
    running = SimpleNamespace(processes=[rank.process for rank in before.ranks], store=store)
    eventually(lambda: new_ranks_ready(running, grown), "the new ranks are there", pods.errors)
    pods.wait_for_plan(grown.epoch, before.pods[0])


@pytest.mark.parametrize(
    ("fields", "reference"),
    first_daily([(TENSOR, TENSOR), (EXPERTS, ALONE), (SHARED, {})]),
    ids=["tensor", "experts", "ZeRO-3"],
)
def test_a_job_that_grows_keeps_the_curve(
    pods, small_config, single_process_losses, tmp_path, fields, reference
):
    """Ranks join a group that was all of the job: its layers communicate over the new groups."""
    config = small_config(totalSteps=6, **fields)
    config["model"]["layers"] = 4
    config["pipeline"] = {"microbatches": 4, "globalBatchSize": 4}
    names = ["job-1-0", "job-1-1"]
    gates = Gates(tmp_path / "gates", 3)
    folder = tmp_path / "channel"
    folder.mkdir()
    channel = DirectoryChannel(folder)
    (folder / "config.json").write_text(json.dumps(gates.hold(config)))
    first = local_plan(names[:1], network=18, ranks_per_pod=2)
    channel.publish(first)
    several = {"BALLAST_POD_RANKS": "2"}
    for pod in names[:1]:
        pods.start_pod(pod, folder, several)
    pods.wait_for_step(2, names[0])
    grow(pods, channel, first, local_plan(names, epoch=2, network=18, ranks_per_pod=2), folder, several)
    gates.open()
    assert set(pods.exit_codes().values()) == {0}, pods.errors()
    (grew,) = pods.events("grow", names[0])
    assert (grew["ranks_before"], grew["ranks_after"]) == (2, 4)
    assert_same_curve(pods.losses(names[0]), single_process_losses({**config, **reference}), 6)


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
    pods, small_config, single_process_losses, tmp_path, fields
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
    folder.mkdir()
    channel = DirectoryChannel(folder)
    (folder / "config.json").write_text(json.dumps(gates.hold(config)))
    channel.publish(local_plan(names[:3], network=19, ranks_per_pod=each))
    for pod in names[:3]:
        pods.start_pod(pod, folder, several)
    pods.wait_for_step(2, names[0])
    fewer = channel.read_plan().keep((names[0], names[2]), "another job waits")
    channel.publish(fewer)
    pods.wait_for_plan(2, names[0])
    gates.open()
    assert pods.exit_code(names[1]) == 0, pods.errors()
    pods.wait_for_step(5, names[0])
    order = [names[0], names[2], names[1], names[3]]
    grow(pods, channel, fewer, local_plan(order, epoch=3, network=19, ranks_per_pod=each), folder, several)
    gates.open()
    assert set(pods.exit_codes().values()) == {0}, pods.errors()
    changes = [pods.events(kind, names[0])[0] for kind in ("repack", "grow")]
    assert [(one["ranks_before"] // each, one["ranks_after"] // each) for one in changes] == [(3, 2), (2, 4)]
    alone = {key: value for key, value in config.items() if key != "parallelism"}
    assert_same_curve(pods.losses(names[0]), single_process_losses(alone), 12)
