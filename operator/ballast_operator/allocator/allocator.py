"""The allocator's loop: snapshot, solve, round, assignments, report; each round and at once on events."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from ballast_operator.allocator.advice import advice_by_job
from ballast_operator.allocator.assignments import assignments_of, waiting_for_policy
from ballast_operator.allocator.gauges import set_gauges
from ballast_operator.allocator.policy_status import PolicyReport, policy_status
from ballast_operator.allocator.problem.inputs import (
    CompletedProblem,
    complete,
    price_classes,
    structure,
    values,
)
from ballast_operator.allocator.problem.snapshot import take_snapshot
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.allocator.rounds import Rounds
from ballast_operator.allocator.saved_state import SavedState, StateStore
from ballast_operator.allocator.solving.solver import Solve, Solver
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.api.read import InvalidObject, read_cluster_policy
from ballast_operator.errors import Conflict, NotFound, NotLeader, Rejected, Unavailable
from ballast_operator.events import Recorder
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import POD, POLICY, Key, Object, job_id
from ballast_operator.metrics import Metrics
from ballast_operator.observer import Observer
from ballast_operator.settings import SolverSettings
from ballast_operator.views.assignment import Assignment, AssignmentAction, AssignmentBoard, PoolInfo
from ballast_operator.views.clock import Time, now
from ballast_operator.views.job import JobView
from ballast_operator.waits import WaitReason, Waits

logger = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
"""Pause after a round that failed with an unexpected error."""


class Allocator:
    """Decides for the one ClusterPolicy in force."""

    def __init__(
        self,
        cluster: Cluster,
        observer: Observer,
        board: AssignmentBoard,
        solver: Solver,
        *,
        settings: SolverSettings,
        metrics: Metrics,
        enqueue: Callable[[Key], None],
        waits: Waits | None = None,
        store: StateStore | None = None,
        clock: Callable[[], Time] = now,
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._board = board
        self._solver = solver
        self._settings = settings
        self._metrics = metrics
        self._enqueue = enqueue
        self._waits = waits if waits is not None else Waits()
        self._clock = clock
        self._triggered = asyncio.Event()
        self._recorder = Recorder(cluster)
        self._measurements = Measurements()
        self._rounds = Rounds()
        self._last_solve: tuple[tuple[str, str], Solve] | None = None
        self._next_round: float | None = None
        self._store = store
        self._loaded = store is None
        self._saved_until: float | None = None

    def trigger(self) -> None:
        """Ask for a decision soon: something has changed."""
        self._triggered.set()

    async def run(self) -> None:
        """Decide whenever triggered and at the end of each round, until cancelled."""
        while True:
            wait = (
                None if self._next_round is None else max(0.0, self._next_round - self._clock().timestamp())
            )
            try:
                # Not wait_for: it may swallow a cancellation that comes together with the trigger.
                async with asyncio.timeout(wait):
                    await self._triggered.wait()
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(self._settings.debounce_seconds)
            self._triggered.clear()
            try:
                await self.decide()
            except (Conflict, NotFound, Unavailable) as error:
                logger.info("round repeated: %s", error)
                self._next_round = self._clock().timestamp() + 1.0
            except Rejected as error:
                logger.error("round not reported: %s", error)
            except NotLeader:
                raise
            except Exception:  # a bug in a decision must not end the operator or what runs
                logger.exception("round failed; it is tried again in %g s", RETRY_SECONDS)
                self._metrics.reconcile_errors.labels("Bug").inc()
                self._next_round = self._clock().timestamp() + RETRY_SECONDS

    async def decide(self) -> None:
        """One decision: assignments for all jobs, and the policies' status."""
        items = sorted(
            self._observer.caches[POLICY],
            key=lambda item: (item["metadata"].get("creationTimestamp", ""), item["metadata"]["name"]),
        )
        jobs = self._observer.jobs()
        await self._load(jobs)
        in_force: Object | None = None
        problem = "there is no ClusterPolicy. To fix: create one"
        for item in items:
            try:
                policy = read_cluster_policy({**item, "status": {}})
            except InvalidObject as error:
                problem = f"ClusterPolicy {item['metadata']['name']} cannot be used: {error}"
                await self._report(item, PolicyReport(misconfigured=str(error)))
                continue
            if in_force is not None:
                await self._report(item, PolicyReport(policy_in_force=in_force["metadata"]["name"]))
                continue
            problem = await self._decide_for(item, policy, jobs)
            in_force = item
        self._record_wait(problem)
        if problem:
            self._next_round = None
            self._publish(waiting_for_policy(jobs, problem), jobs)

    async def _load(self, jobs: list[JobView]) -> None:
        """Once: start from what an earlier leader has saved, except for jobs created since."""
        if self._loaded or self._store is None:
            return
        saved = await self._store.load()
        self._loaded = True
        at = saved.memory.at if saved.memory is not None else 0.0
        known = {view.key for view in jobs if view.created is None or view.created.timestamp() <= at}
        self._measurements.restore(
            {key: value for key, value in saved.jobs.items() if key in known}, saved.kinds
        )
        if saved.memory is not None:
            self._rounds.memory = saved.memory.of_jobs({job_id(key) for key in known})
            logger.info("restored accounts of %d jobs", len(self._rounds.memory.shares))

    async def save(self) -> None:
        """Keep accounts and measured speeds for the next leader."""
        if self._store is None or not self._loaded:
            return
        state = SavedState(
            memory=self._rounds.memory, jobs=self._measurements.jobs, kinds=self._measurements.kinds
        )
        await self._store.save(state)

    def _record_wait(self, problem: str) -> None:
        if problem:
            what, _, fix = problem.partition(". To fix: ")
            self._waits.begin(WaitReason.POLICY, what, to_fix=fix or "correct it; kubectl describe bcp")
        else:
            self._waits.end(WaitReason.POLICY)

    async def _decide_for(self, item: Object, policy: ClusterPolicy, jobs: list[JobView]) -> str:
        """Decide by ``policy``; returns why it cannot be used, or nothing."""
        started = self._clock()
        for view in jobs:
            self._record(view)
        self._measurements.keep(view.key for view in jobs)
        self._board.pools = {
            pool.name: PoolInfo(price_per_hour=pool.price_per_gpu_hour, gpu_resource=pool.gpu_resource)
            for pool in policy.spec.node_pools
        }
        snapshot = take_snapshot(
            policy.spec,
            nodes=self._observer.nodes(),
            pods=list(self._observer.caches[POD]),
            jobs=jobs,
            measurements=self._measurements,
            now=started,
        )
        if snapshot.capacity.overlaps:
            await self._report(item, PolicyReport(snapshot=snapshot, jobs=jobs, policy=policy))
            overlaps = "; ".join(snapshot.capacity.overlaps)
            return f"ClusterPolicy {policy.metadata.name} cannot be used: {overlaps}"
        inputs = complete(policy.spec.objective, snapshot.problem, snapshot.unmeasured)
        classes = price_classes(policy.spec.objective.policy, snapshot.capacity, inputs.problem.prices)
        asked = dataclasses.replace(inputs, problem=classes.split(inputs.problem))
        solve = await self._solve(policy, asked, snapshot.unmeasured, started.timestamp())
        round_ = self._rounds.decide(
            policy, snapshot, solve.allocation, classes=classes, moment=started.timestamp()
        )
        # From here on by GPU type: that is what people asked for, and read.
        solve = dataclasses.replace(solve, allocation=classes.merge(solve.allocation))
        self._next_round, plan_id = self._rounds.next_at, self._rounds.plan_id
        if self._next_round is not None and solve.outcome is not PolicyReason.OPTIMAL:
            again = started.timestamp() + solve.seconds + self._settings.retry_seconds
            self._next_round = min(self._next_round, again)
        self._metrics.rounds.inc()
        assignments = assignments_of(
            snapshot,
            round_,
            solve.allocation,
            advice=advice_by_job(policy.spec.objective.policy, snapshot, inputs, solve.allocation, jobs),
            plan_id=plan_id,
            dry_run=policy.spec.dry_run,
        )
        self._publish(assignments, jobs)
        set_gauges(self._metrics, snapshot, jobs)
        await self._report(
            item,
            PolicyReport(
                snapshot=snapshot,
                inputs=inputs,
                jobs=jobs,
                policy=policy,
                solve=solve,
                round_=round_,
                plan_id=plan_id,
                time=started,
            ),
        )
        if self._rounds.next_at != self._saved_until:  # once a round
            self._saved_until = self._rounds.next_at
            await self.save()
        return ""

    def _record(self, view: JobView) -> None:
        """Take in what the job's trainer has measured; what cannot be used counts as not measured."""
        try:
            self._measurements.record(view)
        except Exception:
            logger.exception("job=%s/%s report not used", *view.key)
            self._metrics.reconcile_errors.labels("Report").inc()

    async def _solve(
        self, policy: ClusterPolicy, inputs: CompletedProblem, unmeasured: frozenset[str], moment: float
    ) -> Solve:
        """The policy's allocation; the last one again within a round, or if nothing changed."""
        name = policy.spec.objective.policy
        asked = f"{policy.metadata.generation} {structure(name, inputs, unmeasured, moment=moment)}"
        details = values(name, inputs.problem)
        if self._last_solve is not None:
            (last_asked, last_details), last = self._last_solve
            within_round = self._next_round is not None and moment < self._next_round
            if asked == last_asked and (within_round or details == last_details):
                return last
        solve = await self._solver.solve(
            name,
            inputs.problem,
            limit_seconds=policy.spec.solver.time_limit_seconds,
            options={"agnostic": policy.spec.objective.heterogeneity_agnostic},
        )
        self._metrics.solve_seconds.labels(name).observe(solve.seconds)
        if solve.outcome is PolicyReason.OPTIMAL:
            self._last_solve = ((asked, details), solve)
        else:
            self._metrics.solve_fallbacks.labels(solve.outcome).inc()
            self._last_solve = None
        logger.info("solved jobs=%d: %s", len(inputs.problem.jobs), solve.message)
        return solve

    def _publish(self, assignments: dict[Key, Assignment], jobs: list[JobView]) -> None:
        old = self._board.assignments
        self._board.assignments = assignments
        for view in jobs:
            assignment = assignments.get(view.key)
            waits = (
                view.status.allocation is None
                and assignment is not None
                and assignment.action is AssignmentAction.PLACE
            )
            if waits or _without_id(assignment) != _without_id(old.get(view.key)):
                self._enqueue(view.key)

    async def _report(self, item: Object, report: PolicyReport) -> None:
        body, notices = policy_status(item, report, now=self._clock())
        if body is None:
            return
        written = await self._cluster.apply(POLICY, body, subresource="status")
        self._observer.caches.wrote(POLICY, written)
        metadata = item["metadata"]
        await self._recorder.post(POLICY, "", metadata["name"], metadata["uid"], notices)


def _without_id(assignment: Assignment | None) -> Assignment | None:
    """The assignment without what alone is not worth a pass."""
    return (
        None
        if assignment is None
        else dataclasses.replace(assignment, plan_id="", why="", next_best="", isolated_speed=0.0)
    )
