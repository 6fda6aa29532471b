"""A real cluster with process nodes, scripted trainers, and operators that die when told."""

import contextlib
import dataclasses
import itertools
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ballast_localcluster import LocalCluster, ProcessNode
from ballast_localcluster.binaries import kubernetes_version
from ballast_localcluster.components import Settings
from ballast_operator.local_operator import OPERATOR_NAMESPACE, install_objects, write_operator_kubeconfig
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient

from tests.support.access import wait_for_operators_rights
from tests.support.control_plane import CRDS, ControlPlane, fresh_namespace
from tests.support.waiting import WAIT_SECONDS, eventually

HERE = Path(__file__).parent

HAS_POD_GROUPS = tuple(map(int, kubernetes_version().removeprefix("v").split(".")[:2])) >= (1, 37)
"""Of the Kubernetes that is built: there the whole suite runs with its own gangs."""

JOBS = {"group": "ballast.dev", "version": "v1alpha1", "plural": "trainingjobs"}


class Nursery:
    """Operators, forked from one warm process."""

    def __init__(self, kubeconfig: Path, folder: Path) -> None:
        self.kubeconfig, self._folder = kubeconfig, folder
        self._numbers = itertools.count()
        self._ends: dict[str, int] = {}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.operator.live.nursery"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=HERE.parents[2],
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in self._process.stdout:
            told = json.loads(line)
            self._ends[told["id"]] = told["code"]

    def _say(self, **order: Any) -> None:
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()

    @contextlib.contextmanager
    def operator(
        self, namespace: str, *, die_after: int | None = None, history: Path | None = None
    ) -> Iterator["Life"]:
        """An operator whose leader's Lease is in ``namespace``; ended on leaving."""
        name = f"operator-{next(self._numbers)}"
        log = self._folder / f"{name}.log"
        self._say(
            id=name,
            dieAfter=die_after,
            kubeconfig=str(self.kubeconfig),
            namespace=namespace,
            log=str(log),
            history=None if history is None else str(history),
        )
        life = Life(self._ends, name, log)
        try:
            yield life
            assert life.code in (None, -signal.SIGKILL), log.read_text()
        finally:
            self._say(id=name, stop=True)
            eventually(lambda: life.code is not None, f"{name} to end")

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait(timeout=WAIT_SECONDS)
        self._process.stdout.close()


@dataclasses.dataclass
class Life:
    """One operator process."""

    ends: dict[str, int]
    name: str
    log: Path

    @property
    def code(self) -> int | None:
        """Its exit code; None while it lives or is started again; -9: SIGKILL."""
        return self.ends.get(self.name)

    @property
    def said(self) -> str:
        """Its log so far."""
        return self.log.read_text() if self.log.exists() else ""


class Stage:
    """One namespace of the cluster, and what happens in it."""

    def __init__(self, api: Any, namespace: str, folder: Path, nursery: Nursery) -> None:
        self.namespace, self.nursery = namespace, nursery
        self._folder = folder
        self.core, self.custom = client.CoreV1Api(api), client.CustomObjectsApi(api)
        self.coordination = client.CoordinationV1Api(api)

    def operator(
        self, *, die_after: int | None = None, history: Path | None = None
    ) -> contextlib.AbstractContextManager[Life]:
        return self.nursery.operator(self.namespace, die_after=die_after, history=history)

    def add_job(
        self,
        name: str,
        *,
        stages: int = 2,
        script: dict[str, Any],
        labels: dict[str, str] | None = None,
        **spec: Any,
    ) -> None:
        trainer = {
            "name": "trainer",
            "image": "not-read-by-process-nodes",
            "command": [sys.executable, str(HERE / "scripted_trainer.py")],
            "env": [{"name": "SCRIPT", "value": json.dumps(script)}],
        }
        content = {
            "totalSteps": script["total"],
            "model": {"name": "gpt"},
            "pipeline": {"minStages": stages, "maxStages": stages, "microbatches": 8, "globalBatchSize": 16},
            "repack": {"enabled": True, "minStages": 1},
        }
        self._create(name, labels, trainer, {**content, **spec})

    def add_command(self, name: str, *, ranks: int, total: int, **spec: Any) -> None:
        """A job without a model: its template's own command, with the client library."""
        container = {
            "name": "train",
            "image": "not-read-by-process-nodes",
            "command": [sys.executable, str(HERE / "script_with_client.py")],
        }
        content = {"totalSteps": total, "pipeline": {"minStages": ranks, "maxStages": ranks}}
        self._create(name, None, container, {**content, **spec})

    def _create(
        self, name: str, labels: dict[str, str] | None, container: dict[str, Any], spec: dict[str, Any]
    ) -> None:
        usual = {
            "checkpoint": {"path": str(self._folder / self.namespace / name)},
            "template": {"spec": {"terminationGracePeriodSeconds": 1, "containers": [container]}},
        }
        body = {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name, "labels": labels},
            "spec": {**usual, **spec},
        }
        self.custom.create_namespaced_custom_object(namespace=self.namespace, body=body, **JOBS)

    def job(self, name: str) -> dict[str, Any] | None:
        try:
            return self.custom.get_namespaced_custom_object(namespace=self.namespace, name=name, **JOBS)
        except client.ApiException as error:
            if error.status == 404:
                return None
            raise

    def status(self, name: str) -> dict[str, Any]:
        return (self.job(name) or {}).get("status") or {}

    def state(self, name: str) -> str:
        return self.status(name).get("state", "")

    def condition(self, name: str, kind: str) -> dict[str, Any]:
        found = [c for c in self.status(name).get("conditions", []) if c["type"] == kind]
        return found[0] if found else {}

    def delete(self, name: str) -> None:
        self.custom.delete_namespaced_custom_object(namespace=self.namespace, name=name, **JOBS)

    def patch(self, name: str, spec: dict[str, Any]) -> None:
        self.custom.patch_namespaced_custom_object(
            namespace=self.namespace, name=name, body={"spec": spec}, **JOBS
        )

    def take_lead(self) -> None:
        """As a replica does that found the leader silent, and then dies."""
        self.coordination.patch_namespaced_lease(
            "ballast-operator",
            self.namespace,
            {"spec": {"holderIdentity": "another", "leaseDurationSeconds": 1}},
        )

    def leader(self) -> str:
        """The leader's identity; empty where there is none."""
        lease = self.coordination.read_namespaced_lease("ballast-operator", self.namespace)
        return lease.spec.holder_identity or ""

    def pods(self, name: str) -> dict[str, Any]:
        """Name -> pod, of the job."""
        found = self.core.list_namespaced_pod(self.namespace, label_selector=f"ballast.dev/job={name}").items
        return {pod.metadata.name: pod for pod in found}

    def clear(self) -> None:
        """Leave no job to the next test's operator, which sees all namespaces, and no GPU in use."""
        self.custom.delete_collection_namespaced_custom_object(namespace=self.namespace, **JOBS)
        self.core.delete_collection_namespaced_pod(self.namespace, grace_period_seconds=0)
        eventually(
            lambda: (
                not self.core.list_namespaced_pod(self.namespace).items
                and not self.custom.list_namespaced_custom_object(namespace=self.namespace, **JOBS)["items"]
            ),
            "jobs and pods to go",
        )

    def wait_for(self, name: str, state: str) -> dict[str, Any]:
        def look() -> dict[str, Any] | None:
            status = self.status(name)
            return status if status.get("state") == state else None

        return eventually(look, f"{name} to be {state}")


@pytest.fixture(scope="session")
def live_cluster() -> Iterator[LocalCluster]:
    """Two nodes with two GPUs each, of two pools, and a ClusterPolicy over them."""
    nodes = [ProcessNode(name=f"{pool}-0", gpus=2, pool=pool) for pool in ("fast", "slow")]
    settings = Settings(audit=True, pod_groups=HAS_POD_GROUPS)
    with LocalCluster(nodes=nodes, crds=CRDS, settings=settings) as cluster:
        with config.new_client_from_config(str(cluster.kubeconfig)) as api:
            kube = DynamicClient(api)
            for manifest in install_objects(OPERATOR_NAMESPACE):
                if manifest["kind"] == "CustomResourceDefinition":
                    continue
                kind = kube.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
                kind.server_side_apply(body=manifest, field_manager="tests", force_conflicts=True)
            client.CustomObjectsApi(api).create_cluster_custom_object(
                group="ballast.dev", version="v1alpha1", plural="clusterpolicies", body=cluster_policy()
            )
            wait_for_operators_rights(api, OPERATOR_NAMESPACE)
        yield cluster


def cluster_policy() -> dict[str, Any]:
    pools = [
        {"name": pool, "nodeSelector": {"ballast.dev/pool": pool}, "gpuType": pool}
        for pool in ("fast", "slow")
    ]
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "live"},
        "spec": {"nodePools": pools, "roundSeconds": 600},
    }


@pytest.fixture(scope="session")
def nursery(live_cluster: LocalCluster, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    """Each operator has the rights of the operator's service account, and no more."""
    folder = tmp_path_factory.mktemp("operators")
    with config.new_client_from_config(str(live_cluster.kubeconfig)) as api:
        account = write_operator_kubeconfig(
            api, live_cluster.kubeconfig, folder / "kubeconfig", token_seconds=86_400
        )
    found = Nursery(account, folder)
    yield found
    found.close()


@pytest.fixture
def stage(live_cluster: LocalCluster, nursery: Nursery, tmp_path: Path) -> Iterator[Stage]:
    """A fresh namespace."""
    plane = ControlPlane(kubeconfig=live_cluster.kubeconfig, cluster=live_cluster)
    with fresh_namespace(plane) as namespace, plane.client() as api:
        found = Stage(api, namespace, tmp_path, nursery)
        yield found
        found.clear()
