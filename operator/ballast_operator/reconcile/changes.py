"""Changes of the cluster: which asks for a pass over which job, how urgently, and which for a decision.

A pass waits in :class:`KeyQueue` for a worker. The operator's own writes ask for nothing: the writer knows. A
trainer that only reports is looked at a few times a minute. Nothing is decided here.
"""

import asyncio
import enum
import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Awaitable, Callable
from typing import NamedTuple

from ballast_policies.protocol.observed import Action

from ballast_operator.api.conditions import JobCondition
from ballast_operator.errors import Conflict, Fenced, NotFound, NotLeader, Rejected, Unavailable, for_good
from ballast_operator.kube.caches import job_of
from ballast_operator.kube.kinds import JOB, LEASE, NODE, POD, POLICY, Key, Kind, Object, key_of
from ballast_operator.metrics import Metrics
from ballast_operator.observation.observer import Observer
from ballast_operator.reconcile.reconciler import PROGRESS_WRITES_PER_SECOND, Reconciler
from ballast_operator.settings import JobSettings
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView, held_of_node, is_ours

logger = logging.getLogger(__name__)

TURNS = 16
"""Keys taken of which one comes from the least urgent lane, so that it is never starved."""


class Lane(enum.IntEnum):
    """Urgency of a key among those that are due."""

    URGENT = 0
    """GPUs wait for it: a launch, a stop, an answer to a trainer."""
    ORDINARY = 1
    """A change of a job that trains."""
    BACKGROUND = 2
    """Something to tell people: why a job waits, how far it is."""


class _Plan(NamedTuple):
    due: float
    lane: Lane
    number: int


class KeyQueue:
    """Keys of jobs to reconcile, at once or later, the urgent ones first.

    A key waits at most once, and one worker at most has it. Level-triggered: adding a key that waits changes
    nothing but, maybe, makes it earlier or more urgent; a key that is added while it is worked on is worked
    on once more afterwards.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._plans: dict[Key, _Plan] = {}
        self._later: list[tuple[float, int, Key]] = []
        self._ready: dict[Lane, deque[tuple[int, Key]]] = {lane: deque() for lane in Lane}
        self._numbers = itertools.count()
        self._taken = itertools.count(1)
        self._busy: set[Key] = set()
        self._changed = asyncio.Event()

    def due(self) -> int:
        """Number of keys that could be worked on now; from any thread."""
        now = self._clock()
        return sum(plan.due <= now for plan in tuple(self._plans.values())) + len(self._busy)

    def busy(self, key: Key) -> bool:
        """True if a worker has the key."""
        return key in self._busy

    def add(self, key: Key, after_seconds: float = 0.0, lane: Lane = Lane.ORDINARY) -> None:
        """Work on ``key`` in ``after_seconds``, or earlier or more urgently where that is planned already."""
        due, known = self._clock() + after_seconds, self._plans.get(key)
        if known is not None:
            if known.due <= due and known.lane <= lane:
                return
            due, lane = min(due, known.due), min(lane, known.lane)
        plan = self._plans[key] = _Plan(due, lane, next(self._numbers))
        heapq.heappush(self._later, (due, plan.number, key))
        self._tell()

    async def take(self, least: Lane = Lane.BACKGROUND, most: Lane = Lane.URGENT) -> Key:
        """The most urgent key that is due and not in work; it is in work from now on.

        Keys that are less urgent than ``least``, or more than ``most``, are left to others.
        """
        while True:
            self._sort_due()
            found = self._next(least, most)
            if found is not None:
                return found
            changed = self._changed
            wait = max(0.0, self._later[0][0] - self._clock()) if self._later else None
            try:
                # Not wait_for: it may swallow a cancellation that comes together with the change.
                async with asyncio.timeout(wait):
                    await changed.wait()
            except TimeoutError:
                continue

    def done(self, key: Key) -> None:
        """The work on ``key`` has ended."""
        self._busy.discard(key)
        plan = self._plans.get(key)
        if plan is not None:  # it may have been passed over meanwhile
            heapq.heappush(self._later, (plan.due, plan.number, key))
        self._tell()

    async def work(
        self,
        worker: Callable[[Key], Awaitable[None]],
        least: Lane = Lane.BACKGROUND,
        most: Lane = Lane.URGENT,
    ) -> None:
        """Take keys and work on them until cancelled; ``worker`` handles its own errors.

        Between two keys everything else on the event loop has its turn: a pass that writes nothing waits for
        nothing, and thousands of them would hold up a launch under way.
        """
        while True:
            key = await self.take(least, most)
            try:
                await worker(key)
            finally:
                self.done(key)
            await asyncio.sleep(0)

    def _sort_due(self) -> None:
        """Move what is due to its lane; entries that a later plan has replaced are dropped."""
        now = self._clock()
        while self._later:
            due, number, key = self._later[0]
            plan = self._plans.get(key)
            if plan is None or plan.number != number:
                heapq.heappop(self._later)
            elif due > now:
                return
            else:
                heapq.heappop(self._later)
                self._ready[plan.lane].append((number, key))

    def _tell(self) -> None:
        """Wake everybody who waits for a change."""
        self._changed.set()
        self._changed = asyncio.Event()

    def _next(self, least: Lane, most: Lane) -> Key | None:
        lanes = [lane for lane in Lane if most <= lane <= least and self._ready[lane]]
        if lanes and next(self._taken) % TURNS == 0:
            lanes.reverse()
        for lane in lanes:
            ready = self._ready[lane]
            while ready:
                number, key = ready.popleft()
                plan = self._plans.get(key)
                if plan is None or plan.number != number or key in self._busy:
                    continue  # done() brings a busy one back
                del self._plans[key]
                self._busy.add(key)
                return key
        return None


MOST_SECONDS, MOST_SECONDS_REFUSED = 60.0, 3600.0
"""Longest pauses until a pass is repeated without news; the second where the content is refused."""

FENCED_SECONDS = 5.0
"""Longest of these pauses while the leader's Lease is not renewed: pods may wait for what is written next."""

FAILING = 5
"""Passes in a row that end with an error, from which on a job counts as failing."""


class ReconcileWorker:
    """Runs passes for a queue and says when to look again; the one place where a pass's errors end."""

    def __init__(
        self, reconciler: Reconciler, *, metrics: Metrics, again: Callable[[Key, float], None]
    ) -> None:
        self._reconciler = reconciler
        self._metrics = metrics
        for reason in ("Conflict", "NotFound", "Unavailable", "Rejected", "Bug", "Report"):
            metrics.reconcile_errors.labels(reason)
        self._again = again
        self._failures: dict[Key, int] = {}

    @property
    def failing(self) -> int:
        """Jobs of which no pass succeeds."""
        return sum(1 for count in self._failures.values() if count >= FAILING)

    async def __call__(self, key: Key) -> None:
        """A pass over ``key``; NotLeader is raised on."""
        started = time.monotonic()
        try:
            again = await self._reconciler.reconcile(key)
        except (Conflict, NotFound) as error:
            logger.debug("job=%s/%s requeued: %s", *key, error)
            self._later(key, type(error).__name__, base=0.1)
        except Unavailable as error:
            # That the Lease has lapsed is told once, and holds for all jobs; nothing was asked for.
            fenced = isinstance(error, Fenced)
            logger.log(logging.DEBUG if fenced else logging.WARNING, "job=%s/%s requeued: %s", *key, error)
            self._later(key, "Unavailable", base=1.0, most=FENCED_SECONDS if fenced else MOST_SECONDS)
        except Rejected as error:
            logger.error("job=%s/%s refused by the API server: %s", *key, error)
            await self._reconciler.report_error(key, error)
            most = MOST_SECONDS_REFUSED if for_good(error) else MOST_SECONDS
            self._later(key, "Rejected", base=5.0, most=most)
        except NotLeader:
            raise
        except Exception as error:  # a bug in one job's pass must not stop the others'
            logger.exception("job=%s/%s failed", *key)
            await self._reconciler.report_error(key, error)
            self._later(key, "Bug", base=5.0)
        else:
            self._failures.pop(key, None)
            if again.after_seconds is not None:
                self._again(key, again.after_seconds)
            for other in again.others:
                self._again(other, 0.0)
        finally:
            self._metrics.reconcile_seconds.observe(time.monotonic() - started)

    def _later(self, key: Key, reason: str, *, base: float, most: float = MOST_SECONDS) -> None:
        self._metrics.reconcile_errors.labels(reason).inc()
        self._failures[key] = self._failures.get(key, 0) + 1
        self._again(key, min(most, base * 2.0 ** min(self._failures[key] - 1, 20)))


UNDECIDED_SECONDS = 5.0
"""A new job is looked at after this long, or when the allocator has decided on it."""

OWN_WRITE_SECONDS = 1.0
"""Pause before a status that somebody else may have changed is looked at."""


class Changes:
    """Fills the queue from the caches; ``arrived`` asks for a new job's decision."""

    def __init__(
        self,
        observer: Observer,
        queue: KeyQueue,
        *,
        settings: JobSettings,
        allocate: Callable[[], None],
        arrived: Callable[[JobView], None],
    ) -> None:
        self._observer = observer
        self._caches = observer.caches
        self._queue = queue
        self._settings = settings
        self._jobs: dict[Key, tuple[str, int, bool]] = {}
        self._told: dict[Key, tuple[object, ...]] = {}
        self._turns: dict[Key, float] = {}
        self._last_turn = 0.0
        self._policies: dict[str, tuple[str, int]] = {}
        self._nodes: dict[str, NodeView] = {}
        self._others: dict[Key, tuple[str, dict[str, float]]] = {}
        self._allocate = allocate
        self._arrived = arrived

    def changed(self, kind: Kind, item: Object) -> None:
        """Take in what a watch or a list has brought."""
        if kind is JOB:
            self._job_changed(item)
        elif kind is POLICY:
            self._policy_changed(item)
        elif kind is NODE:
            self._node_changed(item["metadata"]["name"])
        else:
            self._part_changed(kind, item)

    def again(self, key: Key, after_seconds: float = 0.0) -> None:
        """Look at the job once more: a pass asks for it, or the allocator has something new."""
        self._queue.add(key, after_seconds, self.lane(key))

    def again_in_turn(self, key: Key) -> None:
        """The same at the rate that all share: nothing has changed but the words of why the job waits.

        A job has one turn at a time, so that it comes within the time that a write of each job takes.
        """
        now = self._observer.clock.seconds()
        if self._turns.get(key, now) <= now:
            self._last_turn = max(self._last_turn, now) + 1 / PROGRESS_WRITES_PER_SECOND
            self._turns[key] = self._last_turn
        self._queue.add(key, self._turns[key] - now, Lane.BACKGROUND)

    def lane(self, key: Key) -> Lane:
        """Urgency of a pass over the job."""
        status = self._observer.status(key)
        if status is None:
            return Lane.ORDINARY
        allocation = status.allocation
        if allocation is None:
            assignment = self._observer.decided.assignments.get(key)
            placed = assignment is not None and assignment.action is Action.PLACE
            return Lane.URGENT if placed and not status.finished else Lane.BACKGROUND
        trains = allocation.ending is None and status.is_true(JobCondition.RUNNING)
        return Lane.ORDINARY if trains else Lane.URGENT

    def _job_changed(self, item: Object) -> None:
        key, metadata = key_of(item), item["metadata"]
        asked = (metadata["uid"], metadata.get("generation", 0), bool(metadata.get("deletionTimestamp")))
        known = self._jobs.get(key)
        if self._caches[JOB].get(key) is None:
            self._jobs.pop(key, None)
            self._told.pop(key, None)
            self._turns.pop(key, None)
            self._queue.add(key)
            self._allocate()
        elif known == asked:  # its status has changed
            if not self._queue.busy(key):
                self._queue.add(key, OWN_WRITE_SECONDS, Lane.BACKGROUND)
        else:
            self._jobs[key] = asked
            undecided = self._undecided(key) if known is None else None
            if undecided is not None:
                self._arrived(undecided)
                self._queue.add(key, UNDECIDED_SECONDS, Lane.BACKGROUND)
            else:
                self.planned(key)

    def planned(self, key: Key) -> None:
        """The job's degrees have been planned, or it was edited."""
        self._allocate()
        self.again(key)

    def _undecided(self, key: Key) -> JobView | None:
        """The job, if there is nothing to do for it before this operator's decision on it."""
        status = self._observer.status(key)
        if status is None or status.finished or status.launches:
            return None
        view = self._observer.job(key)
        if view is None or view.spec is None or view.deleting or view.spec.asked.suspend or view.queue:
            return None
        return view

    def _policy_changed(self, item: Object) -> None:
        """Its status is the allocator's own writing and no news."""
        name = item["metadata"]["name"]
        version = (item["metadata"]["uid"], item["metadata"].get("generation", 0))
        if self._caches[POLICY].get(("", name)) is None:
            self._policies.pop(name, None)
        elif self._policies.get(name) == version:
            return
        else:
            self._policies[name] = version
        self._allocate()

    def _node_changed(self, name: str) -> None:
        """Nodes report often; only what matters to placement is a change."""
        view = self._observer.node(name)
        if self._nodes.get(name) == view:
            return
        if view is None:
            self._nodes.pop(name, None)
        else:
            self._nodes[name] = view
        self._allocate()
        lane = Lane.URGENT if view is None or view.leaving is not None else Lane.ORDINARY
        for pod in self._caches[POD].on_node(name):
            if is_ours(pod) and (key := job_of(pod)) is not None:
                self._queue.add(key, lane=lane)

    def _part_changed(self, kind: Kind, item: Object) -> None:
        """A pod, plan or Lease."""
        key = job_of(item)
        if key is None:
            if kind is POD:
                self._others_pod_changed(item)
            return
        if kind is POD and item["metadata"].get("deletionTimestamp"):
            self._allocate()
        if kind is LEASE and self._reports_only(key, item):
            self._queue.add(key, self._settings.progress_seconds, Lane.BACKGROUND)
        else:
            self.again(key)

    def _others_pod_changed(self, item: Object) -> None:
        """Pods of others change often, and there are many; only what they hold of a node is a change."""
        key = key_of(item)
        held = None if self._caches[POD].get(key) is None else held_of_node(item)
        if held == self._others.get(key):
            return
        if held is None:
            del self._others[key]
        else:
            self._others[key] = held
        self._allocate()

    def _reports_only(self, key: Key, item: Object) -> bool:
        """True if rank 0 has renewed its Lease and reported progress, and nothing else."""
        lease = self._observer.lease(key)
        report = lease.report if lease is not None else None
        told = (
            item["metadata"].get("uid"),
            None if lease is None else (lease.ack, lease.proposal, lease.finished_step, lease.refused),
            None if report is None else (report.epoch, report.rebalances, report.last_rebalance_step),
        )
        if self._told.get(key) == told:
            return True
        self._told[key] = told
        return False
