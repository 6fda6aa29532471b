"""The live side: a local control plane, process nodes, the operator, and a trace's jobs handed in on time."""

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import urllib3
from ballast_localcluster import LocalCluster, ProcessNode
from ballast_operator.demo.run import running_operator
from ballast_operator.local_operator import (
    OPERATOR_NAMESPACE,
    apply_objects,
    install_objects,
    write_definitions,
    write_operator_kubeconfig,
)
from ballast_policies.simulator.settings import LIST_PRICES
from ballast_policies.simulator.workloads import TraceJob, Workload
from ballast_policies.throughput.table import ThroughputTable
from kubernetes import client, config, watch
from kubernetes.dynamic import DynamicClient

NAMESPACE = "default"
STAND_IN = Path(__file__).resolve().parent / "stand_in.py"
JOBS = {"group": "ballast.dev", "version": "v1alpha1", "plural": "trainingjobs"}
START_SECONDS = 60.0
SETTLE_SECONDS = 2.0
"""Pause after the decision that a change of policy causes: its status is written, which may cause another."""
LAST_LINES = 40
LAYERS = 8


@dataclasses.dataclass(slots=True, kw_only=True)
class Seen:
    """Reports of the API server on one job; times in Unix seconds.

    Attributes:
        submitted: just before it was created.
        granted: launch -> when its allocation was first seen.
        released: launch -> when its GPUs were seen to be free.
        succeeded: when ``Succeeded`` was first seen to be true.
        restarts: by cause, those that the trace does not explain.
    """

    submitted: float
    granted: dict[int, float] = dataclasses.field(default_factory=dict)
    ending: dict[int, float] = dataclasses.field(default_factory=dict)
    released: dict[int, float] = dataclasses.field(default_factory=dict)
    succeeded: float | None = None
    problem: str = ""
    restarts: dict[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LiveRun:
    """One trace under one policy. ``events``: job -> what its rank 0 wrote down."""

    began: float
    jobs: Mapping[str, Seen]
    events: Mapping[str, list[dict[str, Any]]]


class Live:
    """A running cluster with a running operator."""

    def __init__(
        self, folder: Path, kubeconfig: Path, log: Path, operator: "subprocess.Popen[bytes]"
    ) -> None:
        self.folder = folder
        self.operator = operator
        self._log = log
        self._api = config.new_client_from_config(str(kubeconfig))
        self._watch_api = config.new_client_from_config(str(kubeconfig))
        self._kube = DynamicClient(self._api)
        self._custom = client.CustomObjectsApi(self._api)

    def use_policy(self, name: str, gpus: Mapping[str, int], round_seconds: int) -> None:
        """One pool a GPU type, all rounds free to move whom they want, as the simulator has it."""
        pools = [
            {
                "name": kind,
                "gpuType": kind,
                "nodeSelector": {"ballast.dev/pool": kind},
                "pricePerGpuHour": LIST_PRICES[kind],
            }
            for kind in gpus
        ]
        policy = {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "ClusterPolicy",
            "metadata": {"name": "comparison"},
            "spec": {
                "objective": {"policy": name},
                "roundSeconds": round_seconds,
                "moves": {"minRunSeconds": 0, "maxMovesPerHour": 3600},
                "nodePools": pools,
            },
        }
        with self._log.open() as log:
            log.seek(0, 2)
            apply_objects(self._kube, [policy])
            _next_decision(log)

    def run(self, workload: Workload, table: ThroughputTable, *, limit_seconds: float) -> LiveRun:
        """Hand the jobs in at their times, from the end of a round on, and wait until all are done.

        Raises:
            RuntimeError: the operator ended, a job failed, or the limit passed.
        """
        jobs = list(workload.jobs)
        tag = f"{time.time_ns() // 1_000_000_000 % 100_000:05d}"
        names = [f"t{tag}-{index:03d}" for index in range(len(jobs))]
        seen: dict[str, Seen] = {}
        with _Watching(self._watch_api, seen):
            began = next_round(self._log)
            for name, job in zip(names, jobs, strict=True):
                _wait_until(began + job.arrival)
                seen[name] = Seen(submitted=time.time())
                manifest = self._manifest(name, job, table)
                self._custom.create_namespaced_custom_object(namespace=NAMESPACE, body=manifest, **JOBS)
            self._wait(seen, began + limit_seconds)
        events = {name: self._events(name) for name in names}
        for name in names:
            self._custom.delete_namespaced_custom_object(namespace=NAMESPACE, name=name, **JOBS)
        return LiveRun(began=began, jobs=seen, events=events)

    def _manifest(self, name: str, job: TraceJob, table: ThroughputTable) -> dict[str, Any]:
        gpus = job.type.gpus
        rates = {kind: table.alone(job.type, kind) for kind in table.gpu_types}
        known = [{"gpuType": k, "stages": gpus, "stepsPerSecond": rate} for k, rate in rates.items()]
        env = {"BALLAST_LIVE_RATES": json.dumps(rates), "BALLAST_LIVE_STEPS": str(int(job.steps))}
        container = {
            "name": "trainer",
            "image": "none",
            "command": [sys.executable, str(STAND_IN)],
            "env": [{"name": key, "value": value} for key, value in env.items()],
            "volumeMounts": [{"name": "checkpoints", "mountPath": "/checkpoints"}],
        }
        volume = {
            "name": "checkpoints",
            "hostPath": {"path": str(self.folder / "checkpoints"), "type": "DirectoryOrCreate"},
        }
        return {
            "apiVersion": "ballast.dev/v1alpha1",
            "kind": "TrainingJob",
            "metadata": {"name": name},
            "spec": {
                "totalSteps": int(job.steps),
                "model": {"name": "gpt", "layers": LAYERS},
                "pipeline": {
                    "minStages": gpus,
                    "maxStages": gpus,
                    "microbatches": LAYERS,
                    "globalBatchSize": LAYERS,
                },
                "weight": job.weight,
                "throughput": known,
                "checkpoint": {"path": f"/checkpoints/{name}", "everySteps": 1000},
                "template": {"spec": {"containers": [container], "volumes": [volume]}},
            },
        }

    def _events(self, name: str) -> list[dict[str, Any]]:
        path = self.folder / "checkpoints" / name / "events.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()]

    def _wait(self, seen: Mapping[str, Seen], deadline: float) -> None:
        while not all(job.succeeded for job in seen.values()):
            broken = {name: job.problem for name, job in seen.items() if job.problem}
            if broken:
                raise RuntimeError(f"jobs failed: {broken}; the operator's log: {self._log}")
            if self.operator.poll() is not None:
                last = "\n".join(self._log.read_text().splitlines()[-LAST_LINES:])
                raise RuntimeError(f"the operator ended with code {self.operator.returncode}:\n{last}")
            if time.time() > deadline:
                waiting = [name for name, job in seen.items() if not job.succeeded]
                raise RuntimeError(f"not done in time: {waiting}; the operator's log: {self._log}")
            time.sleep(0.2)


def next_round(operator_log: Path) -> float:
    """Wait for the operator to begin a round; when it did, in Unix seconds.

    Without jobs nothing else makes it decide, once it has taken in the policy.
    """
    time.sleep(SETTLE_SECONDS)
    with operator_log.open() as log:
        log.seek(0, 2)
        return _next_decision(log)


def _next_decision(log: TextIO) -> float:
    deadline = time.time() + START_SECONDS
    while time.time() < deadline:
        line = log.readline()
        if "round planId=" in line:
            return time.time()
        if not line:
            time.sleep(0.01)
    raise RuntimeError(f"the operator decides nothing; its log: {log.name}")


@contextlib.contextmanager
def running(gpus: Mapping[str, int], folder: Path) -> Iterator[Live]:
    """A cluster with one node of emulated GPUs a type, and the operator on it."""
    nodes = [ProcessNode(name=kind, pool=kind, gpus=count) for kind, count in gpus.items()]
    (folder / "checkpoints").mkdir()
    with LocalCluster(nodes=nodes, crds=[write_definitions(folder)]) as cluster:
        with config.new_client_from_config(str(cluster.kubeconfig)) as api:
            apply_objects(DynamicClient(api), install_objects(OPERATOR_NAMESPACE))
            account = write_operator_kubeconfig(api, cluster.kubeconfig, folder / "operator.kubeconfig")
        # On a busy machine a renewal may come late; there is no other candidate here.
        os.environ.update(BALLAST_LEADER_LEASE_SECONDS="90", BALLAST_LEADER_FENCE_SECONDS="80")
        log = folder / "operator.log"
        with running_operator(account, log, "--history", str(folder / "history.db")) as operator:
            yield Live(folder, cluster.kubeconfig, log, operator)


class _Watching:
    """Follows the TrainingJobs in a thread and writes down when what was seen first."""

    def __init__(self, api: client.ApiClient, seen: dict[str, Seen]) -> None:
        self._custom = client.CustomObjectsApi(api)
        self._seen = seen
        self._stopped = threading.Event()
        self._watch = watch.Watch()

    def __enter__(self) -> "_Watching":
        threading.Thread(target=self._follow, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._stopped.set()
        self._watch.stop()

    def _follow(self) -> None:
        while not self._stopped.is_set():
            stream = self._watch.stream(
                self._custom.list_namespaced_custom_object, namespace=NAMESPACE, timeout_seconds=60, **JOBS
            )
            with contextlib.suppress(urllib3.exceptions.HTTPError):  # broken off; it is opened again
                for event in stream:
                    if self._stopped.is_set():
                        return
                    self._take_in(event["object"], time.time())

    def _take_in(self, item: dict[str, Any], now: float) -> None:
        job = self._seen.get(item["metadata"]["name"])
        status = item.get("status") or {}
        if job is None:
            return
        held = status.get("allocation")
        if held is not None:
            job.granted.setdefault(held["launch"], now)
            if held.get("ending"):
                job.ending.setdefault(held["launch"], now)
        for launch in job.granted:
            if held is None or held["launch"] != launch:
                job.released.setdefault(launch, now)
        for condition in status.get("conditions", []):
            if condition["status"] == "True" and condition["type"] == "Succeeded" and not job.succeeded:
                job.succeeded = now
            if condition["status"] == "True" and condition["type"] == "Failed":
                job.problem = condition["message"]
        job.restarts = {c: n for c, n in (status.get("restarts") or {}).items() if c != "Preempted" and n}


def _wait_until(moment: float) -> None:
    left = moment - time.time()
    if left > 0:
        time.sleep(left)
