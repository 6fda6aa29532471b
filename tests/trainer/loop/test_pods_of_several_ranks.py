"""Pods with several ranks: they train as single processes do, and are released whole."""

import pytest
from ballast_policies.contract import Ack, Proposal

from tests.support.gang import assert_same_curve
from tests.support.held_data import Gates
from tests.support.plans import local_plan
from tests.support.waiting import eventually

pytestmark = pytest.mark.processes

FREEZING = {"kind": "freezing", "startStep": 4, "endStep": 12, "everySteps": 4, "target": 0.5}


def test_two_pods_of_two_ranks_repack_to_one_and_keep_the_curve(
    pods, small_config, single_process_losses, tmp_path
):
    """Four ranks in two pods; one rank would do, so a whole pod leaves, the other trains on with two."""
    config = small_config(
        totalSteps=40,
        dynamics=[FREEZING],
        parallelism={"gpusPerPod": 2},
        repack={"enabled": True, "everySteps": 5, "maxSlowdown": 9.0},
    )
    folder = tmp_path / "channel"
    gates = Gates(tmp_path / "gates", 30)
    plan = local_plan(["job-1-0", "job-1-1"], network=40, ranks_per_pod=2)
    channel = pods.start_job(folder, gates.hold(config), plan, {"BALLAST_POD_RANKS": "2"})
    eventually((folder / "proposal.json").exists, "a repack is proposed", pods.errors)
    proposal = Proposal.from_json((folder / "proposal.json").read_text())
    assert (proposal.kept_pods, proposal.released_pods) == (("job-1-0",), ("job-1-1",))
    channel.publish(channel.read_plan().shrink(proposal))
    pods.wait_for_plan(2, "job-1-0")
    gates.open()
    assert pods.exit_codes() == {"job-1-0": 0, "job-1-1": 0}, pods.errors()
    assert pods.termination("job-1-1")["reason"] == "Released"
    (repacked,) = pods.events("repack", "job-1-0")
    assert (repacked["ranks_before"], repacked["ranks_after"]) == (4, 2)
    assert repacked["released"] == ["job-1-1"]
    assert Ack.from_json((folder / "ack.json").read_text()).epoch == 2
    assert_same_curve(pods.losses("job-1-0"), single_process_losses(config))


def test_local_ranks_that_fill_no_pods_are_refused(gang, small_config):
    """Three ranks in pods of two: named before the first step."""
    running = gang(small_config(parallelism={"gpusPerPod": 2}), ranks=3)
    assert set(running.exit_codes().values()) == {2}
    assert "parallelism.gpusPerPod: 3 ranks do not fill pods of 2" in running.errors()
