"""A real cluster of processes: control plane, node agents, operators behind proxies, trainers."""

import contextlib
import http.client
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import yaml
from ballast_localcluster import LocalCluster, ProcessNode
from ballast_localcluster.rest import CallError, Rest
from ballast_localcluster.supervision.owner import ended
from ballast_localcluster.supervision.processes import MARK_VARIABLE, PART_VARIABLE, marked_processes
from ballast_localcluster.supervision.warden import warden_pid
from ballast_localcluster.waiting import patience
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    operator_command,
    write_operator_kubeconfig,
)

from tests.chaos.processes.machine import parent, send, variables
from tests.chaos.processes.proxy import HOST, Weather
from tests.support.control_plane import CRDS
from tests.support.ports import free_port

HERE = Path(__file__).parent
NAMESPACE = "chaos"
NODES = {"fast-0": ("fast", 2), "fast-1": ("fast", 2), "slow-0": ("slow", 2)}
"""Name -> pool and GPUs; each has an agent of its own."""

REPLICAS = ("operator-0", "operator-1")
API_SERVER, ETCD, SCHEDULER, CONTROLLERS = (
    "kube-apiserver",
    "etcd",
    "kube-scheduler",
    "kube-controller-manager",
)
SETTINGS = {
    "BALLAST_API_REQUEST_SECONDS": 4,
    "BALLAST_API_RESYNC_SECONDS": 8,
    "BALLAST_API_STALE_SECONDS": 8,
    "BALLAST_JOB_ASK_AGAIN_SECONDS": 2,
    "BALLAST_JOB_BIND_SECONDS": 60,
    "BALLAST_JOB_HEARTBEAT_SECONDS": 20,
    "BALLAST_JOB_PROGRESS_SECONDS": 2,
    "BALLAST_JOB_RENEW_SECONDS": 1,
    "BALLAST_JOB_RESTART_BASE_SECONDS": 0.5,
    "BALLAST_JOB_RESTART_MAX_SECONDS": 5,
    "BALLAST_JOB_SHRINK_SECONDS": 30,
    "BALLAST_JOB_START_SECONDS": 90,
    "BALLAST_JOB_STOP_SECONDS": 20,
    "BALLAST_SOLVER_RETRY_SECONDS": 3,
}
"""Shorter than an installation's, so that a fault and what follows from it fit in a minute."""

_TOKEN_SECONDS = 86_400
_CALL_AGAIN_SECONDS = 0.3


class ProcessCluster:
    """The cluster, and how its processes are signalled. A context manager.

    Args:
        folder: for logs of the operators, diaries and checkpoints of the jobs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._weathers = {name: Weather() for name in REPLICAS}
        self.ports: dict[str, int] = {}
        self._stack = contextlib.ExitStack()
        self._restarted: set[str] = set()

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            # Modules of the trainers' data are found as a user's would be in their image.
            path = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
            stack.enter_context(variables(PYTHONPATH=os.pathsep.join(path)))
            self.local = stack.enter_context(LocalCluster(crds=CRDS, keep_logs=False))
            self.rest = Rest(self.local.kubeconfig)
            for name, (pool, gpus) in NODES.items():
                self.local.add_node(ProcessNode(name=name, gpus=gpus, pool=pool))
            self._install()
            for name in REPLICAS:
                self._start_operator(name)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *error: Any) -> None:
        for part in (*self.parts(), API_SERVER, ETCD):  # a stopped process takes no SIGTERM
            self.signal(part, signal.SIGCONT)
        self._stack.__exit__(*error)

    def parts(self) -> list[str]:
        """Names of what runs under the warden."""
        agents = [f"node-agent-{number}" for number in range(len(NODES))]
        return [*REPLICAS, *agents, SCHEDULER, CONTROLLERS]

    def agent(self, node: str) -> str:
        """The part that serves a node."""
        return f"node-agent-{list(NODES).index(node)}"

    def log(self, operator: str) -> Path:
        """What an operator has logged."""
        return self.local.folder / "logs" / f"{operator}.log"

    # Processes

    def pid(self, part: str) -> int | None:
        """The process that the warden has started under this name; None while there is none."""
        warden = warden_pid(self.local.folder)
        marked = marked_processes(f"{PART_VARIABLE}={self.local.folder / part}")
        return next((pid for pid in marked if parent(pid) == warden), None)

    def signal(self, part: str, number: int) -> bool:
        """Signal one part; False where it does not run."""
        pid = self.pid(part)
        return pid is not None and send(pid, number)

    def kill(self, part: str) -> None:
        """SIGKILL; the warden starts it again, as a kubelet would."""
        pid = self.pid(part)
        if pid is None:
            return
        if part in self._restarted or part in REPLICAS:
            send(pid, signal.SIGKILL)
            return
        # The cluster does not restart its own parts: from now on this one is.
        command = [word.decode() for word in Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1]]
        send(pid, signal.SIGKILL)
        while all(end["pid"] != pid for end in ended(self.local.folder)):
            time.sleep(0.05)
        self._restarted.add(part)
        self.local.run(part, command, grace_seconds=5.0 if part.startswith("node-agent") else 0.0)

    def own_processes(self) -> set[int]:
        """Every process of this cluster: no other is ever signalled."""
        return set(marked_processes(f"{MARK_VARIABLE}={self.local.folder}"))

    def signal_process(self, pid: int, number: int) -> bool:
        """Signal a process, if it is one of this cluster."""
        return pid in self.own_processes() and send(pid, number)

    def children(self, part: str) -> list[int]:
        """Processes that a part has started."""
        own = self.pid(part)
        return sorted(pid for pid in self.own_processes() if parent(pid) == own)

    # Between an operator and the API server

    def trouble(self, operator: str, **values: float) -> None:
        """Fields of its proxy's :class:`Weather`, from now on."""
        weather = self._weathers[operator]
        for field, value in values.items():
            setattr(weather, field, value)
        weather.write(self._weather_file(operator))

    def calm(self, operator: str) -> None:
        """Nothing is wrong there any more; watches begin afresh."""
        self._weathers[operator] = Weather()
        self.trouble(operator, broken=time.monotonic())

    def _weather_file(self, operator: str) -> Path:
        return self.folder / f"{operator}.weather.json"

    # The API server, as its administrator

    def call(self, method: str, path: str, body: Any = None, content_type: str = "application/json") -> Any:
        """One request."""
        return self.rest.call(method, path, body, content_type)

    def create(self, path: str, text: str) -> None:
        """Create an object by a text that need not be what Python would write.

        Raises:
            CallError: it was refused.
        """
        kubectl = [
            self.local.kubectl,
            "--kubeconfig",
            self.local.kubeconfig,
            "create",
            "--raw",
            path,
            "-f",
            "-",
        ]
        done = subprocess.run(kubectl, input=text.encode(), capture_output=True, check=False)
        if done.returncode != 0:
            raise CallError(done.stderr.decode(errors="replace"))

    def merge(self, path: str, patch: Any) -> Any:
        """A merge patch."""
        return self.call("PATCH", path, patch, "application/merge-patch+json")

    def insist(self, change: Callable[[], object], *, seconds: float = 60.0) -> None:
        """Make a change in spite of the faults of the moment; what is not there need not be changed.

        Raises:
            CallError: not within ``seconds`` times ``BALLAST_PATIENCE``.
        """
        deadline = time.monotonic() + seconds * patience()
        while True:
            try:
                change()
                return
            except CallError as error:
                if error.status == 404:
                    return
                if time.monotonic() > deadline:
                    raise
            time.sleep(_CALL_AGAIN_SECONDS)

    def items(self, path: str) -> list[dict[str, Any]]:
        """Objects of a list."""
        found: list[dict[str, Any]] = self.call("GET", path)["items"]
        return found

    def health(self, operator: str) -> tuple[int, str]:
        """Status and text of ``/healthz``; 0: no answer."""
        url = f"http://{HOST}:{self.ports[operator]}/healthz"
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(url, timeout=2 * patience()) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()
        except (OSError, http.client.HTTPException) as error:
            return 0, str(error)

    def _install(self) -> None:
        from kubernetes import config
        from kubernetes.dynamic import DynamicClient

        with config.new_client_from_config(str(self.local.kubeconfig)) as api:
            installed = install_objects(OPERATOR_NAMESPACE)
            objects = [one for one in installed if one["kind"] != "CustomResourceDefinition"]
            apply_objects(DynamicClient(api), [*objects, *_surroundings()])
            self._account = write_operator_kubeconfig(
                api, self.local.kubeconfig, self.folder / "operator.kubeconfig", token_seconds=_TOKEN_SECONDS
            )

    def _start_operator(self, name: str) -> None:
        port = free_port()
        arguments = [self.local.server, self.local.folder / "certificates", port, self._weather_file(name)]
        proxy = [sys.executable, str(HERE / "proxy.py"), *map(str, arguments)]
        self.local.run(f"proxy-of-{name}", proxy, grace_seconds=0.0)
        content = yaml.safe_load(self._account.read_text())
        for cluster in content["clusters"]:
            cluster["cluster"]["server"] = f"https://{HOST}:{port}"
        path = self.folder / f"{name}.kubeconfig"
        path.touch(mode=0o600)
        path.write_text(yaml.safe_dump(content))
        self.ports[name] = free_port()
        settings = [f"{variable}={value}" for variable, value in SETTINGS.items()]
        command = ["env", *settings, f"POD_NAME={name}", *operator_command(path, settings={})]
        self.local.run(name, [*command, "--metrics-port", str(self.ports[name])], grace_seconds=10.0)


def _surroundings() -> list[dict[str, Any]]:
    pools = [
        {"name": pool, "nodeSelector": {"ballast.dev/pool": pool}, "gpuType": pool}
        for pool in sorted({pool for pool, _ in NODES.values()})
    ]
    return [
        {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}},
        {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "ClusterPolicy",
            "metadata": {"name": "chaos"},
            "spec": {
                "nodePools": pools,
                "roundSeconds": 15,
                "moves": {"minRunSeconds": 5, "maxMovesPerHour": 1000},
            },
        },
    ]


def command_of_script(diaries: Path, seconds: float) -> list[str]:
    """The command of a job that is a script."""
    return [sys.executable, str(HERE / "paced.py"), str(diaries), str(seconds)]
