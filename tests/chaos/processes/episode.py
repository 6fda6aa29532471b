"""One episode: its jobs, what is wrong now and until when, and who can be a victim."""

import contextlib
import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ballast_localcluster.rest import CallError

from tests.chaos.processes.cluster import NAMESPACE, NODES, REPLICAS, ProcessCluster
from tests.chaos.processes.jobs import PATH, SHAPES, Job

LEADER = "/apis/coordination.k8s.io/v1/namespaces/ballast-system/leases/ballast-operator"


@dataclasses.dataclass
class Episode:
    """What happens in a cluster.

    Attributes:
        steps: of each job.
        at_once: jobs that are there at a time, while more are to come.
    """

    cluster: ProcessCluster
    steps: int
    at_once: int
    jobs: dict[str, Job] = dataclasses.field(default_factory=dict)
    ongoing: list[tuple[float, Callable[[], None]]] = dataclasses.field(default_factory=list)
    _last: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)

    # Jobs

    def submit(self) -> None:
        """One more job, of the next shape."""
        shapes = list(SHAPES)
        number = len(self.jobs)
        job = Job(shapes[number % len(shapes)], number, self.steps, self.cluster.folder)
        manifest = job.manifest()

        def create() -> None:
            try:
                self.cluster.call("POST", PATH, manifest)
            except CallError as error:
                if error.status != 409:  # it was made, and the answer was lost
                    raise

        self.insist(create)
        self.jobs[job.name] = job

    def keep_busy(self) -> None:
        """As many jobs as wanted are there and have not ended."""
        with contextlib.suppress(CallError):
            while len(self.unfinished()) < self.at_once:
                self.submit()

    def states(self) -> dict[str, str]:
        """Name -> ``status.state``; of a job that is gone: missing."""
        return {
            name: "missing" if status is None else status.get("state", "")
            for name, status in self.statuses().items()
        }

    def statuses(self) -> dict[str, dict[str, Any] | None]:
        """Name -> status; of a job that is gone: None. One by one: hostile jobs may be among them."""
        return {name: self._status(name) for name in list(self.jobs)}

    def _status(self, name: str) -> dict[str, Any] | None:
        try:
            return self.cluster.call("GET", f"{PATH}/{name}").get("status") or {}
        except CallError as error:
            if error.status == 404:
                return None
            raise

    def unfinished(self) -> list[str]:
        """Names of jobs without an end."""
        return [name for name, state in self.states().items() if state not in ("Succeeded", "Failed")]

    # Faults

    def later(self, seconds: float, undo: Callable[[], None]) -> None:
        """Something is to be undone then."""
        self.ongoing.append((time.monotonic() + seconds, undo))

    def undo_due(self, *, everything: bool = False) -> None:
        """What is due, or all of it, is undone."""
        now = time.monotonic()
        due = [one for one in self.ongoing if everything or one[0] <= now]
        self.ongoing = [one for one in self.ongoing if one not in due]
        for _, undo in due:
            undo()

    def stop_for(self, part: str, seconds: float) -> None:
        """SIGSTOP, and SIGCONT to the same process."""
        pid = self.cluster.pid(part)
        if pid is not None:
            self.stop_process_for(pid, seconds)

    def stop_process_for(self, pid: int, seconds: float) -> None:
        """The same for any process of the cluster. Its turn comes while this thread waits for it, too."""
        if self.cluster.signal_process(pid, signal.SIGSTOP):
            timer = threading.Timer(seconds, self.cluster.signal_process, (pid, signal.SIGCONT))
            timer.daemon = True
            timer.start()

    def trouble(self, replica: str, field: str, seconds: float, **more: float) -> None:
        """Between one operator and the API server."""
        self.cluster.trouble(replica, **more, **{field: time.monotonic() + seconds})

    def insist(self, change: Callable[[], object]) -> None:
        """Until the API server has taken it."""
        self.cluster.insist(change)

    def delete(self, path: str) -> None:
        """Delete an object, whatever happens meanwhile."""
        self.insist(lambda: self.cluster.call("DELETE", path))

    def register(self, node: str) -> None:
        """A node whose object was deleted comes back, as a machine that has started again does."""
        self.cluster.kill(self.cluster.agent(node))

    def make_peace(self) -> None:
        """Nothing is wrong from now on."""
        for replica in REPLICAS:
            self.cluster.calm(replica)
        for pid in self.cluster.own_processes():
            self.cluster.signal_process(pid, signal.SIGCONT)
        self.undo_due(everything=True)
        missing: set[str] = set()

        def look() -> None:
            nonlocal missing
            missing = set(NODES) - {node["metadata"]["name"] for node in self.cluster.items("/api/v1/nodes")}

        self.insist(look)
        for name in missing:
            self.register(name)

    # Victims

    def leader(self) -> str:
        """The replica that leads; empty: none, or not known."""
        try:
            holder = self.cluster.call("GET", LEADER)["spec"].get("holderIdentity") or ""
        except CallError:
            return ""
        return holder.rpartition("_")[0] if holder.rpartition("_")[0] in REPLICAS else ""

    def job(self, number: int) -> Job:
        """One that has not ended; if there is none, the newest."""
        names = self.unfinished() or list(self.jobs)[-1:]
        return self.jobs[sorted(names)[number % len(names)]]

    def pod(self, number: int) -> str:
        """Name of a pod that has not ended; empty: there is none."""
        pods = self.cluster.items(f"/api/v1/namespaces/{NAMESPACE}/pods")
        alive = [pod for pod in pods if pod["status"].get("phase") in ("Pending", "Running")]
        names = [pod["metadata"]["name"] for pod in alive]
        return sorted(names)[number % len(names)] if names else ""

    def rank(self, number: int) -> int | None:
        """A process that trains."""
        alive = self.cluster.own_processes()
        files = sorted((self.cluster.folder / "diaries").glob("*/*.jsonl"))
        ranks = [pid for pid in map(_pid_of, files) if pid in alive]
        return ranks[number % len(ranks)] if ranks else None


def _pid_of(diary: Path) -> int:
    return int(diary.name.split(".")[-2])


def newest_checkpoint(job: Job) -> int:
    """Step of the newest whole checkpoint on the disk; 0: none, or the storage is away."""
    steps = [0]
    with contextlib.suppress(OSError):
        for name in os.listdir(job.checkpoints):  # noqa: PTH208 - once a second
            text = name.removeprefix("step-")
            if text != name and text.isdecimal():
                steps.append(int(text))
    return max(steps)
