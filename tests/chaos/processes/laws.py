"""What has to hold while faults come and go, looked at all the time from the API server and the disk."""

import contextlib
import json
import re
import signal
import threading
import time
from collections import Counter, defaultdict
from typing import Any

from ballast_localcluster.rest import CallError

from tests.chaos.processes.cluster import NAMESPACE, NODES, REPLICAS
from tests.chaos.processes.episode import Episode, newest_checkpoint
from tests.chaos.processes.jobs import Job

LOOK_SECONDS = 0.4
PROBE_SECONDS = 3.0
PROBES = 4
"""Failed probes in a row after which a replica is killed, as a kubelet does by ``/healthz``."""

OVERLAP_SECONDS = 1.0
"""Two launches' steps may overlap for this long where the older one's Node object was deleted: its agent
learns of it and kills. Checkpoints are kept apart by the folder's lock."""

LAUNCH = re.compile(r"-(\d+)-\d+$")


class Laws(threading.Thread):
    """Watches an episode until :meth:`end`.

    Attributes:
        problems: laws that were broken.
        probe_kills: replicas killed because ``/healthz`` failed.
    """

    def __init__(self, episode: Episode) -> None:
        super().__init__(daemon=True)
        self._episode = episode
        self._ended = threading.Event()
        self._failed: Counter[str] = Counter()
        self._probed = 0.0
        self._saved: dict[str, list[tuple[float, int]]] = defaultdict(list)
        self.problems: list[str] = []
        self.probe_kills = 0
        self.looks = 0

    def run(self) -> None:
        """Look again and again."""
        while not self._ended.wait(LOOK_SECONDS):
            with contextlib.suppress(CallError):  # the API server may be what is away
                self.look()
            if time.monotonic() - self._probed > PROBE_SECONDS:
                self._probed = time.monotonic()
                self._probe()

    def end(self) -> None:
        """Stop, and look back."""
        self._ended.set()
        self.join()
        self.look_back()

    def look(self) -> None:
        """At what is there now.

        Raises:
            CallError: the API server does not answer.
        """
        self._look_at_checkpoints()
        self._look_at_pods()
        self._look_at_jobs()
        self.looks += 1

    def look_back(self) -> None:
        """At what the processes have noted themselves."""
        for job in self._episode.jobs.values():
            self._look_at_diaries(job)
        for replica in REPLICAS:
            self._look_at_log(replica)

    def _broken(self, problem: str) -> None:
        if problem not in self.problems:
            self.problems.append(problem)

    def _look_at_pods(self) -> None:
        pods = self._episode.cluster.items(f"/api/v1/namespaces/{NAMESPACE}/pods")
        alive = [pod for pod in pods if pod["status"].get("phase") not in ("Succeeded", "Failed")]
        used: Counter[str] = Counter()
        launches: dict[str, set[str]] = defaultdict(set)
        for pod in alive:
            if node := pod["spec"].get("nodeName"):
                used[node] += sum(_gpus(container) for container in pod["spec"]["containers"])
            labels = pod["metadata"].get("labels", {})
            launches[labels.get("ballast.dev/job", "")].add(labels.get("ballast.dev/launch", ""))
        for node, count in used.items():
            if count > NODES[node][1]:
                self._broken(f"over capacity: {node} has {NODES[node][1]} GPUs, its pods {count}")
        for job, numbers in launches.items():
            if len(numbers) > 1:
                self._broken(f"alive at once: launches {sorted(numbers)} of {job}")

    def _look_at_jobs(self) -> None:
        expected = list(self._episode.jobs)
        states = self._episode.states()
        for name in expected:
            if states[name] in ("missing", "Failed"):
                self._broken(f"lost: {name} is {states[name]}")

    def _look_at_checkpoints(self) -> None:
        for job in list(self._episode.jobs.values()):
            newest = newest_checkpoint(job)
            if newest > max((step for _, step in self._saved[job.name]), default=0):
                self._saved[job.name].append((time.time(), newest))

    def _probe(self) -> None:
        for replica in REPLICAS:
            status, _ = self._episode.cluster.health(replica)
            self._failed[replica] = self._failed[replica] + 1 if status == 503 else 0
            if self._failed[replica] >= PROBES:
                self._failed[replica] = 0
                self.probe_kills += 1
                self._episode.cluster.signal(replica, signal.SIGKILL)

    def _look_at_diaries(self, job: Job) -> None:
        """Launches follow each other, each from the newest checkpoint, and together they do every step."""
        launches: dict[int, list[dict[str, Any]]] = defaultdict(list)
        for file in job.diaries.glob("*.jsonl"):
            launch = LAUNCH.search(file.name.split(".")[0])
            assert launch is not None, file
            lines = [json.loads(line) for line in file.read_text().splitlines() if line.endswith("}")]
            launches[int(launch[1])] += lines
        done: set[int] = set()
        ended = 0.0
        for number in sorted(launch for launch in launches if launches[launch]):
            lines = launches[number]
            began, first = min(line["time"] for line in lines), min(line["step"] for line in lines)
            if began < ended - OVERLAP_SECONDS:
                early = f"{ended - began:.1f} s before the one before had ended"
                self._broken(f"alive at once: launch {number} of {job.name} began {early}")
            ended = max(line["time"] for line in lines)
            saved = max((step for at, step in self._saved[job.name] if at < began), default=0)
            if first < saved:
                self._broken(f"lost steps: launch {number} of {job.name} began at {first}, saved was {saved}")
            if done and first > max(done) + 1:
                self._broken(f"left out: launch {number} of {job.name} began at {first} after {max(done)}")
            done |= {line["step"] for line in lines}
        if missing := set(range(job.total)) - done:
            self._broken(f"left out: {job.name} never did {len(missing)} steps, e.g. {min(missing)}")

    def _look_at_log(self, replica: str) -> None:
        lines = self._episode.cluster.log(replica).read_text(errors="replace").splitlines()
        for number, line in enumerate(lines):
            if line.startswith("Traceback"):
                around = "\n".join(lines[max(0, number - 2) : number + 60])
                self._broken(f"a bug: {replica} logged\n{around}")
                return


def _gpus(container: dict[str, Any]) -> int:
    return int(container.get("resources", {}).get("limits", {}).get("nvidia.com/gpu", 0))
