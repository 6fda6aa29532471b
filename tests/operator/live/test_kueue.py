"""Kueue's own controller over a real API server: its quota decides when, Ballast on which GPUs."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_localcluster import LocalCluster, ProcessNode
from ballast_localcluster.certificates import Identity, write_certificates
from ballast_localcluster.components import Settings
from ballast_operator.api.rbac import kueue_rules, operator_rules
from ballast_operator.local_operator import (
    OPERATOR_NAME,
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    write_operator_kubeconfig,
)
from kubernetes import config
from kubernetes.dynamic import DynamicClient

from tests.operator.live.conftest import Nursery, Stage, cluster_policy
from tests.support.access import account, binding, granted, may, use, wait_for_operators_rights
from tests.support.control_plane import CRDS
from tests.support.ports import free_port
from tests.support.waiting import eventually

VARIABLE = "BALLAST_TEST_KUEUE"
BUILT = os.environ.get(VARIABLE, "")
pytestmark = [
    pytest.mark.api,
    pytest.mark.slow,
    pytest.mark.nightly,
    pytest.mark.skipif(not BUILT, reason=f"Kueue is not built. To fix: scripts/build-kueue, {VARIABLE}"),
]

KUEUE = "kueue.x-k8s.io/v1beta2"
RBAC = "rbac.authorization.k8s.io"
WORKLOADS = {"group": "kueue.x-k8s.io", "version": "v1beta2", "plural": "workloads"}


def queue(gpus: int) -> list[dict[str, Any]]:
    """One flavor of GPUs, whatever their type, and a queue with a quota of it."""
    resources = [{"name": "nvidia.com/gpu", "nominalQuota": gpus}]
    groups = [
        {
            "coveredResources": ["nvidia.com/gpu"],
            "flavors": [{"name": "any", "resources": resources}],
        }
    ]
    all_of_them = {"namespaceSelector": {}, "resourceGroups": groups}
    return [
        {"apiVersion": KUEUE, "kind": "ResourceFlavor", "metadata": {"name": "any"}},
        {"apiVersion": KUEUE, "kind": "ClusterQueue", "metadata": {"name": "gpus"}, "spec": all_of_them},
        {
            "apiVersion": KUEUE,
            "kind": "LocalQueue",
            "metadata": {"name": "team", "namespace": "default"},
            "spec": {"clusterQueue": "gpus"},
        },
    ]


@pytest.fixture
def quota(tmp_path: Path) -> Iterator[tuple[Stage, LocalCluster, Any]]:
    """Two nodes with two GPUs each, Kueue with a quota of two, and the operator with the chart's rights."""
    nodes = [ProcessNode(name=f"{pool}-0", gpus=2, pool=pool) for pool in ("fast", "slow")]
    crds = (*CRDS, *sorted((Path(BUILT) / "crds").glob("*.yaml")))
    with (
        LocalCluster(nodes=nodes, crds=crds, settings=Settings(audit=True)) as cluster,
        config.new_client_from_config(str(cluster.kubeconfig)) as api,
    ):
        kube = DynamicClient(api)
        role = {"apiVersion": f"{RBAC}/v1", "kind": "ClusterRole", "metadata": {"name": "asks-kueue"}}
        asks = binding("asks-kueue", OPERATOR_NAMESPACE, OPERATOR_NAME)
        system = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "kueue-system"}}
        apply_objects(kube, install_objects(OPERATOR_NAMESPACE))
        apply_objects(kube, [{**role, "rules": kueue_rules()}, asks, system, cluster_policy()])
        wait_for_operators_rights(api, OPERATOR_NAMESPACE)
        user = account(OPERATOR_NAMESPACE, OPERATOR_NAME)
        eventually(lambda: may(api, user, "get", WORKLOADS["group"], "workloads"), "the rights on Workloads")
        apply_objects(kube, queue(gpus=2))
        kubeconfig = write_operator_kubeconfig(api, cluster.kubeconfig, tmp_path / "operator.kubeconfig")
        nursery = Nursery(kubeconfig, tmp_path)
        with (tmp_path / "kueue.log").open("w") as log:
            process = subprocess.Popen(
                [f"{BUILT}/kueue", f"--config={kueue_configuration(tmp_path)}"],
                env={
                    **os.environ,
                    "KUBECONFIG": str(cluster.kubeconfig),
                    "POD_NAMESPACE": "kueue-system",
                    "KUEUE_METRICS_CERTS": str(tmp_path),
                },
                stdout=log,
                stderr=log,
            )
        try:
            yield Stage(api, "default", tmp_path, nursery), cluster, kube
        finally:
            nursery.close()
            process.kill()
            process.wait()


def kueue_configuration(folder: Path) -> Path:
    """Nobody calls its webhooks here; it wants a certificate for them all the same."""
    write_certificates(folder, (Identity(file="tls", common_name="kueue"),))
    content = {
        "apiVersion": "config.kueue.x-k8s.io/v1beta2",
        "kind": "Configuration",
        "leaderElection": {"leaderElect": False},
        "internalCertManagement": {"enable": False},
        "webhook": {"certDir": str(folder), "host": "127.0.0.1", "port": free_port()},
        "metrics": {"bindAddress": "0"},
        "health": {"healthProbeBindAddress": "0"},
        "featureGates": {"VisibilityOnDemand": False},
        "integrations": {"frameworks": ["batch/job"]},
    }
    path = folder / "kueue.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_kueues_quota_decides_when_and_ballast_on_which_gpus(
    quota: tuple[Stage, LocalCluster, Any],
) -> None:
    """Two jobs of two GPUs, four GPUs, a quota of two: one at a time. A stopped queue evicts."""
    stage, cluster, kube = quota
    queues = kube.resources.get(api_version=KUEUE, kind="ClusterQueue")

    def policy(stop: str) -> None:
        content = {"spec": {"stopPolicy": stop}}
        queues.patch(name="gpus", body=content, content_type="application/merge-patch+json")

    with stage.operator():
        for name, pool in (("first", "slow"), ("second", "fast")):
            labels = {"kueue.x-k8s.io/queue-name": "team"}
            stage.add_job(name, script={"total": 1_000_000}, gpuTypes=[pool], labels=labels)
            if name == "first":
                stage.wait_for("first", "Running")
        eventually(
            lambda: "insufficient unused quota" in stage.condition("second", "Admitted").get("message", ""),
            "Kueue's words on the job that waits",
        )
        assert stage.status("second").get("launches", 0) == 0
        assert stage.status("first")["allocation"]["gpuType"] == "slow"
        policy("HoldAndDrain")
        eventually(lambda: not stage.pods("first"), "the job to be evicted")
        assert stage.status("first").get("restarts", {}) == {}
        stage.delete("first")
        policy("None")
        stage.wait_for("second", "Running")
        stage.patch("second", {"suspend": True})
        eventually(
            lambda: not stage.custom.list_namespaced_custom_object(namespace="default", **WORKLOADS)["items"],
            "the quota to be given back",
        )
    operator = use(cluster.audit_log, account(OPERATOR_NAMESPACE, OPERATOR_NAME))
    assert operator.denied == []
    assert granted(kueue_rules()) <= operator.namespaces.keys()
    assert operator.namespaces.keys() <= granted([*operator_rules(), *kueue_rules()])
