"""The allocator's loop: snapshot, solve, round, assignments, report; each round and at once on events.

It decides soon where GPUs may wait for it, later where it can only say who waits.
"""

import asyncio
import dataclasses
import enum
import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping

from ballast_policies.protocol.observed import Action
from ballast_policies.rounds.values import Round
from ballast_policies.scheduling.assignments import Assignment
from ballast_policies.scheduling.gang_spec import job_id

from ballast_operator.allocator.costs.bill import pool_infos, with_regions
from ballast_operator.allocator.costs.price_feeds import PriceFeeds, known_prices, with_prices
from ballast_operator.allocator.decider import Decider, MadeDecision, waiting_for_policy
from ballast_operator.allocator.gauges import set_cost_gauges, set_gauges
from ballast_operator.allocator.policy_status import Failures, PolicyReport, PolicyReporter
from ballast_operator.allocator.problem.capacity import in_todays_pools
from ballast_operator.allocator.problem.snapshot import Observed, Snapshot
from ballast_operator.allocator.saved_state import SavedState, StateStore
from ballast_operator.allocator.solver import LastAnswer, Solver
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.conditions import NO_POLICY, PolicyReason
from ballast_operator.api.read import InvalidObject, read_cluster_policy
from ballast_operator.errors import NotLeader, Unavailable
from ballast_operator.kube.kinds import POD, POLICY, Key, Object
from ballast_operator.metrics import Metrics, Stopwatch
from ballast_operator.observation.observer import Observer
from ballast_operator.settings import SolverSettings
from ballast_operator.views.assignment import Decided, PoolInfo, alike
from ballast_operator.views.job import JobView, pods_of_gangs
from ballast_operator.views.nodes import stuck_pods
from ballast_operator.waits import WaitReason, Waits

LONGEST_REST_SECONDS = 2.0
"""Longest pause between two decisions of which the second was asked for."""


class Cooldown(enum.Enum):
    """Pause after a decision, as a multiple of the time that it took: time for what it has decided."""

    NONE = 0.0
    """A new job may fit in GPUs that are free."""
    USUAL = 0.5
    LONG = 1.0
    """A new job can only be told why it waits; with thousands of them, decisions take half of the time."""


class DecisionThrottle:
    """Collects what asks for a decision, until it is time for one.

    What asks within ``gather_seconds`` of each other shares one decision. ``clock``: seconds that never go
    back.
    """

    def __init__(self, gather_seconds: float, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._gather_seconds = gather_seconds
        self._clock = clock
        self._asked = asyncio.Event()
        self._gathered_at: float | None = None
        self._rest = Cooldown.LONG
        self._ended_at = clock()
        self._took_seconds = 0.0
        self._free: Mapping[str, int] = {}

    def request(self, rest: Cooldown = Cooldown.USUAL) -> None:
        """Something has changed; the shortest rest of all that ask counts."""
        if self._gathered_at is None:
            self._gathered_at = self._clock() + self._gather_seconds
        self._rest = min(self._rest, rest, key=lambda each: each.value)
        self._asked.set()

    def arrived(self, view: JobView) -> None:
        """A new job has come."""
        self.request(Cooldown.NONE if self._may_fit(view) else Cooldown.LONG)

    def decided(self, took_seconds: float, snapshot: Snapshot, round_: Round) -> None:
        """A decision on ``snapshot`` has ended."""
        self._ended_at, self._took_seconds = self._clock(), took_seconds
        free = {node.name: node.gpus for node in snapshot.capacity.nodes if not node.closed}
        for placement in round_.placements.values():
            for name in placement.nodes:
                if name in free:
                    free[name] -= 1
        by_type: Counter[str] = Counter()
        for node in snapshot.capacity.nodes:
            by_type[node.gpu_type] += max(0, free.get(node.name, 0))
        self._free = by_type

    async def wait(self, longest_seconds: float | None) -> None:
        """Wait until a decision that was asked for is due, or time is over; later calls ask for the next."""
        at = None if longest_seconds is None else self._clock() + longest_seconds
        while (due := self._due(at)) is None or due > self._clock():
            self._asked.clear()
            try:
                # Not wait_for: it may swallow a cancellation that comes together with the event.
                async with asyncio.timeout(None if due is None else due - self._clock()):
                    await self._asked.wait()
            except TimeoutError:
                pass
        self._asked.clear()
        self._gathered_at, self._rest = None, Cooldown.LONG

    def _due(self, at: float | None) -> float | None:
        if self._gathered_at is None:
            return at
        rested = self._ended_at + min(LONGEST_REST_SECONDS, self._rest.value * self._took_seconds)
        due = max(self._gathered_at, rested)
        return due if at is None else min(at, due)

    def _may_fit(self, view: JobView) -> bool:
        """True if a GPU type that the job may use had as many GPUs left as its smallest gang takes."""
        if view.spec is None:
            return False
        needed, allowed = view.spec.smallest_gang, view.spec.gpu_types
        return any(
            free >= needed for gpu_type, free in self._free.items() if not allowed or gpu_type in allowed
        )


logger = logging.getLogger(__name__)

GROWTH_REST_SECONDS = 1.0
"""Least time from a decision to one that a gang which may grow asks for."""

RETRY_SECONDS = 5.0
"""Pause after a round that failed with an unexpected error."""


class Allocator:
    """Decides for the one ClusterPolicy in force: ``decider`` what, ``throttle`` when."""

    def __init__(
        self,
        observer: Observer,
        solver: Solver,
        *,
        settings: SolverSettings,
        metrics: Metrics,
        enqueue: Callable[[Key], None],
        enqueue_in_turn: Callable[[Key], None],
        waits: Waits,
        store: StateStore,
        feeds: PriceFeeds,
        reporter: PolicyReporter,
        throttle: DecisionThrottle,
    ) -> None:
        self._observer = observer
        self._answers = LastAnswer(solver, metrics)
        self._settings = settings
        self._metrics = metrics
        self._enqueue = enqueue
        self._enqueue_in_turn = enqueue_in_turn
        self._waits = waits
        self._clock = observer.clock.now
        self._reporter = reporter
        self.decider = Decider(metrics)
        self.throttle = throttle
        self._next_round: float | None = None
        self._next_read: float | None = None
        self._next_growth: float | None = None
        self._store = store
        self._feeds = feeds
        self._loaded = False
        self._saved_until: float | None = None
        self._failures = Failures(self._reporter, self._waits)
        self._in_force: Object | None = None

    @property
    def next_at(self) -> float | None:
        """Time of the next decision if nothing triggers one, epoch seconds; None: none is due."""
        times = (self._next_round, self._next_read, self._next_growth, self.decider.budgets_at)
        return min((at for at in times if at is not None), default=None)

    async def run(self) -> None:
        """Decide whenever triggered and at the end of each round, until cancelled."""
        while True:
            at = self.next_at
            wait = None if at is None else max(0.0, at - self._clock().timestamp())
            await self.throttle.wait(wait)
            await self.attempt()

    async def attempt(self) -> None:
        """A decision; what fails is tried, and told, again. Raises NotLeader: another replica leads."""
        try:
            await self.decide()
            self._failures.end()
        except Unavailable as error:
            logger.info("round repeated: %s", error)
            self._next_round = self._clock().timestamp() + 1.0
        except NotLeader:
            raise
        except Exception as error:  # a bug in a decision must not end the operator or what runs
            logger.exception("round failed; it is tried again in %g s", RETRY_SECONDS)
            self._metrics.reconcile_errors.labels("Bug").inc()
            self._next_round = self._clock().timestamp() + RETRY_SECONDS
            self._failures.tell(error, self._in_force)

    async def decide(self) -> None:
        """A decision: assignments for all jobs, and the policies' status."""
        items = sorted(
            self._observer.caches[POLICY],
            key=lambda item: (item["metadata"].get("creationTimestamp", ""), item["metadata"]["name"]),
        )
        jobs = self._observer.jobs()
        self._next_read = self._next_growth = self.decider.budgets_at = None
        await self._load(jobs)
        self._in_force, problem = None, NO_POLICY
        for item in items:
            try:
                policy = read_cluster_policy({**item, "status": {}})
            except InvalidObject as error:
                if self._in_force is None:
                    problem = f"ClusterPolicy {item['metadata']['name']} cannot be used: {error}"
                self._reporter.report(item, PolicyReport(misconfigured=str(error)))
                continue
            if self._in_force is not None:
                older = self._in_force["metadata"]["name"]
                self._reporter.report(item, PolicyReport(policy_in_force=older))
                continue
            self._in_force, problem = item, ""
            await self._decide_for(item, policy, jobs)
        self._record_wait(problem)
        if problem:
            self._next_round = None
            self._publish(waiting_for_policy(jobs, problem), jobs, self._observer.decided.pools)

    async def _load(self, jobs: list[JobView]) -> None:
        """Start from what an earlier leader, or a backup, has saved, except for jobs created since."""
        if self._loaded:
            return
        saved = await self._store.load()
        self._loaded = True
        if saved == SavedState():
            return
        at = saved.memory.at if saved.memory is not None else 0.0
        known = {view.key for view in jobs if view.created is None or view.created.timestamp() <= at}
        self.decider.measurements.restore(
            {key: value for key, value in saved.jobs.items() if key in known}, saved.kinds
        )
        self.decider.measurements.profiles.restore(saved.layers)
        if saved.memory is not None:
            accounts = saved.memory.of_jobs({job_id(key) for key in known})
            self.decider.memory = dataclasses.replace(self.decider.memory, accounts=accounts)
            logger.info("restored accounts of %d jobs", len(accounts.shares))

    async def save(self) -> None:
        """Keep accounts and measured speeds for the next leader."""
        if not self._loaded:
            return
        state = SavedState(
            memory=self.decider.memory.accounts,
            jobs=self.decider.measurements.jobs,
            kinds=self.decider.measurements.kinds,
            layers=self.decider.measurements.profiles.profiles,
        )
        await self._store.save(state)
        self._loaded = not self._store.replaced

    def _record_wait(self, problem: str) -> None:
        if problem:
            what, _, fix = problem.partition(". To fix: ")
            self._waits.begin(WaitReason.POLICY, what, to_fix=fix or "correct it; kubectl describe bcp")
        else:
            self._waits.end(WaitReason.POLICY)

    async def _decide_for(self, item: Object, policy: ClusterPolicy, jobs: list[JobView]) -> None:
        """Decide by ``policy``.

        What is decided on is taken here; all else that computes is done in a thread, so that the event loop
        keeps turning.
        """
        started, clock = self._clock(), Stopwatch(self._metrics.decision_seconds)
        findings = self._observer.findings
        if findings.judge(policy.spec.node_health, started):
            jobs = self._observer.jobs()
        status = item.get("status")
        prices = await self._feeds.read(policy, status, started)
        ends = [avoided.until.timestamp() for avoided in findings.avoided_by_all.values()]
        self._next_read = min((at for at in (self._feeds.next_at, *ends) if at is not None), default=None)
        policy = with_prices(policy, known_prices(prices))
        reports = findings.take_reports()
        nodes, pods = self._observer.nodes(), self._observer.caches[POD].of_no_job()
        clock.lap("read")
        faults: dict[Key, Exception] = {}
        jobs = await asyncio.to_thread(in_todays_pools, jobs, policy, nodes, faults)
        newest = self._observer.decided
        pools = pool_infos(policy.spec.node_pools, newest.pools, status, at=started)
        self._observer.decided = dataclasses.replace(newest, pools=pools)  # prices count at once
        observed = Observed(
            now=started,
            nodes=nodes,
            pods=pods,
            jobs=jobs,
            status=status,
            regions={name: info.region for name, info in pools.items()},
            avoided=findings.avoided_by_all,
            stuck=stuck_pods(self._observer.caches[POD], pods_of_gangs(jobs), started),
        )
        await asyncio.to_thread(self.decider.look, policy, observed, reports, pools)

        async def attempt(left_out: Mapping[Key, Exception]) -> MadeDecision:
            pending = await asyncio.to_thread(self.decider.build_problem, policy, observed, left_out)
            clock.lap("prepare")
            within_round = self._next_round is not None and started.timestamp() < self._next_round
            solve = await self._answers.solve(policy, pending.request, within_round=within_round)
            clock.lap("solve")
            made = await asyncio.to_thread(self.decider.apply_allocation, pending, solve)
            clock.lap("conclude")
            return made

        made = await self.decider.faults.leave_out(attempt, [view.key for view in jobs], faults)
        self.decider.keep(made)
        snapshot, decided = made.of.snapshot, made.decision.round
        self._next_round = self.decider.memory.next_at
        if self._next_round is not None and made.solve.outcome is not PolicyReason.OPTIMAL:
            again = started.timestamp() + made.solve.seconds + self._settings.retry_seconds
            self._next_round = min(self._next_round, again)
        self._metrics.rounds.inc()
        self._publish(made.assignments, jobs, with_regions(pools, snapshot.capacity))
        set_gauges(self._metrics, snapshot, jobs, decided)
        took_seconds = clock.total("all")
        self.throttle.decided(took_seconds, snapshot, decided)
        growth_at = snapshot.next_scale_up_time(started.timestamp())
        if growth_at is not None:
            rest = max(GROWTH_REST_SECONDS, took_seconds)
            self._next_growth = max(growth_at, self._clock().timestamp() + rest)
        self._reporter.report(item, PolicyReport(made=made, prices=prices))
        written = self._observer.caches[POLICY].get(("", item["metadata"]["name"]))
        set_cost_gauges(self._metrics, policy, written, jobs, started)
        if self.decider.memory.next_at != self._saved_until:  # once a round
            self._saved_until = self.decider.memory.next_at
            await self.save()

    def _publish(
        self, assignments: Mapping[Key, Assignment], jobs: list[JobView], pools: Mapping[str, PoolInfo]
    ) -> None:
        """Publish what is decided; jobs for which there is news get a pass, and in turn those that wait on.

        A node that comes or goes is another reason for all that wait; an edit is answered at once.
        """
        old, by_key = self._observer.decided, {view.key: view for view in jobs}
        self._observer.decided = Decided(assignments=assignments, jobs=by_key, pools=pools)
        for view in jobs:
            assignment, before = assignments.get(view.key), old.on(view.key, view.uid)
            waits = assignment if view.status.allocation is None else None
            changed = not alike(assignment, before)
            if waits and before and waits.action is before.action is Action.RELEASE:
                if changed and old.jobs[view.key].generation != view.generation:
                    self._enqueue(view.key)
                elif changed or (waits.why, waits.next_best) != (before.why, before.next_best):
                    self._enqueue_in_turn(view.key)
            elif changed or (waits and waits.action is Action.PLACE):
                self._enqueue(view.key)
