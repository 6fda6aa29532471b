"""A local cluster with process nodes, shared by the tests of this folder; a namespace for each test."""

import json
from collections.abc import Callable

import pytest
from ballast_localcluster import LocalCluster, ProcessNode
from ballast_localcluster.rest import CallError, Rest
from kubernetes import client, config, watch

from tests.support.control_plane import ControlPlane, fresh_namespace, kubectl
from tests.support.waiting import WAIT_SECONDS, eventually


class Pods:
    """Makes pods in one namespace, and looks at them."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        self.cluster = cluster
        self.namespace = namespace
        self._rest = Rest(cluster.kubeconfig)
        self._path = f"/api/v1/namespaces/{namespace}/pods"
        self._begin = self._rest.call("GET", self._path)["metadata"]["resourceVersion"]

    def kubectl(self, *words: str, stdin: str | None = None, check: bool = True) -> str:
        return kubectl(self.cluster, *words, namespace=self.namespace, stdin=stdin, check=check)

    def apply(self, *manifests: dict) -> None:
        items = {"apiVersion": "v1", "kind": "List", "items": list(manifests)}
        self.kubectl("apply", "-f", "-", stdin=json.dumps(items))

    def create(self, name: str, script: str = "", *, container: dict | None = None, **spec) -> None:
        """A pod with one container that runs a shell script; ``container`` and ``spec`` add to them."""
        body = {"name": "main", "image": "none", "command": ["sh", "-c", script], **(container or {})}
        metadata = {"name": name, **spec.pop("metadata", {})}
        # Without kubectl, which takes longer to start than the pod.
        self._rest.call(
            "POST",
            self._path,
            {"metadata": metadata, "spec": {"restartPolicy": "Never", "containers": [body], **spec}},
        )

    def get(self, name: str) -> dict | None:
        try:
            pod: dict = self._rest.call("GET", f"{self._path}/{name}")
        except CallError as error:
            if error.status == 404:
                return None
            raise
        return pod

    def status(self, name: str) -> dict:
        pod = self.get(name)
        assert pod is not None, f"pod {name} is gone"
        return pod["status"]

    def wait_for_phase(self, name: str, *phases: str) -> dict:
        def look() -> dict:
            status = self.status(name)
            assert status["phase"] in phases, status
            return status

        return eventually(look, f"pod {name} to be {' or '.join(phases)}")

    def history(self, name: str, until: Callable[[list[dict]], bool]) -> list[dict]:
        """Every status that a pod has had, in order, up to the first one for which ``until(history)`` holds.

        The API server replays it, so a state that lasted a millisecond is in it.
        """
        statuses: list[dict] = []
        with config.new_client_from_config(str(self.cluster.kubeconfig)) as api:
            changes = watch.Watch().stream(
                client.CoreV1Api(api).list_namespaced_pod,
                self.namespace,
                field_selector=f"metadata.name={name}",
                resource_version=self._begin,
                timeout_seconds=int(WAIT_SECONDS),
            )
            for change in changes:
                statuses.append(change["raw_object"]["status"])
                if until(statuses):
                    return statuses
        raise AssertionError(f"within {WAIT_SECONDS:g} s pod {name} had these statuses only: {statuses}")

    def run(self, name: str, script: str, **more) -> dict:
        """Run a pod to its end; the state its container ended in."""
        self.create(name, script, **more)
        status = self.wait_for_phase(name, "Succeeded", "Failed")
        return status["containerStatuses"][0]["state"]["terminated"]

    def logs(self, name: str) -> str:
        try:
            return self._rest.call("GET", f"{self._path}/{name}/log")
        except CallError as error:
            raise AssertionError(f"no log of {name}: {error}") from error

    def wait_for_log(self, name: str, line: str) -> None:
        eventually(lambda: line in self.logs(name), f"{line!r} in the log of {name}")

    def wait_for_waiting(self, name: str, words: str, kind: str = "containerStatuses") -> None:
        """Wait until the pod's only container of the kind waits, and says so."""

        def look() -> bool:
            states = [container["state"] for container in self.status(name).get(kind, [])]
            return any(words in state.get("waiting", {}).get("message", "") for state in states)

        eventually(look, f"pod {name} to wait: {words}")

    def wait_until_gone(self, name: str) -> None:
        eventually(lambda: self.get(name) is None, f"pod {name} to be gone")


THINGS = """
apiVersion: apiextensions.k8s.io/v1
kind: CustomResourceDefinition
metadata: {name: things.example.dev}
spec:
  group: example.dev
  names: {kind: Thing, plural: things}
  scope: Namespaced
  versions:
  - {name: v1, served: true, storage: true, schema: {openAPIV3Schema: {type: object}}}
"""


@pytest.fixture(scope="session")
def cluster(tmp_path_factory):
    """One cluster with two nodes of two emulated GPUs each, of different speed, and a kind of its own."""
    nodes = [
        ProcessNode(name="fast", gpus=2, pool="fast", slowdown={"default": 2.0, "transformer": 3.5}),
        ProcessNode(name="plain", gpus=2, pool="plain", labels={"size": "small"}),
    ]
    kinds = tmp_path_factory.mktemp("kinds") / "things.yaml"
    kinds.write_text(THINGS)
    with LocalCluster(nodes=nodes, crds=[kinds]) as running:
        yield running


@pytest.fixture
def pods(cluster):
    """Pods in a fresh namespace."""
    with fresh_namespace(ControlPlane(kubeconfig=cluster.kubeconfig, cluster=cluster)) as namespace:
        yield Pods(cluster, namespace)
