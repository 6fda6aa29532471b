"""For tests against a real API server: one control plane a run, a fresh namespace a test.

``tests/conftest.py`` registers the fixtures.  Nothing starts before a test asks for it.  With
``BALLAST_TEST_KUBECONFIG`` a cluster of your own takes the place of the local one.
"""

import contextlib
import dataclasses
import functools
import os
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

import pytest

from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.waiting import patience

KUBECONFIG_VARIABLE = "BALLAST_TEST_KUBECONFIG"
CRD_FOLDER = Path(__file__).resolve().parents[2] / "crds"
_SERVICE_ACCOUNT_SECONDS = 15.0
_POLL_SECONDS = 0.05

Found = TypeVar("Found")


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


@pytest.fixture(scope="session")
def control_plane() -> Iterator[ControlPlane]:
    """A real API server with controllers and scheduler, no nodes, and the files of ``crds/`` installed."""
    crds = tuple(sorted(CRD_FOLDER.glob("*.yaml")))
    if path := os.environ.get(KUBECONFIG_VARIABLE):
        plane = ControlPlane(kubeconfig=Path(path), cluster=None)
        _apply_crds(plane, crds)
        yield plane
    else:
        with LocalCluster(crds=crds) as cluster:
            yield ControlPlane(kubeconfig=cluster.kubeconfig, cluster=cluster)


@pytest.fixture
def namespace(control_plane: ControlPlane) -> Iterator[str]:
    """Name of a fresh namespace with its default service account; deleted afterwards, without waiting."""
    with fresh_namespace(control_plane) as name:
        yield name


@contextlib.contextmanager
def fresh_namespace(plane: ControlPlane) -> Iterator[str]:
    """A namespace of one's own in any control plane."""
    from kubernetes import client

    name = f"test-{secrets.token_hex(4)}"
    with plane.client() as api:
        core = client.CoreV1Api(api)
        core.create_namespace(client.V1Namespace(metadata=client.V1ObjectMeta(name=name)))
        eventually(
            lambda: [
                a for a in core.list_namespaced_service_account(name).items if a.metadata.name == "default"
            ],
            _SERVICE_ACCOUNT_SECONDS,
            f"the default service account of {name}",
        )
        try:
            yield name
        finally:
            core.delete_namespace(name)


def eventually(look: Callable[[], Found], limit: float, what: str = "the condition") -> Found:
    """Look again and again until the result is true and no assertion fails, and return it.

    Args:
        look: looks once; a falsy result or an AssertionError means not yet, other errors go through.
        limit: seconds, multiplied by ``BALLAST_PATIENCE``.
        what: what is waited for, for the message.

    Raises:
        AssertionError: not within the limit; with what the last look found.
    """
    deadline = time.monotonic() + limit * patience()
    while True:
        failure = None
        result = None
        try:
            result = look()
        except AssertionError as error:
            failure = error
        if failure is None and result:
            return result
        if time.monotonic() > deadline:
            found = failure if failure is not None else f"it found {result!r}"
            raise AssertionError(f"waited {limit:g} s for {what}; at the last look: {found}") from failure
        time.sleep(_POLL_SECONDS)


def _apply_crds(plane: ControlPlane, files: tuple[Path, ...]) -> None:
    import yaml
    from kubernetes import client
    from kubernetes.dynamic import DynamicClient

    with plane.client() as api:
        kinds = DynamicClient(api).resources.get(
            api_version="apiextensions.k8s.io/v1", kind="CustomResourceDefinition"
        )
        extensions = client.ApiextensionsV1Api(api)
        for file in files:
            for manifest in filter(None, yaml.safe_load_all(file.read_text())):
                name = manifest["metadata"]["name"]
                kinds.server_side_apply(
                    body=manifest, name=name, field_manager="ballast-tests", force_conflicts=True
                )
                eventually(functools.partial(_is_established, extensions, name), 30.0, f"the kind {name}")


def _is_established(extensions: Any, name: str) -> bool:
    status = extensions.read_custom_resource_definition(name).status
    return any(c.type == "Established" and c.status == "True" for c in status.conditions or [])
