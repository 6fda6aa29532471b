"""Operators killed with SIGKILL on a real API server, with trainers that are real processes."""

import pytest
from ballast_operator.history.store import History

from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]

SHRINKING = {"total": 18, "shrinkAt": 8, "keep": 1}


@pytest.mark.nightly
def test_an_operator_that_loses_its_lease_is_started_again_and_continues(stage, tmp_path):
    """It ends rather than write without the lease; its next life sees the job through."""
    with stage.operator() as life:
        stage.add_job("one", script={**SHRINKING, "finishFile": str(tmp_path / "finish")})
        eventually(lambda: stage.status("one").get("repacks"), "the job to repack")
        stage.take_lead()
        eventually(lambda: "NotLeader" in life.log.read_text(), "the operator to notice")
        (tmp_path / "finish").touch()
        stage.wait_for("one", "Succeeded")
    assert stage.status("one")["launches"] == 1
    assert not stage.status("one").get("restarts")


def test_a_second_replica_waits_and_takes_over_when_the_leader_dies(stage):
    """The follower only watches while the leader lives, and does everything after its death.

    It ends gracefully: the Lease is given back.
    """
    with stage.operator(die_after=4) as leader:
        eventually(lambda: _holder(stage), "a leader")
        with stage.operator() as follower:
            eventually(lambda: "listed" in follower.said, "the follower to fill its caches")
            assert "leader elected" not in follower.said
            stage.add_job("one", script={"total": 8})
            stage.wait_for("one", "Succeeded")
            eventually(lambda: leader.code == -9, "the leader's end to be told")
            assert follower.code is None
        assert stage.status("one")["launches"] == 1
        assert not stage.status("one").get("restarts")
        lease = stage.coordination.read_namespaced_lease("ballast-operator", stage.namespace)
        assert lease.spec.lease_transitions >= 1
    assert _holder(stage) == ""


def test_deleting_a_job_and_its_namespace_with_the_operator_dead_leaves_nothing_stuck(stage, tmp_path):
    """No finalizer of ours waits for anybody: ownership and the garbage collector do it.

    The next operator adds to history that the job is gone.
    """
    kept = tmp_path / "history.db"
    with stage.operator(history=kept):
        for name in ("one", "two"):
            stage.add_job(name, script={"total": 10_000})
            stage.wait_for(name, "Running")
        eventually(lambda: kept.exists() and len(History(kept).jobs()) == 2, "both in history")
    stage.delete("one")
    eventually(lambda: stage.job("one") is None, "the job to go")
    eventually(lambda: not stage.pods("one"), "its pods to go")
    for lister in (
        stage.core.list_namespaced_config_map,
        stage.core.list_namespaced_service_account,
        stage.coordination.list_namespaced_lease,
    ):
        eventually(
            lambda lister=lister: (
                not [
                    item.metadata.name
                    for item in lister(stage.namespace).items
                    if item.metadata.name in ("one", "one-plan", "one-trainer")
                ]
            ),
            "what it owned to go",
        )
    with stage.operator(history=kept):
        eventually(lambda: [job.name for job in History(kept).jobs(deleted=True)] == ["one"], "history")
    assert "two" in [job.name for job in History(kept).jobs(deleted=False)]
    stage.core.delete_namespace(stage.namespace)
    eventually(
        lambda: stage.namespace not in [n.metadata.name for n in stage.core.list_namespace().items],
        "the namespace to go, with a running job in it",
    )
    stage.core.create_namespace({"metadata": {"name": stage.namespace}})  # for the fixture to delete


def _holder(stage):
    leases = stage.coordination.list_namespaced_lease(stage.namespace).items
    found = [lease.spec.holder_identity for lease in leases if lease.metadata.name == "ballast-operator"]
    return found[0] if found else ""
