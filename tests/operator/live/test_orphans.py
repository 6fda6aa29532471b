"""A job that was deleted with ``--cascade=orphan``: its pods run on, without anybody who looks after them."""

import pytest
from ballast_operator.cli.main import main
from click.testing import CliRunner

from tests.operator.live.conftest import JOBS
from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]


def test_their_gpus_are_told_and_given_to_nobody(live_cluster, stage):
    """By the real garbage collector; the ClusterPolicy and `ballast doctor` name the pods."""

    def valid() -> str:
        policy = stage.custom.get_cluster_custom_object(name="live", **{**JOBS, "plural": "clusterpolicies"})
        found = [row for row in policy["status"]["conditions"] if row["type"] == "Valid"]
        return found[0]["message"]

    with stage.operator():
        for name in ("one", "two"):  # all GPUs of one pool each
            stage.add_command(name, ranks=2, total=1_000_000)
            stage.wait_for(name, "Running")
        stage.custom.delete_namespaced_custom_object(
            namespace=stage.namespace, name="one", propagation_policy="Orphan", **JOBS
        )
        eventually(lambda: stage.job("one") is None, "the job to be gone")
        left = stage.pods("one")
        assert [pod.metadata.owner_references for pod in left.values()] == [None, None]
        named = ", ".join(f"{stage.namespace}/{name}" for name in sorted(left))
        eventually(lambda: f"hold GPUs: {named}. To fix: " in valid(), "the policy to name them")
        done = CliRunner().invoke(main, ["doctor", "--kubeconfig", str(live_cluster.kubeconfig)])
        assert f"jobs that were deleted without them hold GPUs: {named}. To fix: " in done.stdout
        stage.add_command("three", ranks=2, total=1)
        eventually(lambda: stage.condition("three", "Admitted").get("status") == "False", "an answer")
        assert stage.state("three") == "Waiting"
        for name in left:
            stage.core.delete_namespaced_pod(name, stage.namespace)
        stage.wait_for("three", "Succeeded")
        eventually(lambda: "hold GPUs" not in valid(), "the policy to be as before")
