"""Real Karpenter makes the nodes: from none to a first step, through an interruption, and back to none."""

import dataclasses
import os

import pytest
import yaml
from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.karpenter.start import find_karpenter, present_karpenter, start_karpenter
from ballast_operator.local_operator import OPERATOR_NAMESPACE, apply_objects, install_objects
from kubernetes import client, config

from tests.docs.blocks import ROOT
from tests.e2e.conftest import Ballast
from tests.support.control_plane import CRDS
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]

EXAMPLES = ROOT / "examples/karpenter"
BUILD_VARIABLE = "BALLAST_TEST_KARPENTER"
MISSING = (
    "Karpenter is not built on this machine. To fix: `python -m ballast_localcluster.setup --karpenter` "
    f"(minutes, Go), or {BUILD_VARIABLE}=1 for the tests to build it"
)


@dataclasses.dataclass
class Pools(Ballast):
    """A cluster without a node, with Ballast and Karpenter."""

    def nodes(self) -> dict[str, client.V1Node]:
        return {node.metadata.name: node for node in self.core.list_node().items}

    def nodes_with_gpus(self) -> list[client.V1Node]:
        return [node for node in self.nodes().values() if "nvidia.com/gpu" in (node.status.allocatable or {})]

    def apply_example(self, *, steps: int | None = None) -> str:
        """The example's job, with its checkpoints in the test's folder; its name."""
        job = yaml.safe_load((EXAMPLES / "trainingjob.yaml").read_text())
        job["spec"]["totalSteps"] = steps or job["spec"]["totalSteps"]
        (volume,) = job["spec"]["template"]["spec"]["volumes"]
        volume["hostPath"]["path"] = str(self.folder / "checkpoints")
        self.kubectl("apply", "-f", "-", stdin=yaml.safe_dump(job))
        return job["metadata"]["name"]


@pytest.fixture(scope="module")
def pools(tmp_path_factory):
    """Karpenter runs, its example pool is there, and not one node."""
    karpenter = find_karpenter() if os.environ.get(BUILD_VARIABLE) else present_karpenter()
    if karpenter is None:
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("pools")
    with LocalCluster(crds=CRDS) as cluster, config.new_client_from_config(str(cluster.kubeconfig)) as api:
        start_karpenter(cluster, karpenter)
        found = Pools(cluster, api, folder)
        apply_objects(found.kube, install_objects(OPERATOR_NAMESPACE))
        found.kubectl("apply", "-f", EXAMPLES / "nodepool.yaml", "-f", EXAMPLES / "clusterpolicy.yaml")
        yield found


@pytest.mark.nightly
def test_a_job_trains_on_a_machine_that_karpenter_made_for_it_and_leaves_none(pools):
    """From `kubectl apply` to the last step, and no node before or afterwards."""
    with pools.operator():
        assert pools.nodes() == {}
        job = pools.apply_example(steps=20)
        # Read as soon as it is there: it goes again soon after the job.
        eventually(pools.nodes_with_gpus, "Karpenter to make a node")
        pools.wait_for_report(job, step=1)
        pools.wait_for_state(job, "Succeeded")
        status = pools.status(job)
        assert (status["launches"], status.get("restarts") or {}) == (1, {})
        eventually(lambda: not pools.nodes(), "Karpenter to remove the empty node")
        pools.delete_job(job)


def test_a_machine_that_karpenter_takes_back_is_left_with_the_work_saved_for_another_one(pools):
    """Its taint is a notice: the gang saves, a second node is made beside the first, and training resumes."""
    with pools.operator():
        assert pools.nodes() == {}
        job = pools.apply_example(steps=50_000)
        pools.wait_for_report(job, step=3, checkpoint=10)
        ((first, node),) = pools.nodes().items()
        assert node.metadata.labels["karpenter.sh/nodepool"] == "v100-spot"
        assert node.metadata.labels["karpenter.sh/capacity-type"] == "spot"
        assert node.status.allocatable["nvidia.com/gpu"] == "2"
        pools.kubectl("delete", "nodeclaims", "--all", "--wait=false")
        eventually(lambda: pools.report(job).get("resumedFromStep"), "the job to resume elsewhere")
        status = pools.status(job)
        assert (status["launches"], status["restarts"]) == (2, {"NodeLeaving": 1})
        assert pools.report(job)["resumedFromStep"] >= 10
        (second,) = eventually(lambda: pools.nodes().keys() - {first}, "a second machine")
        eventually(lambda: list(pools.nodes()) == [second], "the first machine to go")
        pools.wait_for_nodes(job, second)
        pools.delete_job(job)
        eventually(lambda: not pools.nodes(), "Karpenter to remove the empty node")
