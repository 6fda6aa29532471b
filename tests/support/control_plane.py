"""A real API server for tests, and a fresh namespace for each test.

``tests/conftest.py`` registers the fixtures. Nothing starts before a test asks for it. With
``BALLAST_TEST_KUBECONFIG``, the cluster of that kubeconfig replaces the local one.
"""

import contextlib
import dataclasses
import functools
import os
import secrets
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ballast_localcluster import LocalCluster

from tests.support.waiting import WAIT_SECONDS, eventually

KUBECONFIG_VARIABLE = "BALLAST_TEST_KUBECONFIG"
CRDS = tuple(sorted((Path(__file__).resolve().parents[2] / "crds").glob("*.yaml")))
"""The custom resource definitions of this repository."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """A real API server for tests, with the project's custom resource definitions.

    Attributes:
        kubeconfig: of its administrator.
        cluster: the local cluster; None where ``BALLAST_TEST_KUBECONFIG`` names another.
    """

    kubeconfig: Path
    cluster: LocalCluster | None

    @contextlib.contextmanager
    def client(self) -> Iterator[Any]:
        """A ``kubernetes.client.ApiClient`` as administrator, closed afterwards."""
        from kubernetes import config

        with config.new_client_from_config(str(self.kubeconfig)) as api:
            yield api


def kubectl(
    cluster: LocalCluster, *words: str, namespace: str, stdin: str | None = None, check: bool = True
) -> str:
    """What kubectl prints, as a user calls it; without ``check``, what it says where it fails."""
    done = subprocess.run(
        [cluster.kubectl, "--kubeconfig", cluster.kubeconfig, "-n", namespace, *words],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=4 * WAIT_SECONDS,
        check=False,
    )
    assert done.returncode == 0 or not check, done.stderr
    return done.stdout if done.returncode == 0 else done.stderr


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A real API server with controllers and scheduler, no nodes, and the files of ``crds/`` installed."""
    if path := os.environ.get(KUBECONFIG_VARIABLE):
        plane = ControlPlane(kubeconfig=Path(path), cluster=None)
        apply_crds(plane)
        yield plane
    else:
        with LocalCluster(crds=CRDS) as cluster:
            yield ControlPlane(kubeconfig=cluster.kubeconfig, cluster=cluster)


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """Name of a fresh namespace with its default service account; deleted afterwards, without waiting."""
    with fresh_namespace(control_plane) as name:
        yield name


@contextlib.contextmanager
def fresh_namespace(plane: ControlPlane) -> Iterator[str]:
    """A new namespace in any control plane."""
    from kubernetes import client

    name = f"test-{secrets.token_hex(4)}"
    with plane.client() as api:
        core = client.CoreV1Api(api)
        core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=name)))
        eventually(
            lambda: [
                a for a in core.list_namespaced_service_account(name).items if a.metadata.name == "default"
            ],
            f"the default service account of {name}",
        )
        try:
            yield name
        finally:
            core.delete_namespace(name)


def apply_crds(plane: ControlPlane) -> None:
    """Has the files of ``crds/`` installed, and waits until their kinds are served."""
    import yaml
    from kubernetes import client
    from kubernetes.dynamic import DynamicClient

    with plane.client() as api:
        kinds = DynamicClient(api).resources.get(
            api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition"
        )
        extensions = client.ApiextensionsV1Api(api)
        for file in CRDS:
            for manifest in filter(None, yaml.safe_load_all(file.read_text())):
                name = manifest["metadata"]["name"]
                kinds.server_side_apply(
                    body=manifest, name=name, field_manager="ballast-tests", force_conflicts=True
                )
                eventually(functools.partial(_is_established, extensions, name), f"the kind {name}")


def _is_established(extensions: Any, name: str) -> bool:
    status = extensions.read_custom_resource_definition(name).status
    return any(c.type == "Established" and c.status == "True" for c in status.conditions or [])
