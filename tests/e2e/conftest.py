"""One local cluster with process nodes and one operator a test; jobs of real trainer processes."""

import contextlib
import dataclasses
import datetime
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.components import Settings
from ballast_localcluster.nodes.node import default_nodes
from ballast_operator.demo.report import demo_manifests, read_manifests
from ballast_operator.demo.run import running_operator
from ballast_operator.kube.kept_fields import LEAVES_AT_ANNOTATION
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    write_operator_kubeconfig,
)
from ballast_policies.contract.messages import PLAN_KEY, plan_config_map_name
from ballast_policies.contract.plan import Plan
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient

from tests.chaos.processes.machine import parent
from tests.support.access import wait_for_operators_rights
from tests.support.control_plane import CRDS, kubectl
from tests.support.waiting import eventually


@dataclasses.dataclass
class Ballast:
    """A cluster with Ballast installed, and what a test does to it."""

    cluster: LocalCluster
    api: Any
    folder: Path
    namespace: str = "default"

    def __post_init__(self) -> None:
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)
        self.kube = DynamicClient(self.api)
        self.where = {
            "group": "ballast.dev",
            "version": "v1alpha1",
            "plural": "trainingjobs",
            "namespace": self.namespace,
        }

    @contextlib.contextmanager
    def operator(self):
        """The operator as a process, under its own service account."""
        kubeconfig = write_operator_kubeconfig(
            self.api, self.cluster.kubeconfig, self.folder / "operator.kubeconfig"
        )
        with running_operator(kubeconfig, self.folder / "operator.log") as process:
            yield process

    def apply(self, manifest: dict[str, Any]) -> None:
        apply_objects(self.kube, [manifest], namespace=self.namespace)

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return kubectl(self.cluster, *words, namespace=self.namespace, stdin=stdin)

    def job(self, name: str) -> dict[str, Any] | None:
        try:
            return self.custom.get_namespaced_custom_object(name=name, **self.where)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def status(self, name: str) -> dict[str, Any]:
        return (self.job(name) or {}).get("status") or {}

    def wait_for_report(self, name: str, *, step: int = 1, checkpoint: int = 0) -> None:
        """Wait until the trainer has done a step, and saved one; its status follows seconds later."""

        def look() -> bool:
            report = self.report(name)
            return report.get("step", 0) >= step and (report.get("checkpointStep") or 0) >= checkpoint

        eventually(look, f"{name} to report step {step} and a checkpoint of step {checkpoint}")

    def wait_for_state(self, name: str, state: str) -> None:
        eventually(lambda: self.status(name).get("state") == state, f"{name} to be {state}")

    def demo_job(self, name: str, called: str, **spec: Any) -> dict[str, Any]:
        """One of the demo's jobs under another name, with its own checkpoint folder."""
        manifest = demo_object(name, self.folder, **spec)
        manifest["metadata"]["name"] = called
        for volume in manifest["spec"]["template"]["spec"]["volumes"]:
            volume["hostPath"]["path"] = str(self.folder / "checkpoints" / called)
        return manifest

    def report(self, name: str) -> dict[str, Any]:
        """The trainer's last report, as its lease carries it; empty before the first."""
        try:
            lease = client.CoordinationV1Api(self.api).read_namespaced_lease(name, self.namespace)
        except client.ApiException as error:
            if error.status == 404:
                return {}
            raise
        return json.loads((lease.metadata.annotations or {}).get("ballast.dev/report", "{}"))

    def plan(self, name: str) -> Plan:
        """The newest plan."""
        found = self.core.read_namespaced_config_map(plan_config_map_name(name), self.namespace)
        return Plan.from_json(found.data[PLAN_KEY])

    def wait_for_resumed(self, name: str) -> int:
        """The step that a later launch began at, once it has reported a step; the first one reports none."""
        step: int = eventually(lambda: self.report(name).get("resumedFromStep"), f"{name} to resume")
        return step

    def wait_for_nodes(self, name: str, *nodes: str) -> None:
        """Wait until the job has pods on these nodes alone: those of a launch before may go later."""
        eventually(
            lambda: {pod.spec.node_name for pod in self.pods(name)} == set(nodes), f"{name} to be on {nodes}"
        )

    def end_job(self, name: str) -> None:
        """Delete a job, and wait until it has left its GPUs to the next test's."""
        self.delete_job(name)
        eventually(lambda: not self.pods(name), f"the pods of {name} to go")

    def delete_job(self, name: str) -> None:
        self.custom.delete_namespaced_custom_object(name=name, **self.where)

    def pods(self, name: str) -> list[Any]:
        return self.core.list_namespaced_pod(self.namespace, label_selector=f"ballast.dev/job={name}").items

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        found = [c for c in self.status(name).get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def events(self, name: str) -> list[Any]:
        events = self.core.list_namespaced_event(self.namespace).items
        return [
            e for e in events if e.involved_object.kind == "TrainingJob" and e.involved_object.name == name
        ]

    def announce_end(self, node: str) -> None:
        """As a cloud does that takes the machine back, in an hour: no machine is too slow to leave it."""
        at = (datetime.datetime.now(datetime.UTC) + datetime.timedelta(hours=1)).isoformat()
        taints = [{"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}]
        self.core.patch_node(
            node, {"metadata": {"annotations": {LEAVES_AT_ANNOTATION: at}}, "spec": {"taints": taints}}
        )

    def stay(self, node: str) -> None:
        """The notice is withdrawn."""
        self.core.patch_node(
            node, {"metadata": {"annotations": {LEAVES_AT_ANNOTATION: None}}, "spec": {"taints": []}}
        )

    def kill_rank(self, pod: str, *, starts_again: bool = False) -> None:
        """SIGKILL to the trainer process of a pod, as a crash would end it.

        ``starts_again``: to its rank, which is a process of its own; not where pods are forks of a
        server.
        """
        found = {
            int(folder.name)
            for folder in Path("/proc").iterdir()
            if folder.name.isdigit() and self._is_trainer_of(folder, pod)
        }
        # What it starts is like it until it runs another program; the store's server is the first of that.
        processes = [pid for pid in found if (parent(pid) in found) == starts_again]
        os.kill(max(processes), signal.SIGKILL)

    @staticmethod
    def _is_trainer_of(folder: Path, pod: str) -> bool:
        try:
            environment = (folder / "environ").read_bytes().split(b"\0")
            command = (folder / "cmdline").read_bytes()
        except OSError:
            return False
        return f"BALLAST_POD_NAME={pod}".encode() in environment and b"ballast-train" in command


def demo_object(name: str, folder: Path, **spec: Any) -> dict[str, Any]:
    """One of the demo's manifests under its own checkpoint folder, with fields of its spec replaced."""
    (manifest,) = [m for m in read_manifests(demo_manifests()) if m["metadata"]["name"] == name]
    manifest["spec"] |= spec
    for volume in manifest["spec"].get("template", {}).get("spec", {}).get("volumes", []):
        volume["hostPath"]["path"] = str(folder / "checkpoints" / name)
    return manifest


@pytest.fixture(scope="session")
def ballast(tmp_path_factory):
    """A cluster with the demo's nodes, the definitions, the roles and the demo's policy; no operator yet."""
    folder = tmp_path_factory.mktemp("ballast")
    with LocalCluster(nodes=default_nodes(), crds=CRDS, settings=Settings(audit=True)) as cluster:
        api = config.new_client_from_config(str(cluster.kubeconfig))
        found = Ballast(cluster, api, folder)
        apply_objects(found.kube, install_objects(OPERATOR_NAMESPACE))
        wait_for_operators_rights(api, OPERATOR_NAMESPACE)
        found.apply(demo_object("demo", folder))
        yield found
