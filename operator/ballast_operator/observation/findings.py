"""Facts about jobs that passes have learned and no object says: passes write them, views are made with them.

Service accounts, roles and bindings are not watched; after a takeover they are looked at once more.
"""

import dataclasses
import datetime
import math
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.refusals import Refusal

from ballast_operator.api.cluster_policy import NodeHealth
from ballast_operator.api.conditions import JobReason, some_of
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.kube.kinds import Key
from ballast_operator.views.clock import Time, show
from ballast_operator.views.job import JobView

AVOIDED_SECONDS = 600.0
"""Seconds for which a job is not started on a node where its pods did not run in time, if others exist."""

MOST_AVOIDED = 64
"""Nodes that a job avoids at a time."""

MOST_COMPLAINTS = 10_000
"""Jobs whose complaints of nodes are kept."""

MOST_REPORTS = 20_000
"""Reports that are kept from one decision to the next."""


FREE_RESTORATIONS = 5
"""Number of times that what others have changed is put right at once."""

LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause before what others change again and again is put right once more; it doubles up to this."""

QUIET_SECONDS = 2 * LONGEST_PAUSE_SECONDS
"""Without such a change, after which it is forgotten."""


class Found(NamedTuple):
    """Fields of a job's view that no object says; see :class:`JobView`."""

    avoided: frozenset[str] = frozenset()
    blocked: Refusal | None = None
    lacks_rights: bool = False
    lacks_account: bool = False
    queued: Refusal | None = None


NOT_ASKED = Refusal(JobReason.QUEUED, "Kueue has not been asked yet")

_NOTHING, _LAUNCHED = Found(), Found(lacks_rights=True, lacks_account=True)


@dataclasses.dataclass(slots=True)
class _OfJob:
    """Findings on one job: of the launch that has rights or an account, of the generation blocked.

    ``queued``: what Kueue says; a gang that Kueue was not asked about yet stays. ``restorations``: of what
    others had ``changed``, the last at ``restored_at`` and for this generation.
    """

    uid: str
    rights_of: int = 0
    account_of: int = 0
    blocked: tuple[int, Refusal] | None = None
    avoided: dict[str, float] = dataclasses.field(default_factory=dict)
    queued: Refusal | None = NOT_ASKED
    restorations: int = 0
    restored_at: float = 0.0
    restored_for: int = 0
    changed: frozenset[str] = frozenset()


class Complaint(NamedTuple):
    """Complaint of a job about a node: its pod failed there, or its ranks there are ``slow``."""

    node: str
    at: Time
    slow: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class AvoidedNode:
    """A node is avoided by all jobs until a time: pods of jobs failed there, or ranks of jobs are slow."""

    until: Time
    failed: tuple[str, ...]
    slow: tuple[str, ...]

    def __str__(self) -> str:
        said = [f"pods of {some_of(self.failed)} failed there"] * bool(self.failed)
        said += [f"ranks of {some_of(self.slow)} are slow there"] * bool(self.slow)
        return f"avoided until {show(self.until)}: {' and '.join(said)}"


UNTIL_PART = 0.25
"""Part of the time for which a node is avoided to which it is rounded up, so that what is told of a node
does not change with each report of those that stay there."""


def _until(complained: Time, lasts: float) -> Time:
    step = max(1.0, lasts * UNTIL_PART)
    end = math.ceil((complained.timestamp() + lasts) / step) * step
    return datetime.datetime.fromtimestamp(end, datetime.UTC)


class Findings:
    """Findings of passes over all jobs. ``clock``: seconds that never go back.

    Attributes:
        reservations: launches whose writing is under way: their GPUs are taken.
        avoided_by_all: node -> why no job is started there, if there are others; as last judged.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._jobs: dict[Key, _OfJob] = {}
        self._reports: deque[JobView] = deque(maxlen=MOST_REPORTS)
        self.reservations: dict[Key, JobAllocation] = {}
        self.avoided_by_all: dict[str, AvoidedNode] = {}
        self._complaints: dict[Key, Complaint] = {}

    def of(self, view: JobView) -> Found:
        """Findings on the job of ``view`` now."""
        known = self._jobs.get(view.key)
        if known is None or known.uid != view.uid:
            found = _LAUNCHED if view.launch else _NOTHING
            if view.queue and view.status.allocation is None:
                found = found._replace(queued=NOT_ASKED)
            return found._replace(avoided=frozenset(self.avoided_by_all)) if self.avoided_by_all else found
        return Found(
            avoided=self._avoided(known),
            blocked=known.blocked[1] if known.blocked and known.blocked[0] == view.generation else None,
            lacks_rights=bool(view.launch) and known.rights_of != view.launch,
            lacks_account=bool(view.launch) and view.launch not in (known.rights_of, known.account_of),
            queued=known.queued if view.queue and (known.queued != NOT_ASKED or not view.launch) else None,
        )

    def avoid(self, view: JobView, nodes: Iterable[str]) -> None:
        """Do not start the job on these nodes for a while, if there are others."""
        avoided = self._of(view).avoided
        avoided.update(dict.fromkeys(nodes, self._clock() + AVOIDED_SECONDS))
        for node in sorted(avoided, key=lambda name: avoided[name])[:-MOST_AVOIDED]:
            del avoided[node]

    def complain(self, key: Key, complaint: Complaint) -> None:
        """Remember what the job says of a node.

        A job accuses one node at a time, by its name, also when it is made anew: one that fails wherever
        it is started says nothing of nodes. What it measures does not hide where its pods fail.
        """
        known = self._complaints.get(key, complaint)
        if known.node == complaint.node or (known.slow and not complaint.slow):
            self._complaints.pop(key, None)
            self._complaints[key] = complaint
            if len(self._complaints) > MOST_COMPLAINTS:
                del self._complaints[next(iter(self._complaints))]

    def judge(self, health: NodeHealth, now: Time) -> bool:
        """Find the nodes that all jobs avoid by the complaints of several; says whether that is news."""
        within, lasts = datetime.timedelta(seconds=health.within_seconds), health.avoid_seconds
        kept = within + datetime.timedelta(seconds=lasts * (1 + UNTIL_PART))
        self._complaints = {key: it for key, it in self._complaints.items() if it.at + kept > now}
        by_node: defaultdict[str, list[tuple[Time, str, bool]]] = defaultdict(list)
        for key, (node, at, slow) in self._complaints.items():
            by_node[node].append((at, job_id(key), slow))
        found: dict[str, AvoidedNode] = {}
        for node, complaints in by_node.items():
            complaints.sort(reverse=True)
            together = complaints[health.failed_jobs - 1 :] if lasts > 0 else []
            for first, last in zip(complaints, together, strict=False):
                until = _until(first[0], lasts)
                if first[0] - last[0] <= within and until > now:
                    jobs = sorted((job, slow) for at, job, slow in complaints if last[0] <= at <= first[0])
                    found[node] = AvoidedNode(
                        until=until,
                        failed=tuple(job for job, slow in jobs if not slow),
                        slow=tuple(job for job, slow in jobs if slow),
                    )
                    break
        newest = sorted(found, key=lambda node: (found[node].until, node))[-MOST_AVOIDED:]
        news = set(newest) != self.avoided_by_all.keys()
        self.avoided_by_all = {node: found[node] for node in sorted(newest)}
        return news

    def block(self, view: JobView, why: Refusal | None) -> bool:
        """Remember why this generation cannot be launched; says whether that begins or ends a wait."""
        if why is not None or view.key in self._jobs:
            self._of(view).blocked = None if why is None else (view.generation, why)
        return (why is None) != (view.blocked is None)

    def queue(self, view: JobView, why: Refusal | None) -> bool:
        """Remember what Kueue says of the job; says whether that begins or ends a wait."""
        self._of(view).queued = why if view.queue else NOT_ASKED
        return (why is None) != (view.queued is None)

    def left_queue(self, view: JobView) -> bool:
        """True if Kueue has been asked about the job, and nobody has seen to its Workload since it left."""
        return not view.queue and self._of(view).queued != NOT_ASKED

    def rights_granted(self, view: JobView) -> None:
        """Note that the rights that the pods of the job's launch need in order to report exist."""
        self._of(view).rights_of = view.launch

    def account_made(self, view: JobView, launch: int) -> None:
        """The service account of a launch that is being written has been made."""
        self._of(view).account_of = launch

    def pause_before_restoring(self, view: JobView) -> float:
        """Seconds until what others have changed of the job is put right; 0: now.

        Each time later, after a few times. An edit of the job and its deletion do not wait.
        """
        known, now = self._of(view), self._clock()
        if not self.contested(view.key) or known.restored_for != view.generation or view.deleting:
            return 0.0
        pause = min(LONGEST_PAUSE_SECONDS, 2.0 ** min(known.restorations - FREE_RESTORATIONS, 10))
        return max(0.0, known.restored_at + pause - now)

    def restored(self, view: JobView, changed: Iterable[str]) -> None:
        """Count that what others have ``changed`` of the job was put right."""
        known, now = self._of(view), self._clock()
        if now - known.restored_at >= QUIET_SECONDS:
            known.restorations, known.changed = 0, frozenset()
        known.restorations += 1
        known.restored_at, known.restored_for = now, view.generation
        known.changed = known.changed.union(changed)

    def contested(self, key: Key) -> str:
        """Fields of the job that others change again and again, as text; empty: none."""
        known = self._jobs.get(key)
        if known is None or known.restorations < FREE_RESTORATIONS:
            return ""
        if self._clock() - known.restored_at >= QUIET_SECONDS:
            return ""
        return " and ".join(sorted(known.changed))

    def all_contested(self) -> int:
        """Number of jobs that others change again and again."""
        return sum(bool(self.contested(key)) for key in self._jobs)

    def saw(self, view: JobView) -> None:
        """Keep a job as a pass has seen it: its report is measured at the next decision."""
        if view.lease is not None and view.lease.report is not None:
            self._reports.append(view)

    def take_reports(self) -> list[JobView]:
        """Jobs with reports since the last time, for the one reader that measures them."""
        return [self._reports.popleft() for _ in range(len(self._reports))]

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._jobs.pop(key, None)
        self.reservations.pop(key, None)

    def _of(self, view: JobView) -> _OfJob:
        known = self._jobs.get(view.key)
        if known is None or known.uid != view.uid:
            known = self._jobs[view.key] = _OfJob(view.uid)
        return known

    def _avoided(self, known: _OfJob) -> frozenset[str]:
        if not known.avoided:
            return frozenset(self.avoided_by_all)
        now = self._clock()
        return frozenset(self.avoided_by_all).union(
            node for node, until in known.avoided.items() if until > now
        )
