"""The operator under its own service account, on a real API server: its permissions are enough."""

import base64
import contextlib
import datetime
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ballast_operator.local_operator import OPERATOR_NAME, apply_objects, install_objects
from kubernetes import client
from kubernetes.dynamic import DynamicClient

from tests.operator.api.objects import JOB, changed
from tests.support.access import wait_for_operators_rights
from tests.support.control_plane import ControlPlane
from tests.support.waiting import WAIT_SECONDS, eventually

pytestmark = pytest.mark.api

SYSTEM = "ballast-permissions-test"
NODE = "permissions-test-0"
GROUP = ("ballast.dev", "v1alpha1")


@pytest.fixture
def account_kubeconfig(control_plane: ControlPlane, tmp_path: Path) -> Iterator[Path]:
    """A kubeconfig of the operator's service account, after an installation without the chart."""
    with control_plane.client() as api:
        apply_objects(DynamicClient(api), install_objects(SYSTEM))
        wait_for_operators_rights(api, SYSTEM)
        token = client.CoreV1Api(api).create_namespaced_service_account_token(
            OPERATOR_NAME,
            SYSTEM,
            client.AuthenticationV1TokenRequest(
                spec=client.V1TokenRequestSpec(audiences=[], expiration_seconds=3600)
            ),
        )
        authority = Path(api.configuration.ssl_ca_cert).read_bytes()
        kubeconfig = {
            "apiVersion": "v1",
            "kind": "Config",
            "current-context": "operator",
            "clusters": [
                {
                    "name": "operator",
                    "cluster": {
                        "server": api.configuration.host,
                        "certificate-authority-data": base64.b64encode(authority).decode(),
                    },
                }
            ],
            "users": [{"name": "operator", "user": {"token": token.status.token}}],
            "contexts": [{"name": "operator", "context": {"cluster": "operator", "user": "operator"}}],
        }
        path = tmp_path / "kubeconfig"
        path.write_text(json.dumps(kubeconfig))
        yield path


@contextlib.contextmanager
def running(kubeconfig: Path, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    arguments = ["operator", "--kubeconfig", str(kubeconfig), "--lease-namespace", SYSTEM]
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ballast_operator.cli", *arguments, "--metrics-port", "0"],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        try:
            yield process
        finally:
            process.terminate()
            process.wait(timeout=WAIT_SECONDS)


def keep_ready(core: client.CoreV1Api) -> None:
    """What a node's agent would report; without a report each 40 s the node becomes NotReady."""
    resources = {"nvidia.com/gpu": "4", "cpu": "8", "memory": "8Gi", "pods": "10"}
    ready = {
        "type": "Ready",
        "status": "True",
        "reason": "Test",
        "message": "a node of a test",
        "lastHeartbeatTime": datetime.datetime.now(datetime.UTC).isoformat(),
    }
    status: dict[str, Any] = {"capacity": resources, "allocatable": resources, "conditions": [ready]}
    core.patch_node_status(NODE, {"status": status})


@contextlib.contextmanager
def node_and_policy(api: client.ApiClient) -> Iterator[None]:
    """A node without an agent, with four GPUs, and a policy that has it for a pool."""
    core, custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
    core.create_node({"metadata": {"name": NODE, "labels": {"permissions-test": "yes"}}})
    keep_ready(core)
    policy = {
        "apiVersion": "/".join(GROUP),
        "kind": "ClusterPolicy",
        "metadata": {"name": "permissions-test"},
        "spec": {
            "nodePools": [{"name": "only", "nodeSelector": {"permissions-test": "yes"}, "gpuType": "v100"}]
        },
    }
    custom.create_cluster_custom_object(*GROUP, "clusterpolicies", policy)
    try:
        yield
    finally:
        custom.delete_cluster_custom_object(*GROUP, "clusterpolicies", "permissions-test")
        core.delete_node(NODE)


def test_the_operators_account_is_allowed_all_that_a_launch_needs(
    control_plane: ControlPlane, account_kubeconfig: Path, namespace: str, tmp_path: Path
) -> None:
    """Leads, decides, makes a job's account, role, plan and pods, and is forbidden nothing."""
    log = tmp_path / "operator.log"
    with control_plane.client() as api, node_and_policy(api), running(account_kubeconfig, log) as process:
        core, custom = client.CoreV1Api(api), client.CustomObjectsApi(api)

        def policy_is_ready() -> bool:
            assert process.poll() is None, log.read_text()
            keep_ready(core)
            policy = custom.get_cluster_custom_object(*GROUP, "clusterpolicies", "permissions-test")
            conditions = policy.get("status", {}).get("conditions", [])
            assert ("Ready", "True") in [(c["type"], c["status"]) for c in conditions], log.read_text()
            return True

        eventually(policy_is_ready, "the policy to be in force")
        job = changed(JOB, "metadata.namespace", namespace)
        custom.create_namespaced_custom_object(*GROUP, namespace, "trainingjobs", job)

        def pods_of_the_job() -> list[client.V1Pod]:
            keep_ready(core)
            return list(core.list_namespaced_pod(namespace).items)

        pods = eventually(pods_of_the_job, "pods of the job", details=log.read_text)
        assert {pod.spec.service_account_name for pod in pods} == {"translator-trainer"}
        rbac = client.RbacAuthorizationV1Api(api)

        def names_of_roles() -> set[str]:
            return {role.metadata.name for role in rbac.list_namespaced_role(namespace).items}

        # The account's objects are applied beside the pods: the pods may be first.
        eventually(lambda: "translator-trainer" in names_of_roles(), "the role", details=log.read_text)
        eventually(
            lambda: (
                custom.get_namespaced_custom_object(*GROUP, namespace, "trainingjobs", "translator")
                .get("status", {})
                .get("allocation")
            ),
            "an allocation in the job's status",
        )
        eventually(lambda: core.list_namespaced_event(namespace).items, "an Event")
        custom.delete_namespaced_custom_object(*GROUP, namespace, "trainingjobs", "translator")
    # RBAC's refusal names the user; a namespace of another test on its way out refuses by another text.
    assert "is forbidden: user" not in log.read_text().lower()
