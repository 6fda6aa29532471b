"""Plays seeded faults on a cluster of processes, makes peace, and waits for every job's end."""

import dataclasses
import json
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from ballast_localcluster.rest import CallError
from ballast_localcluster.waiting import patience

from tests.chaos.faults import Fault
from tests.chaos.processes.cluster import REPLICAS, ProcessCluster
from tests.chaos.processes.episode import Episode
from tests.chaos.processes.faults import apply
from tests.chaos.processes.laws import Laws

TICK_SECONDS = 0.8
"""A fault's ``ticks`` are of this length."""

END_SECONDS = 100.0
"""In which every job has to end once nothing goes wrong any more, times ``BALLAST_PATIENCE``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What came of an episode.

    Attributes:
        problems: empty: every job has succeeded and every law held.
        jobs: how many there were.
        applied: faults by kind, without those that an API server that was away did not let happen.
        converged_seconds: from peace to the end of the last job.
        launches: of all jobs.
        probe_kills: replicas killed because their ``/healthz`` failed.
        looks: how often the laws were looked at.
    """

    problems: tuple[str, ...]
    jobs: int
    applied: Counter[str]
    converged_seconds: float
    launches: int
    probe_kills: int
    looks: int


def play(
    faults: Sequence[Fault],
    folder: Path,
    *,
    steps: int,
    at_once: int,
    say: Callable[[str], None] = lambda line: None,
) -> Outcome:
    """One episode on a cluster of its own.

    Args:
        folder: for everything that is written; logs of operators are kept there.
        steps: of each job, a tenth of a second each.
        at_once: jobs that are there at a time.
        say: takes a line for each fault.
    """
    folder.mkdir(parents=True, exist_ok=True)
    with ProcessCluster(folder) as cluster:
        episode = Episode(cluster, steps, at_once)
        applied: Counter[str] = Counter()
        laws = Laws(episode)
        episode.keep_busy()
        _wait(lambda: any(state == "Running" for state in _states(episode).values()))
        laws.start()
        began = time.monotonic()
        for fault in faults:
            _pass(episode, fault.ticks * TICK_SECONDS)
            episode.keep_busy()
            happened = apply(episode, fault.kind, fault.number)
            applied[fault.kind] += happened
            say(f"{time.monotonic() - began:6.1f} s  {fault.kind}{'' if happened else ' (did not happen)'}")
        _pass(episode, faults[-1].ticks * TICK_SECONDS if faults else 0.0)
        episode.make_peace()
        peace = time.monotonic()
        say(f"{peace - began:6.1f} s  peace; {_states(episode)}")
        ended = _wait(lambda: set(_states(episode).values()) == {"Succeeded"})
        converged = time.monotonic() - peace
        if not ended:
            laws.problems.append(f"stuck: {episode.states()}")
        if not _wait(lambda: cluster.health(episode.leader() or REPLICAS[0])[0] == 200):
            laws.problems.append(f"not healthy: {[cluster.health(name) for name in REPLICAS]}")
        launches = sum((status or {}).get("launches", 0) for status in episode.statuses().values())
        laws.end()
        for name in REPLICAS:
            (folder / f"{name}.log").write_text(cluster.log(name).read_text(errors="replace"))
        if laws.problems:
            _keep(episode, folder)
    return Outcome(
        problems=tuple(laws.problems),
        jobs=len(episode.jobs),
        applied=+applied,
        converged_seconds=round(converged, 1),
        launches=launches,
        probe_kills=laws.probe_kills,
        looks=laws.looks,
    )


def _states(episode: Episode) -> dict[str, str]:
    try:
        return episode.states()
    except CallError:
        return {}


def _pass(episode: Episode, seconds: float) -> None:
    """Time passes; what is due is undone."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        time.sleep(min(0.2, left))
        episode.undo_due()
    episode.undo_due()


def _wait(look: Callable[[], bool]) -> bool:
    end = time.monotonic() + END_SECONDS * patience()
    while time.monotonic() < end:
        if look():
            return True
        time.sleep(0.5)
    return False


def _keep(episode: Episode, folder: Path) -> None:
    """What helps to find the cause."""
    from tests.chaos.processes.cluster import NAMESPACE

    (folder / "jobs.json").write_text(json.dumps(episode.statuses(), indent=1))
    for name, path in {
        "pods": f"/api/v1/namespaces/{NAMESPACE}/pods",
        "events": f"/api/v1/namespaces/{NAMESPACE}/events",
        "leases": f"/apis/coordination.k8s.io/v1/namespaces/{NAMESPACE}/leases",
        "nodes": "/api/v1/nodes",
    }.items():
        (folder / f"{name}.json").write_text(json.dumps(episode.cluster.items(path), indent=1))
