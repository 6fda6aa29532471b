"""What goes wrong with real trainer processes, and what has to be true afterwards."""

import pytest
from ballast_localcluster.nodes.node import ProcessNode
from ballast_operator.local_operator import OPERATOR_NAMESPACE, delete_objects, install_objects
from kubernetes import client

from tests.e2e.endless_jobs import CHECKPOINT, ELASTIC, ENDLESS, SHRINKS, SMALL
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def kill(process):
    process.kill()
    process.wait()


def test_a_killed_rank_restarts_the_job_from_its_checkpoint_and_is_said_so(ballast):
    """The step does not go back to 0, a restart is counted by cause, and an Event tells."""
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
        status = ballast.status("killed")
        assert sum(status["restarts"].values()) == 1
        assert status["launches"] == 2
        assert before.isdisjoint(pod.metadata.uid for pod in ballast.pods("killed"))

        def told():
            texts = [f"{event.reason}: {event.message}" for event in ballast.events("killed")]
            return any("checkpoint" in text or "restart" in text.lower() for text in texts)

        eventually(told, "an Event on it")
        ballast.end_job("killed")


@pytest.mark.nightly
def test_an_operator_killed_during_a_shrink_finishes_it_after_its_restart(ballast):
    """Four ranks in two pods of two GPUs repack to one pod, which keeps its UID; none restarts."""
    pairs = {"parallelism": {"gpusPerPod": 2}}
    job = ballast.demo_job("transformer", "transformer", **SHRINKS, **pairs)
    with ballast.operator() as operator:
        ballast.apply(job)
        ballast.watch_for_state("transformer", "Repacking")
        kill(operator)
        uids = {pod.metadata.name: pod.metadata.uid for pod in ballast.pods("transformer")}
    with ballast.operator():
        eventually(lambda: ballast.status("transformer").get("repacks"), "the shrink to be finished")
        repack = ballast.status("transformer")["repacks"][0]
        assert (repack["releasedPods"], repack["gpus"]) == (["transformer-1-1"], 2)
        assert {s["name"]: s["uid"] for s in repack["survivors"]}.items() <= uids.items()
        eventually(
            lambda: {pod.metadata.name for pod in ballast.pods("transformer")}.isdisjoint(
                repack["releasedPods"]
            ),
            "the released pods to go",
        )
        ballast.wait_for_report("transformer", step=repack["step"] + 3)
        assert sum((ballast.status("transformer").get("restarts") or {}).values()) == 0
        ballast.end_job("transformer")


@pytest.mark.nightly
def test_deleting_a_running_job_with_the_operator_dead_leaves_nothing(ballast):
    """Ownership does it: no finalizer waits for anybody."""
    with ballast.operator() as operator:
        ballast.apply(ballast.demo_job("recurrent", "orphan", totalSteps=ENDLESS, model=SMALL))
        ballast.wait_for_report("orphan", step=3)
        kill(operator)
        ballast.delete_job("orphan")
        eventually(lambda: ballast.job("orphan") is None, "the job to go")
        eventually(lambda: not ballast.pods("orphan"), "its pods to go")
        eventually(
            lambda: (
                not [
                    c
                    for c in ballast.core.list_namespaced_config_map(ballast.namespace).items
                    if c.metadata.name == "orphan-plan"
                ]
            ),
            "its plan to go",
        )


@pytest.mark.nightly
def test_a_suspended_job_saves_leaves_and_resumes_from_there(ballast):
    """Suspend is a checkpoint and an exit; resume continues from that step with a new launch."""
    with ballast.operator():
        ballast.apply(ballast.demo_job("recurrent", "paused", totalSteps=ENDLESS, model=SMALL))
        ballast.wait_for_report("paused", step=5)
        reported = ballast.report("paused")["step"]
        patch = {"spec": {"suspend": True}}
        ballast.custom.patch_namespaced_custom_object(name="paused", body=patch, **ballast.where)
        eventually(
            lambda: ballast.status("paused").get("state") == "Suspended" and not ballast.pods("paused"),
            "the job to leave its GPUs",
        )
        patch = {"spec": {"suspend": False}}
        ballast.custom.patch_namespaced_custom_object(name="paused", body=patch, **ballast.where)
        assert ballast.wait_for_resumed("paused") >= reported
        ballast.end_job("paused")


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
        assert [pod.spec.node_name for pod in ballast.pods("spot")] == [first]
        ballast.stay(other)
        eventually(lambda: ballast.condition("spot", "Grown").get("status") == "True", "the job to grow")
        assert ballast.status("spot")["launches"] == 1
        ballast.announce_end(other)
        # By what asks first: the notice, or the allocator since four ranks were measured to be slower.
        eventually(lambda: ballast.status("spot").get("repacks"), "the ranks on the node to leave")
        shrunk = ballast.status("spot")["repacks"][0]
        assert (shrunk["asked"], shrunk["gpus"]) == (True, 2)
        eventually(
            lambda: {pod.spec.node_name for pod in ballast.pods("spot")} == {first}, "their pods to go"
        )
        ballast.wait_for_report("spot", step=shrunk["step"] + 3)
        assert ballast.status("spot")["launches"] == 1
        ballast.announce_end(first)
        ballast.stay(other)
        eventually(lambda: ballast.status("spot")["launches"] == 2, "the job to be launched elsewhere")
        ballast.wait_for_resumed("spot")
        status = ballast.status("spot")
        assert status["restarts"] == {"NodeLeaving": 1}
        assert status.get("lostSteps", 0) <= 1
        assert {pod.spec.node_name for pod in ballast.pods("spot")} == {other}
        ballast.stay(first)
        ballast.end_job("spot")


@pytest.mark.nightly
def test_a_pod_that_a_drain_evicts_is_left_live(ballast):
    """Its ranks get SIGTERM at once, and train on until the others have their layers: no restart."""
    job = ballast.demo_job("transformer", "drained", **ELASTIC)
    # No machine is too slow to hand over in half of it.
    job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"] = 3600
    with ballast.operator():
        ballast.apply(job)
        ballast.wait_for_report("drained", step=3)
        first, second = sorted(ballast.pods("drained"), key=lambda pod: pod.metadata.name)
        ballast.drain(second)
        eventually(lambda: ballast.status("drained").get("repacks"), "the pod's ranks to leave")
        shrunk = ballast.status("drained")["repacks"][0]
        assert (shrunk["asked"], shrunk["gpus"]) == (True, 2)
        assert shrunk["releasedPods"] == [second.metadata.name]
        assert "EvictionByEvictionAPI" in shrunk["reason"]
        eventually(
            lambda: [pod.metadata.uid for pod in ballast.pods("drained")] == [first.metadata.uid],
            "the pod to go",
        )
        ballast.wait_for_report("drained", step=shrunk["step"] + 3)
        status = ballast.status("drained")
        assert (status["launches"], status["restarts"], status["lostSteps"]) == (1, {}, 0)
        ballast.core.patch_node(second.spec.node_name, {"spec": {"unschedulable": False}})
        ballast.end_job("drained")


@pytest.mark.nightly
def test_a_gang_in_two_pools_continues_in_one_when_the_others_node_goes(ballast):
    """Two fast GPUs and two slow ones, whose slowness is emulated, have stages that suit them.

    A notice to the slow node shrinks the gang live onto the fast one. All speeds are stated: no measurement
    on a busy machine decides whether the second pool is worth it.
    """
    sizes = {"minStages": 2, "maxStages": 4, "microbatches": 8, "globalBatchSize": 16}
    wide = {"totalSteps": ENDLESS, "mixedPools": "Allowed", "gpuTypes": ["v100", "k80"], "pipeline": sizes}
    # Four, four, two and two of twelve layers take equally long: no other order of the pools wins anything.
    wide |= {"dynamics": [], "model": {**SHRINKS["model"], "layers": 12}, "checkpoint": CHECKPOINT}
    wide |= {"rebalance": {"enabled": False}, "repack": {"enabled": False}, "grow": True}
    speeds = {("v100", 2): 2.0, ("v100", 4): 4.0, ("k80", 2): 1.0, ("k80", 4): 2.0}
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
        ballast.announce_end("k80-0")
        eventually(lambda: ballast.status("wide").get("repacks"), "the slow ranks to leave")
        shrunk = ballast.status("wide")["repacks"][0]
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


@pytest.mark.nightly
def test_a_pool_without_a_node_gets_one_for_a_job_and_is_empty_again_afterwards(ballast):
    """The pods wait for a machine that did not exist; here the test is the autoscaler that makes it."""
    policies = {"group": "ballast.dev", "version": "v1alpha1", "plural": "clusterpolicies"}
    before = ballast.custom.get_cluster_custom_object(**policies, name="demo")["spec"]["nodePools"]
    fresh = {"name": "fresh", "nodeSelector": {"ballast.dev/pool": "fresh"}, "gpuType": "fresh"}
    fresh |= {"maxNodes": 1, "gpusPerNode": 2, "pricePerGpuHour": 1.0}
    patch = {"spec": {"nodePools": [*before, fresh]}}
    ballast.custom.patch_cluster_custom_object(**policies, name="demo", body=patch)
    job = ballast.demo_job(
        "recurrent", "fresh", totalSteps=20, model=SMALL, gpuTypes=["fresh"], throughput=[]
    )
    with ballast.operator():
        ballast.apply(job)
        eventually(lambda: len(ballast.pods("fresh")) == 2, "pods that wait for a node")
        assert [pod.spec.node_name for pod in ballast.pods("fresh")] == [None, None]
        ballast.cluster.add_node(ProcessNode(name="fresh-0", gpus=2, pool="fresh"))
        ballast.wait_for_report("fresh", step=1)
        assert [pod.spec.node_name for pod in ballast.pods("fresh")] == ["fresh-0", "fresh-0"]
        ballast.wait_for_state("fresh", "Succeeded")
        assert ballast.status("fresh")["launches"] == 1
        eventually(
            lambda: {pod.status.phase for pod in ballast.pods("fresh")} == {"Succeeded"},
            "its pods to succeed",
        )
        ballast.cluster.lose_node("fresh-0")
        ballast.core.delete_node("fresh-0")
        ballast.delete_job("fresh")
        eventually(lambda: not ballast.pods("fresh"), "its pods to go")
        patch = {"spec": {"nodePools": before}}
        ballast.custom.patch_cluster_custom_object(**policies, name="demo", body=patch)


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
