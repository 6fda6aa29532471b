"""Two real trainers on one time-sliced GPU of a process node: both run at once, and pay it together."""

import json

import pytest
from ballast_localcluster.nodes.node import ProcessNode
from ballast_operator.cli.main import main
from click.testing import CliRunner

from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.nightly]

ENDLESS = 50_000
PRICE = 36.0
POLICIES = {"group": "ballast.dev", "version": "v1alpha1", "plural": "clusterpolicies"}
POOL = {
    "name": "small",
    "nodeSelector": {"ballast.dev/pool": "small"},
    "gpuType": "small",
    "memoryPerGpu": "16G",
    "pricePerGpuHour": PRICE,
    "sharing": {"kind": "TimeSlicing", "jobsPerGpu": 2},
}
LABELS = {"nvidia.com/gpu.replicas": "2", "nvidia.com/gpu.sharing-strategy": "time-slicing"}
"""As the device plugin's feature discovery writes them."""


def tuner(ballast, name, **spec):
    """A small job of one GPU that shares it; its speed alone is stated."""
    return ballast.demo_job(
        "recurrent",
        name,
        **{
            "totalSteps": ENDLESS,
            "model": {"name": "recurrent", "layers": 4, "args": {"dim": 32}},
            "pipeline": {"minStages": 1, "maxStages": 1, "microbatches": 4, "globalBatchSize": 16},
            "gpuTypes": ["small"],
            "throughput": [{"gpuType": "small", "stages": 1, "stepsPerSecond": 5.0}],
            "sharesGpu": "Allowed",
            "memoryPerGpu": "6G",
            "dynamics": [],
            **spec,
        },
    )


def told(ballast, *command):
    """What a command says of the cluster."""
    result = CliRunner().invoke(main, [*command, "--kubeconfig", str(ballast.cluster.kubeconfig)])
    assert result.exit_code == 0, result.output
    return result.output


def bills(ballast):
    """Job or pool -> what it has cost, up to one moment."""
    found = json.loads(told(ballast, "cost", "--output", "json"))
    pools = {row["pool"]: row["bill"] for row in found["pools"]}
    return {row["job"].removeprefix("default/"): row["cost"] for row in found["jobs"]} | pools


def test_two_jobs_train_on_one_gpu_at_the_same_time_and_pay_no_more_than_its_price(ballast):
    """Explain and top name the partner; the one that is left stays, and pays on."""
    before = ballast.custom.get_cluster_custom_object(**POLICIES, name="demo")["spec"]["nodePools"]
    patch = {"spec": {"nodePools": [*before, POOL]}}
    ballast.custom.patch_cluster_custom_object(**POLICIES, name="demo", body=patch)
    ballast.cluster.add_node(ProcessNode(name="small-0", gpus=2, pool="small", labels=LABELS))
    for name in ("left", "right"):
        ballast.apply(tuner(ballast, name))
    with ballast.operator():
        for name in ("left", "right"):
            ballast.wait_for_report(name, step=1)
        steps = {name: ballast.report(name)["step"] for name in ("left", "right")}
        for name, step in steps.items():
            ballast.wait_for_report(name, step=step + 5)
        for name, other in (("left", "default/right"), ("right", "default/left")):
            # Of the job that was there first it is written beside the other one's launch.
            allocation = eventually(
                lambda name=name, other=other: (
                    (found := ballast.status(name)["allocation"])["sharedGpu"].get("partner") == other
                    and found
                ),
                f"{name} to have a partner",
            )
            assert allocation["nodes"] == ["small-0"]
            (pod,) = ballast.pods(name)
            assert pod.spec.containers[0].resources.limits["nvidia.com/gpu"] == "1"
            # Its trainer reports to the API server before its node does.
            eventually(lambda name=name: ballast.pods(name)[0].status.phase == "Running", f"{name} to run")
        assert "default/left is on its GPU as well" in told(ballast, "explain", "right")
        rows = json.loads(told(ballast, "top", "--once", "--output", "json"))["jobs"]
        assert {row["job"]: row["partner"] for row in rows} == {
            "left": "default/right",
            "right": "default/left",
        }
        first = bills(ballast)

        def shared():
            more = {name: paid - first[name] for name, paid in bills(ballast).items()}
            assert more["left"] > 0 and more["right"] > 0
            assert more["left"] + more["right"] <= more["small"] * 1.01, more
            return True

        # By now: the first one pays alone until its own status names its partner.
        eventually(shared, "both to pay one GPU together")
        paid = bills(ballast)
        ballast.end_job("right")
        eventually(
            lambda: not ballast.status("left")["allocation"]["sharedGpu"].get("partner"), "left to be alone"
        )
        assert bills(ballast)["left"] > paid["left"]
        assert ballast.status("left")["launches"] == 1
        ballast.end_job("left")
    patch = {"spec": {"nodePools": before}}
    ballast.custom.patch_cluster_custom_object(**POLICIES, name="demo", body=patch)
