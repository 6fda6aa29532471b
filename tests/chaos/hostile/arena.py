"""A control plane, nodes and one operator as processes, and a look at /healthz all the time."""

import contextlib
import http.client
import subprocess
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any, Self

from ballast_localcluster import LocalCluster, ProcessNode
from ballast_localcluster.components import Settings
from ballast_localcluster.rest import CallError, Rest
from ballast_operator.kube.client import read_json
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    operator_command,
    write_operator_kubeconfig,
)

from tests.chaos.hostile.jobs import NAMESPACE, POOL_LABEL
from tests.chaos.processes.cluster import SETTINGS
from tests.support.access import wait_for_operators_rights
from tests.support.control_plane import CRDS
from tests.support.ports import free_port

POLICY = "trust"
NODES = [ProcessNode(name=f"{pool}-0", gpus=64, pool=pool) for pool in ("fast", "slow")]
LOOK_SECONDS = 0.2
ANSWER_SECONDS = 30.0
"""Limit of one look at /healthz."""


class Arena:
    """The cluster and its operator. A context manager.

    Attributes:
        slowest: the longest answer of ``/healthz`` so far, seconds.
        unhealthy: what it said where it was not well.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.slowest = 0.0
        self.unhealthy: list[str] = []
        self._ended = threading.Event()
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self.local = stack.enter_context(
                LocalCluster(nodes=NODES, crds=CRDS, settings=Settings(audit=True))
            )
            self.rest = Rest(self.local.kubeconfig)
            account = self._install()
            self.log = self.folder / "operator.log"
            self._port = free_port()
            settings = {name: str(value) for name, value in SETTINGS.items()}
            command = [*operator_command(account, settings=settings), "--metrics-port", str(self._port)]
            with self.log.open("wb") as output:
                self.operator = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)
            stack.callback(self._end_operator)
            self._wait_until_served()
            watching = threading.Thread(target=self._watch, daemon=True)
            watching.start()
            stack.callback(watching.join)
            stack.callback(self._ended.set)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def create(self, path: str, text: str) -> None:
        """Create an object by a text that need not be what Python would write.

        Raises:
            CallError: it was refused.
        """
        kubectl = [self.local.kubectl, "--kubeconfig", self.local.kubeconfig]
        command = [*map(str, kubectl), "create", "--raw", path, "-f", "-"]
        done = subprocess.run(command, input=text.encode(), capture_output=True, check=False)
        if done.returncode != 0:
            raise CallError(done.stderr.decode(errors="replace"))

    def merge(self, path: str, patch: Any) -> Any:
        """A merge patch."""
        return self.rest.call("PATCH", path, patch, "application/merge-patch+json")

    def find(self, path: str) -> dict[str, Any] | None:
        """An object; None: it is gone."""
        try:
            found: dict[str, Any] = self.rest.call("GET", path)
        except CallError as error:
            if error.status == 404:
                return None
            raise
        except RecursionError:  # deeper than Python's own decoder can read
            kubectl = [self.local.kubectl, "--kubeconfig", self.local.kubeconfig, "get", "--raw", path]
            text = subprocess.run([*map(str, kubectl)], capture_output=True, check=True).stdout
            found = read_json(text)
        return found

    def _install(self) -> Path:
        from kubernetes import config
        from kubernetes.dynamic import DynamicClient

        with config.new_client_from_config(str(self.local.kubeconfig)) as api:
            installed = install_objects(OPERATOR_NAMESPACE)
            objects = [one for one in installed if one["kind"] != "CustomResourceDefinition"]
            apply_objects(DynamicClient(api), [*objects, *_surroundings()])
            wait_for_operators_rights(api, OPERATOR_NAMESPACE)
            return write_operator_kubeconfig(
                api, self.local.kubeconfig, self.folder / "operator.kubeconfig", token_seconds=86_400
            )

    def _wait_until_served(self) -> None:
        while self.operator.poll() is None:
            if self._look()[0] == http.client.OK:
                return
            time.sleep(LOOK_SECONDS)
        raise AssertionError(f"the operator has ended: {self.log.read_text()}")

    def _watch(self) -> None:
        while not self._ended.wait(LOOK_SECONDS):
            began = time.monotonic()
            status, text = self._look()
            self.slowest = max(self.slowest, time.monotonic() - began)
            if status != http.client.OK and text not in self.unhealthy:
                self.unhealthy.append(text)

    def _look(self) -> tuple[int, str]:
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(f"http://127.0.0.1:{self._port}/healthz", timeout=ANSWER_SECONDS) as answer:
                return answer.status, ""
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, repr(error)

    def _end_operator(self) -> None:
        self.operator.terminate()
        self.operator.wait()


def _surroundings() -> list[dict[str, Any]]:
    pools = [
        {
            "name": node.pool,
            "nodeSelector": {POOL_LABEL: node.pool},
            "gpuType": node.pool,
            "pricePerGpuHour": 1,
        }
        for node in NODES
    ]
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "ClusterPolicy",
            "metadata": {"name": POLICY},
            "spec": {"nodePools": pools, "roundSeconds": 15},
        },
    ]
