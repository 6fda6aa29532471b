"""What goes wrong with real trainer processes, and what has to be true afterwards."""

import pytest
from ballast_operator.api.rbac import operator_rules, trainer_rules
from ballast_operator.local_operator import OPERATOR_NAME, OPERATOR_NAMESPACE

from tests.e2e.endless_jobs import CHECKPOINT, ELASTIC, ENDLESS, SMALL
from tests.support.access import account, granted, use
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_a_killed_rank_restarts_the_job_from_its_checkpoint_and_is_said_so(ballast):
    """The step does not go back to 0, a restart is counted by cause, and an Event tells.

    By the audit log, its trainers used each of their rights, and the operator was denied nothing.
    """
    with ballast.operator():
        job = ballast.demo_job("recurrent", "killed", totalSteps=ENDLESS, model=SMALL, checkpoint=CHECKPOINT)
        ballast.apply(job)
        ballast.wait_for_report("killed", checkpoint=5)
        saved = ballast.report("killed")["checkpointStep"]
        before = {pod.metadata.uid for pod in ballast.pods("killed")}
        ballast.kill_rank("killed-1-1")
        resumed = ballast.wait_for_resumed("killed")
        assert resumed >= saved
        assert resumed % CHECKPOINT["everySteps"] == 0
        ballast.wait_for_report("killed", step=resumed + 1)
        eventually(lambda: ballast.status("killed").get("restarts"), "the restart to be counted")
        status = ballast.status("killed")
        assert sum(status["restarts"].values()) == 1
        assert status["launches"] == 2
        eventually(
            lambda: before.isdisjoint(pod.metadata.uid for pod in ballast.pods("killed")),
            "old pods to go",
        )

        def told():
            texts = [f"{event.reason}: {event.message}" for event in ballast.events("killed")]
            return any("checkpoint" in text or "restart" in text.lower() for text in texts)

        eventually(told, "an Event on it")
        ballast.end_job("killed")
    operator = use(ballast.cluster.audit_log, account(OPERATOR_NAMESPACE, OPERATOR_NAME))
    assert operator.denied == []
    assert operator.namespaces.keys() <= granted(operator_rules())
    rights = granted(trainer_rules("killed"))

    def used_by_trainer():
        trainer = use(ballast.cluster.audit_log, account(ballast.namespace, "killed-trainer"))
        # The authorizer learns of a new role by a watch: it may refuse a first request.
        assert trainer.namespaces.keys() == rights >= set(trainer.denied)
        return True

    # A request is answered before its line is in the log.
    eventually(used_by_trainer, "all rights to be used")


@pytest.mark.nightly
@pytest.mark.parametrize("number", [0, 1])
def test_a_gang_goes_on_in_place_without_a_lost_pod_and_grows_again(ballast, number):
    """From the other pod's copies: its processes and the launch stay, and nothing counts as a restart."""
    name = f"halves-{number}"
    fields = {**ELASTIC, "checkpoint": {**CHECKPOINT, "inMemoryEverySteps": 1}}
    with ballast.operator():
        ballast.apply(ballast.demo_job("transformer", name, **fields))
        ballast.wait_for_report(name, step=3)
        pods = ballast.plan(name).pods
        kept, lost = pods[1 - number], pods[number]
        uid = {pod.metadata.name: pod.metadata.uid for pod in ballast.pods(name)}[kept]
        ballast.core.delete_namespaced_pod(lost, ballast.namespace, grace_period_seconds=0)
        eventually(lambda: ballast.status(name).get("repacks"), "the gang to go on without it")
        shrunk = ballast.status(name)["repacks"][0]
        assert (shrunk["asked"], shrunk["gpus"], shrunk["releasedPods"]) == (True, 2, [lost])
        eventually(lambda: len(ballast.plan(name).pods) == 2, "a pod to come back")
        eventually(lambda: _has(ballast.status(name), 4), "it to join")
        status = ballast.status(name)
        assert (status["launches"], status.get("restarts", {})) == (1, {})
        assert uid in {pod.metadata.uid for pod in ballast.pods(name)}
        ballast.wait_for_report(name, step=ballast.report(name)["step"] + 3)
        ballast.end_job(name)


def _has(status, gpus):
    """Whether as many ranks train, and none is about to join."""
    allocation = status["allocation"]
    return allocation["gpus"] == gpus and not allocation.get("joining")
