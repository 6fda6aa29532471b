"""Ranks that join a running job, under each layout and schedule, know and do what the others do."""

import dataclasses
import json
from types import SimpleNamespace

import pytest
from ballast_policies.contract import RENDEZVOUS_PORT, Directive
from ballast_trainer.channel.directory import DirectoryChannel
from ballast_trainer.distributed.joining import new_ranks_ready
from ballast_trainer.distributed.process_group import reach_store

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
ALONE = {"dynamics": [{"kind": "mixtureOfExperts"}]}
"""The experts of a job with one replica cannot be shared; they compute the same."""


def assert_same_curve(losses, reference, total):
    assert sorted(losses) == list(range(1, total + 1))
    assert max(abs(losses[step] - reference[step]) for step in reference) < 1e-5


@pytest.mark.parametrize(
    ("fields", "reference"), [(TENSOR, TENSOR), (EXPERTS, ALONE)], ids=["tensor", "experts"]
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
    grown = dataclasses.replace(
        local_plan(names, network=18, ranks_per_pod=2), epoch=2, directive=Directive.GROW
    )
    channel.publish(grown)
    for pod in names[1:]:
        pods.start_pod(pod, folder, several)
    store = reach_store(first.ranks[0].address, RENDEZVOUS_PORT, WAIT_SECONDS)
    running = SimpleNamespace(processes=[rank.process for rank in first.ranks], store=store)
    eventually(lambda: new_ranks_ready(running, grown), "the new ranks are there", pods.errors)
    pods.wait_for_plan(2, names[0])
    gates.open()
    assert set(pods.exit_codes().values()) == {0}, pods.errors()
    (grew,) = pods.events("grow", names[0])
    assert (grew["ranks_before"], grew["ranks_after"]) == (2, 4)
    assert_same_curve(pods.losses(names[0]), single_process_losses({**config, **reference}), 6)
