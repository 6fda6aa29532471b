"""Elastic jobs on four GPUs that come and end: how soon does each have its share, and what does it cost them?

    python benchmarks/operator/live_elastic.py                  # some three minutes
    python benchmarks/operator/live_elastic.py --output json

Real: API server, controllers, kube-scheduler, node agents, the operator, and trainers that train on the CPU
as if it were slower GPUs. Every job may have 1 to 4 GPUs.

1. `one` and `two` are created together: each should have 2 GPUs.
2. `one` ends: `two` should grow to 4.
3. `three` is created: `two` should shrink to 2, and `three` start on the others.
4. `four` and `five` are created together: `two` and `three` should shrink to 1, and the new jobs have 1 each.

No job may be restarted, and no node may hold more GPUs than it has: every change of a pod that the API server
tells of is counted. A pause is what the trainer's rank 0 reports of a change: how long no rank trained.
"""

import argparse
import collections
import contextlib
import dataclasses
import json
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

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
from kubernetes import client, config, watch
from kubernetes.dynamic import DynamicClient
from live.trainer_jobs import WHERE, trainer_job

NODES = {"v100-0": 2, "v100-1": 2}
"""Node -> GPUs."""

ROUND_SECONDS = 30
LIMIT_SECONDS = 300.0
"""Limit of each change; reached only where it does not happen."""

EMULATED = "GPUs are emulated by the CPU, padded to a multiple of its time; all else is real"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """One step of the story.

    Attributes:
        what: it was.
        gpus: job -> GPUs that each job trained on afterwards.
        seconds: from its cause until all of them did.
    """

    what: str
    gpus: Mapping[str, int]
    seconds: float


class Watched:
    """Changes of jobs and pods that the API server reports, from threads.

    Attributes:
        status: job -> its newest status.
        pauses: (job, when) -> how long training stood still for a change of size, in ms.
        used_most: node -> most GPUs that its pods ever held together.
    """

    def __init__(self, api: Any) -> None:
        self._api = api
        self.status: dict[str, dict[str, Any]] = {}
        self.pauses: dict[tuple[str, str], float] = {}
        self.used_most: collections.Counter[str] = collections.Counter()
        self._holds: dict[str, str] = {}
        self._stopped = threading.Event()
        self._threads: list[threading.Thread] = []

    def start(self) -> None:
        """Follow both from now on, until :meth:`stop`."""
        listed = client.CustomObjectsApi(self._api).list_namespaced_custom_object
        pods = client.CoreV1Api(self._api).list_namespaced_pod
        for take, follow, where in (
            (self._take_job, listed, WHERE),
            (self._take_pod, pods, {"namespace": "default"}),
        ):
            self._threads.append(
                threading.Thread(target=self._follow, args=(take, follow, where), daemon=True)
            )
            self._threads[-1].start()

    def stop(self) -> None:
        """Wait for the threads when the cluster is gone: torch aborts a process that ends with one."""
        self._stopped.set()
        for thread in self._threads:
            thread.join()

    def _follow(self, take: Callable[[str, Any], None], listed: Any, where: Mapping[str, str]) -> None:
        version = None
        while not self._stopped.is_set():
            with contextlib.suppress(urllib3.exceptions.HTTPError, client.ApiException):
                more = {} if version is None else {"resource_version": version}
                stream = watch.Watch()
                for event in stream.stream(listed, **where, **more, timeout_seconds=60):
                    take(event["type"], event["raw_object"])
                version = stream.resource_version

    def _take_job(self, kind: str, item: dict[str, Any]) -> None:
        name, status = item["metadata"]["name"], item.get("status") or {}
        self.status[name] = {} if kind == "DELETED" else status
        held = status.get("allocation") or {}
        if held.get("resizedAt") and held.get("resizePauseMs") is not None:
            self.pauses[name, held["resizedAt"]] = held["resizePauseMs"]

    def _take_pod(self, kind: str, item: dict[str, Any]) -> None:
        name, node = item["metadata"]["name"], item["spec"].get("nodeName")
        ended = kind == "DELETED" or item["status"].get("phase") in ("Succeeded", "Failed")
        if ended or not node:
            self._holds.pop(name, None)
            return
        self._holds[name] = node
        held = collections.Counter(self._holds.values())
        self.used_most[node] = max(self.used_most[node], held[node])

    def trains_on(self) -> dict[str, int]:
        """Job -> GPUs, of jobs that train."""
        found = {}
        for name, status in sorted(self.status.items()):
            held = status.get("allocation")
            if held and not held.get("joining") and (status.get("progress") or {}).get("step"):
                found[name] = held["gpus"]
        return found


def job(name: str, folder: Path, *, steps: int) -> dict[str, Any]:
    """An elastic job of 1 to 4 GPUs."""
    return trainer_job(
        name,
        folder,
        steps=steps,
        model={"name": "recurrent", "layers": 8, "args": {"dim": 32}},
        pipeline={"minStages": 1, "maxStages": 4, "microbatches": 8, "globalBatchSize": 16},
        save_every=100,
        repack={"enabled": False},
    )


def policy() -> dict[str, Any]:
    """Fair shares of one pool."""
    selector = {"ballast.dev/pool": "v100"}
    pool = {"name": "v100", "nodeSelector": selector, "gpuType": "v100", "pricePerGpuHour": 2.48}
    return {
        "apiVersion": "ballast.dev/v1alpha1",
        "kind": "ClusterPolicy",
        "metadata": {"name": "default"},
        "spec": {"roundSeconds": ROUND_SECONDS, "nodePools": [pool]},
    }


class Story:
    """The jobs, and how long each change took."""

    def __init__(self, api: Any, folder: Path, watched: Watched) -> None:
        self._custom, self._folder, self._watched = client.CustomObjectsApi(api), folder, watched
        self.changes: list[Change] = []

    def add(self, *names: str, steps: int = 100_000) -> None:
        """Create jobs."""
        for name in names:
            self._custom.create_namespaced_custom_object(body=job(name, self._folder, steps=steps), **WHERE)

    def until(self, what: str, gpus: Mapping[str, int]) -> None:
        """Wait until exactly these jobs train, each on its number of GPUs; that began now.

        Raises:
            RuntimeError: it does not happen.
        """
        began = time.monotonic()
        self._wait(lambda: self._watched.trains_on() == gpus, f"{what}: {dict(gpus)}")
        self.changes.append(Change(what=what, gpus=gpus, seconds=time.monotonic() - began))

    def end(self, name: str) -> None:
        """The job ends."""
        self._custom.delete_namespaced_custom_object(name=name, **WHERE)
        self._watched.status.pop(name, None)

    def _wait(self, reached: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + LIMIT_SECONDS
        while not reached():
            if time.monotonic() > deadline:
                raise RuntimeError(f"not within {LIMIT_SECONDS:g} s: {what}; {self._watched.status}")
            time.sleep(0.05)


@contextlib.contextmanager
def running(folder: Path, slowdown: float | None = None) -> Iterator[Any]:
    """A cluster with an operator; gives the API client."""
    emulated = {} if slowdown is None else {"slowdown": {"default": slowdown}}
    nodes = [ProcessNode(name=name, gpus=gpus, pool="v100", **emulated) for name, gpus in NODES.items()]
    with (
        LocalCluster(nodes=nodes, crds=[write_definitions(folder)]) as cluster,
        config.new_client_from_config(str(cluster.kubeconfig)) as api,
    ):
        apply_objects(DynamicClient(api), [*install_objects(OPERATOR_NAMESPACE), policy()])
        account = write_operator_kubeconfig(api, cluster.kubeconfig, folder / "operator.kubeconfig")
        with running_operator(account, folder / "operator.log", "--history", str(folder / "history.db")):
            yield api


def play(folder: Path, slowdown: float) -> dict[str, Any]:
    """The whole story; its figures."""
    with running(folder, slowdown) as api:
        watched = Watched(api)
        watched.start()
        story = Story(api, folder, watched)
        story.add("one", "two")
        story.until("two jobs come", {"one": 2, "two": 2})
        story.end("one")
        story.until("one of them ends", {"two": 4})
        story.add("three")
        story.until("a third comes", {"two": 2, "three": 2})
        story.add("four", "five")
        story.until("two more come", {"two": 1, "three": 1, "four": 1, "five": 1})
        restarts = {name: status.get("restarts") or {} for name, status in watched.status.items()}
        return {
            "emulated": EMULATED,
            "round_seconds": ROUND_SECONDS,
            "changes": [dataclasses.asdict(change) for change in story.changes],
            "pauses_ms": [
                {"job": name, "at": at, "pause_ms": pause}
                for (name, at), pause in sorted(watched.pauses.items(), key=lambda entry: entry[0][1])
            ],
            "longest_pause_ms": max(watched.pauses.values()),
            "restarts": sum(sum(causes.values()) for causes in restarts.values()),
            "gpus_used_most": {node: watched.used_most[node] for node in NODES},
            "over_capacity": any(watched.used_most[node] > gpus for node, gpus in NODES.items()),
        }


def show(found: Mapping[str, Any]) -> None:
    """The figures as a table."""
    print(f"{found['emulated']}\n\n| change | GPUs afterwards | s |\n|---|---|---|")
    for change in found["changes"]:
        gpus = ", ".join(f"{name} {count}" for name, count in change["gpus"].items())
        print(f"| {change['what']} | {gpus} | {change['seconds']:.1f} |")
    pauses = ", ".join(f"{row['job']} {row['pause_ms']:.0f}" for row in found["pauses_ms"])
    print(f"\npauses in ms: {pauses}; the longest {found['longest_pause_ms']:.0f}")
    print(
        f"restarts: {found['restarts']}; most GPUs of each node in use: {found['gpus_used_most']}"
        f" of {NODES}; rounds of {found['round_seconds']} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--slowdown", type=float, default=20.0, help="of the emulated GPUs, against the CPU")
    parser.add_argument("--output", choices=["text", "json"], default="text")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-elastic-") as name:
        found = play(Path(name), chosen.slowdown)
    if chosen.output == "json":
        print(json.dumps(found, indent=2))
    else:
        show(found)
    if found["over_capacity"] or found["restarts"]:
        sys.exit("a node held more GPUs than it has, or a job was restarted")


if __name__ == "__main__":
    main()
