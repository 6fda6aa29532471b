"""What goes wrong with real trainer processes, and what has to be true afterwards."""

import pytest
from ballast_localcluster.nodes.containers.warm_start import WARM_START_VARIABLE
from ballast_operator.api.rbac import operator_rules, trainer_rules
from ballast_operator.local_operator import (
    OPERATOR_NAME,
    OPERATOR_NAMESPACE,
    delete_objects,
    install_objects,
)
from kubernetes import client

from tests.e2e.endless_jobs import CHECKPOINT, ELASTIC, ENDLESS, SHRINKS, SMALL
from tests.support.access import account, granted, use
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def kill(process):
    process.kill()
    process.wait()


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
def test_a_killed_rank_is_started_again_in_its_pod_and_the_gang_goes_on(ballast):
    """From the memory of the others: its pods and their launch stay, and nothing counts as a restart."""
    with ballast.operator():
        saving = {**CHECKPOINT, "inMemoryEverySteps": 1}
        job = ballast.demo_job("recurrent", "lives", totalSteps=ENDLESS, model=SMALL, checkpoint=saving)
        (container,) = job["spec"]["template"]["spec"]["containers"]
        container["env"] = [*container.get("env", []), {"name": WARM_START_VARIABLE, "value": ""}]
        ballast.apply(job)
        ballast.wait_for_report("lives", step=3)
        before = {pod.metadata.uid for pod in ballast.pods("lives")}
        ballast.kill_rank("lives-1-1", starts_again=True)
        resumed = ballast.wait_for_resumed("lives")
        ballast.wait_for_report("lives", step=resumed + 3)
        status = ballast.status("lives")
        assert (status["launches"], status.get("restarts", {})) == (1, {})
        assert {pod.metadata.uid for pod in ballast.pods("lives")} == before
        ballast.end_job("lives")


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


@pytest.mark.nightly
def test_nodes_that_announce_that_they_go_are_left_in_time(ballast):
    """A gang grows onto a node and leaves it again, live; a notice to rank 0's node moves the job, saved.

    It has one pod on each node. That four ranks are faster than two is stated: they have not run before, so
    no measurement on a busy machine says otherwise. The nodes state a time that no machine is too slow for.
    """
    job = ballast.demo_job("transformer", "spot", **ELASTIC)
    first, other = "v100-0", "v100-1"
    with ballast.operator():
        ballast.announce_end(other)
        ballast.apply(job)
        ballast.wait_for_report("spot", step=3)
        ballast.wait_for_nodes("spot", first)
        ballast.stay(other)
        eventually(lambda: ballast.condition("spot", "Grown").get("status") == "True", "the job to grow")
        assert ballast.status("spot")["launches"] == 1
        ballast.announce_end(other)
        # By what asks first: the notice, or the allocator since four ranks were measured to be slower.
        eventually(lambda: ballast.status("spot").get("repacks"), "the ranks on the node to leave")
        shrunk = ballast.status("spot")["repacks"][0]
        assert (shrunk["asked"], shrunk["gpus"]) == (True, 2)
        ballast.wait_for_nodes("spot", first)
        ballast.wait_for_report("spot", step=shrunk["step"] + 3)
        assert ballast.status("spot")["launches"] == 1
        ballast.announce_end(first)
        ballast.stay(other)
        eventually(lambda: ballast.status("spot")["launches"] == 2, "the job to be launched elsewhere")
        ballast.wait_for_resumed("spot")
        status = ballast.status("spot")
        assert status["restarts"] == {"NodeLeaving": 1}
        assert status.get("lostSteps", 0) <= 1
        ballast.wait_for_nodes("spot", other)
        ballast.stay(first)
        ballast.end_job("spot")


@pytest.mark.nightly
def test_a_gang_in_two_pools_continues_in_one_when_the_others_node_goes(ballast):
    """Two fast GPUs and two slow ones, whose slowness is emulated, have stages that suit them.

    Its last rank leaves for another job and comes back; then a notice to the slow node shrinks the gang live
    onto the fast one. All speeds are stated, far below what any machine measures: none decides that the gang
    were better off elsewhere.
    """
    sizes = {"minStages": 2, "maxStages": 4, "microbatches": 8, "globalBatchSize": 16}
    wide = {"totalSteps": ENDLESS, "mixedPools": "Allowed", "gpuTypes": ["v100", "k80"], "pipeline": sizes}
    # Four, four, two and two of twelve layers take equally long: no other order of the pools wins anything.
    wide |= {"dynamics": [], "model": {**SHRINKS["model"], "layers": 12}, "checkpoint": CHECKPOINT}
    wide |= {"rebalance": {"enabled": False}, "repack": {"enabled": False}, "grow": True}
    speeds = {("v100", 2): 0.002, ("v100", 4): 0.004, ("k80", 2): 0.001, ("k80", 4): 0.002}
    wide["throughput"] = [
        {"gpuType": kind, "stages": n, "stepsPerSecond": rate} for (kind, n), rate in speeds.items()
    ]
    job = ballast.demo_job("transformer", "wide", **wide)
    with ballast.operator():
        ballast.announce_end("v100-1")
        ballast.apply(job)
        ballast.wait_for_report("wide", step=3)
        parts = ballast.status("wide")["allocation"]["parts"]
        assert {part["pool"]: len(part["pods"]) for part in parts} == {"v100": 2, "k80": 2}
        plan = ballast.plan("wide")
        layers = [stage.end_layer - stage.first_layer for stage in plan.stages]
        assert list(zip((rank.gpu_type for rank in plan.ranks), layers, strict=True)) == [
            ("v100", 4),
            ("v100", 4),
            ("k80", 2),
            ("k80", 2),
        ]
        one = {"minStages": 1, "maxStages": 1, "microbatches": 8, "globalBatchSize": 16}
        spec = {"gpuTypes": ["k80"], "pipeline": one, "totalSteps": ENDLESS, "checkpoint": CHECKPOINT}
        spec |= {"dynamics": [], "repack": {"enabled": False}}
        ballast.apply(ballast.demo_job("transformer", "small", **spec))
        ballast.wait_for_report("small", step=1)
        eventually(lambda: _has(ballast.status("wide"), 3), "the last rank to be gone")
        ballast.end_job("small")
        eventually(lambda: _has(ballast.status("wide"), 4), "the rank to come back")
        ballast.announce_end("k80-0")
        eventually(lambda: len(ballast.status("wide")["repacks"]) > 1, "the slow ranks to leave")
        shrunk = ballast.status("wide")["repacks"][1]
        assert (shrunk["asked"], shrunk["gpus"]) == (True, 2)
        ballast.wait_for_report("wide", step=shrunk["step"] + 3)
        status = ballast.status("wide")
        assert (status["launches"], status["allocation"]["pool"]) == (1, "v100")
        assert not status["allocation"].get("parts")
        costs = {entry["pool"]: entry["cost"] for entry in status["poolCosts"]}
        assert costs.keys() == {"v100", "k80"}
        assert sum(costs.values()) == pytest.approx(status["costSoFar"], abs=1e-6)
        ballast.stay("v100-1")
        ballast.stay("k80-0")
        ballast.end_job("wide")


def _has(status, gpus):
    """Whether as many ranks train, and none is about to join."""
    allocation = status["allocation"]
    return allocation["gpus"] == gpus and not allocation.get("joining")


@pytest.mark.nightly
def test_uninstalling_with_a_job_running_and_the_operator_dead_leaves_nothing(ballast):
    """Definitions, namespace, roles, jobs and pods all go; no finalizer holds any of them. Runs last."""
    with ballast.operator() as operator:
        ballast.apply(ballast.demo_job("recurrent", "left", totalSteps=ENDLESS, model=SMALL))
        ballast.wait_for_report("left", step=3)
        kill(operator)
        delete_objects(ballast.kube, install_objects(OPERATOR_NAMESPACE)[::-1], ballast.namespace)
        extensions = client.ApiextensionsV1Api(ballast.api)
        eventually(
            lambda: (
                not [
                    d for d in extensions.list_custom_resource_definition().items if "ballast" in d.spec.group
                ]
            ),
            "the definitions to go",
        )
        eventually(lambda: not ballast.pods("left"), "the job's pods to go")
        eventually(
            lambda: OPERATOR_NAMESPACE not in [n.metadata.name for n in ballast.core.list_namespace().items],
            "the operator's namespace to go",
        )
