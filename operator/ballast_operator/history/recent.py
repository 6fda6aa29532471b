"""The last hours of jobs, pools and decisions, in memory and bounded.

It listens to the caches, takes note of what has changed, and works it out later, in the thread of whoever
reads it: the operator's own loop appends to a queue and does nothing else.
"""

import dataclasses
import datetime
import logging
import math
from array import array
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.messages import REPORT_ANNOTATION, Report, lease_name

from ballast_operator.api.training_job_status import allocation_in
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, LEASE, POLICY, Key, Kind, Object, key_of

logger = logging.getLogger(__name__)

MOST_NOTED = 50_000
"""Changes that wait to be worked out; the oldest are dropped, and counted."""

MOST_SPANS, MOST_EVENTS, MOST_DECISIONS, MOST_ROUNDS = 20_000, 20_000, 10_000, 2_000
MOST_POINTS, MOST_PARTITIONS, MOST_STAGES, LONGEST_TEXT = 120, 16, 256, 500

RESHAPES = ("rebalances", "repacks", "launches")
"""Fields of a status that change where layers may have moved."""

SAMPLE_SECONDS, MOST_SAMPLES = 30.0, 720
"""GPUs of pools are kept every half minute for six hours."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Span:
    """GPUs of one pool that a job held, from ``start`` to ``end`` (epoch seconds); None: it holds them."""

    key: Key
    uid: str
    pool: str
    gpus: int
    launch: int
    start: float
    end: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Happened:
    """Something that happened to a job at ``at``: ``what`` in a word, ``text`` in a sentence."""

    at: float
    uid: str
    what: str
    text: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DecisionLine:
    """Decision of a round on a job, as in ``status.lastDecision``."""

    at: float
    key: Key
    plan_id: str
    chosen: str
    next_best: str
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RoundLine:
    """A round, as ``ClusterPolicy.status.lastRound`` says it; None: it does not."""

    at: float
    plan_id: str
    policy: str
    solve_seconds: float | None
    objective: float | None
    gap: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Partition:
    """The layers of each stage at ``at``: (rank, first layer, layer after the last)."""

    at: float
    step: int
    stages: tuple[tuple[int, int, int], ...]


class Curve:
    """Loss and steps/s of a job; of a long life every second point, every fourth, and so on."""

    def __init__(self) -> None:
        self._at, self._values = array("d"), array("f")
        self._every, self._skipped = 1, 0

    def add(self, at: float, loss: float, speed: float) -> None:
        """Add a point; NaN: not known."""
        self._skipped += 1
        if self._skipped < self._every:
            return
        self._skipped = 0
        self._at.append(at)
        self._values.extend((loss, speed))
        if len(self._at) > MOST_POINTS:
            kept = list(self)[::2]
            self._at, self._values = array("d"), array("f")
            for point in kept:
                self._at.append(point[0])
                self._values.extend(point[1:])
            self._every *= 2

    def __iter__(self) -> Iterator[tuple[float, float, float]]:
        """(time, loss, steps/s), oldest first."""
        return zip(self._at, self._values[::2], self._values[1::2], strict=True)


@dataclasses.dataclass(slots=True)
class _Job:
    """Record of a job that exists."""

    key: Key
    curve: Curve
    open: dict[str, Span]
    partitions: deque[Partition]


class Recent:
    """The last hours of what ``caches`` hold.

    Attributes:
        caches: what it listens to.
        clock: epoch seconds.
        spans, events, decisions, rounds: oldest first.
        samples: (time, pool -> GPUs held).
        dropped: changes that nobody worked out in time, or that cannot be read.
        told: hears, when it is worked out, of (time, a job as it is now or what happened to it, whether it is
            deleted).
    """

    def __init__(
        self, caches: Caches, *, clock: Callable[[], float], sample_seconds: float = SAMPLE_SECONDS
    ) -> None:
        self.caches, self.clock, self._sample_seconds = caches, clock, sample_seconds
        self._noted: deque[tuple[float, Kind, Object | None, Object | None]] = deque(maxlen=MOST_NOTED)
        self._jobs: dict[str, _Job] = {}
        self.spans: deque[Span] = deque(maxlen=MOST_SPANS)
        self.events: deque[Happened] = deque(maxlen=MOST_EVENTS)
        self.decisions: deque[DecisionLine] = deque(maxlen=MOST_DECISIONS)
        self.rounds: deque[RoundLine] = deque(maxlen=MOST_ROUNDS)
        self.samples: deque[tuple[float, dict[str, int]]] = deque(maxlen=MOST_SAMPLES)
        self.dropped = 0
        self.told: Callable[[float, Object | Happened, bool], None] = lambda at, news, deleted: None
        caches.store_listeners.append(self.note)

    def note(self, kind: Kind, old: Object | None, new: Object | None) -> None:
        """Take note of a change; quick, and from any thread."""
        if kind is JOB or kind is POLICY:
            if len(self._noted) == MOST_NOTED:
                self.dropped += 1
            self._noted.append((self.clock(), kind, old, new))

    def work_out(self) -> None:
        """Work out what was noted; one thread at a time."""
        while True:
            try:
                change = self._noted.popleft()
            except IndexError:
                return
            try:
                self._changed(*change)
            except Exception as error:  # a status that somebody edited; it ends neither page nor history
                self.dropped += 1
                logger.warning("a change of %s is left out: %r", key_of(change[3] or change[2] or {}), error)

    def _changed(self, at: float, kind: Kind, old: Object | None, new: Object | None) -> None:
        if kind is POLICY:
            if new is not None:
                self._policy(at, new)
        elif new is None or (old is not None and _uid(old) != _uid(new)):
            if old is not None:
                self._gone(at, old)
            if new is not None:
                self._job(at, None, new)
        else:
            self._job(at, old, new)

    def namespaces(self) -> frozenset[str]:
        """Namespaces of jobs that held GPUs, or of which was decided."""
        return frozenset({*(span.key[0] for span in self.spans), *(line.key[0] for line in self.decisions)})

    def curve(self, uid: str) -> Curve:
        """Curve of a job; empty: nothing is known."""
        job = self._jobs.get(uid)
        return job.curve if job is not None else Curve()

    def partitions(self, uid: str) -> tuple[Partition, ...]:
        """Partitions of a job, oldest first: one for each time that its layers moved."""
        job = self._jobs.get(uid)
        return tuple(job.partitions) if job is not None else ()

    def _policy(self, at: float, item: Object) -> None:
        status: Any = item.get("status") or {}
        last = status.get("lastRound")
        if last and (not self.rounds or self.rounds[-1].plan_id != last.get("planId")):
            line = RoundLine(
                at=seconds_of(last.get("time"), at),
                plan_id=last.get("planId", ""),
                policy=last.get("policy", ""),
                solve_seconds=last.get("solveSeconds"),
                objective=last.get("objectiveValue"),
                gap=last.get("gap"),
            )
            self.rounds.append(line)
        held = {entry["pool"]: int(entry.get("gpusHeld", 0)) for entry in status.get("capacity") or []}
        if not held:
            return
        if self.samples and at - self.samples[-1][0] < self._sample_seconds:
            self.samples[-1] = (self.samples[-1][0], held)
        else:
            self.samples.append((at, held))

    def _gone(self, at: float, item: Object) -> None:
        job = self._jobs.pop(_uid(item), None)
        for span in job.open.values() if job is not None else ():
            span.end = at
        self._happened(at, item, "Deleted", "the job was deleted")
        self.told(at, item, True)

    def _job(self, at: float, old: Object | None, new: Object) -> None:
        uid = _uid(new)
        job = self._jobs.get(uid)
        if job is None:
            old, job = None, _Job(key_of(new), Curve(), {}, deque(maxlen=MOST_PARTITIONS))
            self._jobs[uid] = job
        before: Any = (old or {}).get("status") or {}
        after: Any = new.get("status") or {}
        self.told(at, new, False)
        self._held(at, job, uid, after, first=old is None)
        self._changes(at, new, before, after, first=old is None)
        decision = after.get("lastDecision") or {}
        if decision and decision != before.get("lastDecision"):
            self.decisions.append(
                DecisionLine(
                    at=at if old is not None else _admitted_at(after, at),
                    key=job.key,
                    plan_id=decision.get("planId", ""),
                    chosen=decision.get("chosen", "")[:LONGEST_TEXT],
                    next_best=decision.get("nextBest", "")[:LONGEST_TEXT],
                    why=decision.get("why", "")[:LONGEST_TEXT],
                )
            )
        progress = after.get("progress") or {}
        if progress and progress != before.get("progress"):
            numbers = (progress.get(name) for name in ("loss", "stepsPerSecond"))
            job.curve.add(at, *(math.nan if number is None else float(number) for number in numbers))
        if not job.partitions or any(before.get(name) != after.get(name) for name in RESHAPES):
            self._partition(at, job)

    def _held(self, at: float, job: _Job, uid: str, status: Any, *, first: bool) -> None:
        """Begin and end stretches in which the job held so many GPUs of a pool."""
        allocation = status.get("allocation") or {}
        launch = allocation.get("launch", 1)
        read = allocation_in(status)
        held = {} if read is None else {part.pool: part.gpus for part in read.by_pool if part.gpus}
        for pool, span in list(job.open.items()):
            if held.get(pool) != span.gpus or span.launch != launch:
                span.end = at
                del job.open[pool]
        start = at
        if first:  # it began before anybody looked
            since = max(
                seconds_of(allocation.get("since"), at), seconds_of(allocation.get("resizedAt"), -math.inf)
            )
            start = min(at, since)
        for pool, gpus in held.items():
            if pool not in job.open:
                span = Span(key=job.key, uid=uid, pool=pool, gpus=gpus, launch=launch, start=start)
                job.open[pool] = span
                self.spans.append(span)

    def _changes(self, at: float, item: Object, before: Any, after: Any, *, first: bool) -> None:
        """Lines about a job: launches and their ends, changes of size, moves of layers, its end."""
        was, held = before.get("allocation") or {}, after.get("allocation") or {}
        if held and (not was or was.get("launch") != held.get("launch")):
            read = allocation_in(after)
            parts = " and ".join(map(str, () if read is None else read.by_pool))
            start = seconds_of(held.get("since"), at)
            self._happened(start, item, "Launched", f"launch {held.get('launch', 1)} on {parts}")
        elif held and was and was.get("gpus") != held.get("gpus"):
            more = held.get("gpus", 0) > was.get("gpus", 0)
            text = f"from {was.get('gpus', 0)} to {held.get('gpus', 0)} GPUs"
            self._happened(at, item, "Grown" if more else "Shrunk", text)
        ending = held.get("ending") or {}
        if ending and not was.get("ending"):
            since = seconds_of(ending.get("since"), at)
            self._happened(since, item, str(ending.get("cause", "Ending")), ending.get("message", ""))
        for name, what in (("rebalances", "LayersMoved"), ("repacks", "Repacked")):
            known = _settled(before, name)
            for entry in [e for e in _settled(after, name) if e not in known]:
                self._happened(seconds_of(entry.get("time"), at), item, what, _entry(entry))
        for cause, count in (after.get("restarts") or {}).items():
            if not first and count > (before.get("restarts") or {}).get(cause, 0):
                self._happened(at, item, "Restarted", f"by {cause}")
        if after.get("state") != before.get("state") and after.get("state") in ("Succeeded", "Failed"):
            ends = [c for c in after.get("conditions") or [] if c["type"] == after["state"]]
            message = ends[0].get("message", "") if ends else ""
            self._happened(seconds_of(after.get("finishedAt"), at), item, after["state"], message)

    def _happened(self, at: float, item: Object, what: str, text: str) -> None:
        happened = Happened(at=at, uid=_uid(item), what=what, text=text[:LONGEST_TEXT])
        self.events.append(happened)
        self.told(at, happened, False)

    def _partition(self, at: float, job: _Job) -> None:
        found = partition_now(self.caches, job.key, at)
        if found is not None and (not job.partitions or job.partitions[-1].stages != found.stages):
            job.partitions.append(found)


def partition_now(caches: Caches, key: Key, at: float) -> Partition | None:
    """The layers of each stage, by the newest report of the job's trainer; None: there is none."""
    lease = caches[LEASE].get((key[0], lease_name(key[1])))
    text = ((lease or {}).get("metadata", {}).get("annotations") or {}).get(REPORT_ANNOTATION)
    if text is None:
        return None
    try:
        report = Report.from_json(text)
    except ContractError:
        return None
    stages = tuple((s.rank, s.first_layer, s.end_layer) for s in report.stages[:MOST_STAGES])
    return Partition(at=at, step=report.step, stages=stages) if stages else None


def seconds_of(time: str | None, otherwise: float) -> float:
    """Epoch seconds of a time of the API; ``otherwise`` where there is none."""
    if not time:
        return otherwise
    try:
        return datetime.datetime.fromisoformat(time).timestamp()
    except ValueError:
        return otherwise


def _admitted_at(status: Any, otherwise: float) -> float:
    times = (c.get("lastTransitionTime") for c in status.get("conditions") or [] if c["type"] == "Admitted")
    return seconds_of(next(times, None), otherwise)


def _uid(item: Object) -> str:
    return str(item["metadata"].get("uid", ""))


def _settled(status: Any, name: str) -> list[Any]:
    """Entries that no later report completes: the effect of the last move of layers is measured later."""
    *earlier, last = status.get(name) or [None]
    over = (last or {}).get("launch") != (status.get("allocation") or {}).get("launch")
    if last is None or (name == "rebalances" and last.get("imbalanceAfter") is None and not over):
        return earlier
    return [*earlier, last]


def _entry(entry: Any) -> str:
    pause = f", pause {entry['pauseMs']:.0f} ms" if entry.get("pauseMs") is not None else ""
    if "releasedPods" in entry:
        return f"at step {entry.get('step', 0)}: {len(entry['releasedPods'])} pods released{pause}"
    if entry.get("imbalanceBefore") is not None and entry.get("imbalanceAfter") is not None:
        change = f": imbalance {entry['imbalanceBefore']:.0%} to {entry['imbalanceAfter']:.0%}"
    else:
        change = ""
    return f"at step {entry.get('step', 0)}{change}{pause}"
