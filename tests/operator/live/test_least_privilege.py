"""What the operator and a trainer ask of a real API server, by its audit log, against what they may."""

import contextlib
from pathlib import Path

import pytest
from ballast_localcluster import LocalCluster
from ballast_operator.api.rbac import operator_rules, trainer_rules
from ballast_operator.local_operator import OPERATOR_NAME, OPERATOR_NAMESPACE

from tests.operator.live.conftest import Stage
from tests.support.access import Right, Use, account, granted, use
from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]

OPERATOR = account(OPERATOR_NAMESPACE, OPERATOR_NAME)
COORDINATION, RBAC = "coordination.k8s.io", "rbac.authorization.k8s.io"

RARELY_USED: dict[Right, str] = {
    ("get", "ballast.dev", "trainingjobs"): "after a lost answer, the status is read",
    ("get", "", "namespaces"): "only an operator of one namespace asks whether it exists",
    ("get", "", "pods"): "a pod whose name is taken is looked at, to see whose it is",
    ("get", "", "serviceaccounts"): "the same of the account",
    ("get", RBAC, "roles"): "the same of the role",
    ("get", RBAC, "rolebindings"): "the same of its binding",
    ("get", "", "persistentvolumeclaims"): "only where a job names one",
    ("get", "storage.k8s.io", "storageclasses"): "of a claim that is not bound",
    ("list", "", "events"): "looked at where pods have not started within their time, for pulls of images",
    ("patch", "", "serviceaccounts"): "brought up to date where an older operator made it",
    ("patch", RBAC, "roles"): "brought up to date, e.g. when trainers need another right",
    ("patch", RBAC, "rolebindings"): "brought up to date",
    **{
        (verb, "scheduling.k8s.io", "podgroups"): "where the API server has them"
        for verb in ("get", "create", "patch")
    },
    ("patch", COORDINATION, "leases"): "a trainer's right, which the operator grants and so must hold",
}
"""Rights that a life without faults and upgrades may not need, each with its reason."""


def test_the_operator_uses_what_it_is_granted_and_is_denied_nothing(
    stage: Stage, live_cluster: LocalCluster, tmp_path: Path
) -> None:
    """Through launch, shrink, preemption, deletion and hand-over; so do its jobs' trainers."""
    launch_shrink_preempt_delete_and_hand_over(stage, tmp_path)
    rights = granted(operator_rules())

    def used_by_operator() -> Use:
        found = use(live_cluster.audit_log, OPERATOR)
        assert rights - found.namespaces.keys() <= RARELY_USED.keys() <= rights
        return found

    # A request is answered before its line is in the log.
    operator = eventually(used_by_operator, "all rights to be used")
    assert operator.denied == []
    assert operator.namespaces.keys() <= rights
    # What it reads, it reads everywhere; jobs may be in any namespace.
    for resource in (("", "pods"), ("ballast.dev", "trainingjobs"), (COORDINATION, "leases")):
        assert "" in operator.namespaces["watch", *resource]

    def used_by_trainers() -> bool:
        used: set[Right] = set()
        for job in ("shrinks", "moves", "after"):
            trainer = use(live_cluster.audit_log, account(stage.namespace, f"{job}-trainer"))
            used |= trainer.namespaces.keys()
            assert trainer.namespaces.keys() < granted(trainer_rules(job))
            # The authorizer learns of roles by a watch: it may refuse a first request, and those after.
            assert set(trainer.denied) <= granted(trainer_rules(job))
            assert {one for each in trainer.namespaces.values() for one in each} == {stage.namespace}
        # Pods of short jobs may end before they ask for all.  The scripted trainer reads its plan again and
        # again; real ones watch it (tests/e2e/test_survives.py).
        assert granted(trainer_rules("moves")) - used == {("watch", "", "configmaps")}
        return True

    eventually(used_by_trainers, "the trainers' rights to be used")


def launch_shrink_preempt_delete_and_hand_over(stage: Stage, folder: Path) -> None:
    """All that an operator does in its life, the second half of it by a follower that takes over."""
    finish = folder / "finish"
    with contextlib.ExitStack() as follower:
        with stage.operator():
            script = {"total": 10, "shrinkAt": 4, "keep": 1, "finishFile": str(finish)}
            stage.add_job("shrinks", script=script, ttlSecondsAfterFinished=0)
            stage.add_job("moves", script={"total": 1_000_000}, gpuTypes=["fast"])
            eventually(lambda: stage.status("shrinks").get("repacks"), "the job to shrink")
            finish.touch()
            eventually(lambda: stage.job("shrinks") is None, "the job to be deleted when it has ended")
            stage.wait_for("moves", "Running")
            stage.patch("moves", {"gpuTypes": ["slow"]})
            eventually(
                lambda: stage.status("moves").get("launches") == 2 and stage.state("moves") == "Running",
                "the job to be preempted and launched again",
            )
            first = stage.leader()
            follower.enter_context(stage.operator())
        eventually(lambda: stage.leader() not in ("", first), "the follower to lead")
        stage.delete("moves")
        eventually(lambda: not stage.pods("moves"), "the pods to be deleted")
        stage.add_job("after", script={"total": 3})
        stage.wait_for("after", "Succeeded")
