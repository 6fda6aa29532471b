"""The allocator's loop: snapshot, solve, round, wishes, report; each round and at once on events."""

import asyncio
import dataclasses
import logging
from collections.abc import Callable

from ballast_policies.allocation.problem import Allocation
from ballast_policies.allocation.rounds import Round, RoundSettings, RoundState, decide_round

from ballast_operator.allocator.policy_status import PolicyReport, policy_status
from ballast_operator.allocator.snapshot import Snapshot, signature, take_snapshot
from ballast_operator.allocator.solver import Solve, Solver
from ballast_operator.allocator.throughput import Measurements
from ballast_operator.allocator.wishes import wishes_of
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.conditions import JobReason, PolicyReason
from ballast_operator.api.read import InvalidObject, read_cluster_policy
from ballast_operator.errors import Conflict, NotFound, Rejected, Unavailable
from ballast_operator.events import Recorder
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import POD, POLICY, Key, Object
from ballast_operator.metrics import Metrics
from ballast_operator.observer import Observer
from ballast_operator.reconciler import PoolTerms, Reconciler
from ballast_operator.settings import SolverSettings
from ballast_operator.views.clock import Time, now
from ballast_operator.views.job import JobView
from ballast_operator.views.wish import Verb, Wish

logger = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class History:
    """What the rounds so far have handed out. In memory: a fresh operator knows of the present gangs only."""

    signature: str = ""
    solve: Solve | None = None
    received: dict[str, dict[str, float]] = dataclasses.field(default_factory=dict)
    accounted_at: float = 0.0
    moves: tuple[float, ...] = ()
    round_ends: float | None = None
    number: int = 0


class Allocator:
    """Decides for the one ClusterPolicy in force."""

    def __init__(
        self,
        cluster: Cluster,
        observer: Observer,
        reconciler: Reconciler,
        solver: Solver,
        *,
        settings: SolverSettings,
        metrics: Metrics,
        enqueue: Callable[[Key], None],
        clock: Callable[[], Time] = now,
    ) -> None:
        self._cluster = cluster
        self._observer = observer
        self._reconciler = reconciler
        self._solver = solver
        self._settings = settings
        self._metrics = metrics
        self._enqueue = enqueue
        self._clock = clock
        self._poked = asyncio.Event()
        self._recorder = Recorder(cluster)
        self._measurements = Measurements()
        self._history = History()
        self._next_round: float | None = None

    def poke(self) -> None:
        """Something has changed that a round should know."""
        self._poked.set()

    async def run(self) -> None:
        """Decide whenever poked, and at each round's end, for ever."""
        while True:
            wait = (
                None if self._next_round is None else max(0.0, self._next_round - self._clock().timestamp())
            )
            try:
                await asyncio.wait_for(self._poked.wait(), wait)
            except TimeoutError:
                pass
            else:
                await asyncio.sleep(self._settings.debounce_seconds)
            self._poked.clear()
            try:
                await self.decide()
            except (Conflict, NotFound, Unavailable) as error:
                logger.info("round repeated: %s", error)
                self._next_round = self._clock().timestamp() + 1.0
            except Rejected as error:
                logger.error("round not reported: %s", error)

    async def decide(self) -> None:
        """One decision: wishes for all jobs, and the policies' status."""
        items = sorted(
            self._observer.caches[POLICY],
            key=lambda item: (item["metadata"].get("creationTimestamp", ""), item["metadata"]["name"]),
        )
        jobs = self._observer.jobs()
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
        if problem:
            self._next_round = None
            self._publish(
                {
                    view.key: Wish(
                        verb=Verb.NONE if view.status.held is None else Verb.KEEP,
                        launches=view.status.launches,
                        reason=JobReason.WAITING_FOR_POLICY,
                        why=problem,
                    )
                    for view in jobs
                },
                jobs,
            )

    async def _decide_for(self, item: Object, policy: ClusterPolicy, jobs: list[JobView]) -> str:
        """Decide by ``policy``; returns why it cannot be used, or nothing."""
        started = self._clock()
        for view in jobs:
            self._measurements.take_in(view)
        self._measurements.keep(view.key for view in jobs)
        self._reconciler.pools = {
            pool.name: PoolTerms(price_per_hour=pool.price_per_gpu_hour, gpu_resource=pool.gpu_resource)
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
        if snapshot.overlaps:
            await self._report(item, PolicyReport(snapshot=snapshot, jobs=jobs, policy=policy))
            return f"ClusterPolicy {policy.metadata.name} cannot be used: {'; '.join(snapshot.overlaps)}"
        solve = await self._solve(policy, snapshot)
        round_, plan_id = self._round(policy, snapshot, solve.allocation)
        wishes = wishes_of(snapshot, round_, solve.allocation, plan_id=plan_id, dry_run=policy.spec.dry_run)
        for key, refusal in snapshot.refusals.items():
            wishes[key] = Wish(
                verb=Verb.NONE,
                launches=next(view.status.launches for view in jobs if view.key == key),
                plan_id=plan_id,
                reason=refusal.reason,
                why=refusal.message,
            )
        self._publish(wishes, jobs)
        self._measure(snapshot, jobs, solve)
        await self._report(
            item,
            PolicyReport(
                snapshot=snapshot,
                jobs=jobs,
                policy=policy,
                solve=solve,
                round_=round_,
                plan_id=plan_id,
                time=started,
            ),
        )
        return ""

    async def _solve(self, policy: ClusterPolicy, snapshot: Snapshot) -> Solve:
        history, wanted = self._history, f"{policy.metadata.generation} {signature(snapshot)}"
        known = history.solve
        if known is not None and history.signature == wanted and known.outcome is PolicyReason.OPTIMAL:
            return known
        solve = await self._solver.solve(
            policy.spec.objective.policy,
            snapshot.problem,
            limit_seconds=policy.spec.solver.time_limit_seconds,
        )
        self._metrics.solve_seconds.labels(policy.spec.objective.policy).observe(solve.seconds)
        if solve.outcome is not PolicyReason.OPTIMAL:
            self._metrics.solve_fallbacks.labels(solve.outcome).inc()
        if history.signature != wanted:
            # Time received counts against the shares of one allocation; new shares, new account.
            history.received = {}
        history.signature, history.solve = wanted, solve
        logger.info("solved jobs=%d: %s", len(snapshot.problem.jobs), solve.message)
        return solve

    def _round(self, policy: ClusterPolicy, snapshot: Snapshot, allocation: Allocation) -> tuple[Round, str]:
        history, moment = self._history, self._clock().timestamp()
        for name, placement in snapshot.running.items():
            row = history.received.setdefault(name, {})
            began = max(history.accounted_at, snapshot.running_since[name])
            row[placement.gpu_type] = row.get(placement.gpu_type, 0.0) + max(0.0, moment - began)
        history.accounted_at = moment
        length = float(policy.spec.round_seconds)
        # A fresh operator starts in the middle of a round: its start alone moves nobody.
        at_boundary = history.round_ends is not None and moment >= history.round_ends
        if at_boundary or history.round_ends is None:
            history.round_ends = moment + length
        self._next_round = history.round_ends
        least = policy.spec.moves.min_run_seconds
        round_ = decide_round(
            now=moment,
            allocation=allocation,
            gangs=snapshot.gangs,
            nodes=snapshot.nodes,
            state=RoundState(
                received=history.received,
                running=snapshot.running,
                running_since=snapshot.running_since,
                moves=history.moves,
            ),
            settings=RoundSettings(
                round_seconds=length,
                # Within a round only free GPUs are handed out: a gang keeps its lease for a round.
                min_run_seconds=least if at_boundary else max(least, length),
                max_moves_per_hour=policy.spec.moves.max_moves_per_hour,
            ),
        )
        disturbed = len(round_.moved) + len(round_.stopped)
        if disturbed and not policy.spec.dry_run:
            recent = tuple(at for at in history.moves if moment - at < 3600)
            history.moves = (*recent, *([moment] * disturbed))
        history.number += 1
        self._metrics.rounds.inc()
        plan_id = f"{policy.metadata.name}-{int(moment)}-{history.number}"
        logger.info(
            "round planId=%s extended=%d started=%d moved=%d stopped=%d waiting=%d",
            plan_id,
            len(round_.extended),
            len(round_.started),
            len(round_.moved),
            len(round_.stopped),
            len(round_.waiting),
        )
        return round_, plan_id

    def _publish(self, wishes: dict[Key, Wish], jobs: list[JobView]) -> None:
        old = self._reconciler.wishes
        self._reconciler.wishes = wishes
        for view in jobs:
            wish = wishes.get(view.key)
            waits = view.status.held is None and wish is not None and wish.verb is Verb.PLACE
            if waits or _without_id(wish) != _without_id(old.get(view.key)):
                self._enqueue(view.key)

    def _measure(self, snapshot: Snapshot, jobs: list[JobView], solve: Solve) -> None:
        metrics = self._metrics
        metrics.gpus_capacity.clear()
        metrics.gpus_allocated.clear()
        types = {node.pool: node.gpu_type for node in snapshot.nodes}
        for pool, gpu_type in types.items():
            total = sum(node.gpus for node in snapshot.nodes if node.pool == pool)
            metrics.gpus_capacity.labels(pool, gpu_type).set(total)
            taken = sum(
                len(view.status.held.slots)
                for view in jobs
                if view.status.held is not None and view.status.held.pool == pool
            )
            metrics.gpus_allocated.labels(pool, gpu_type).set(taken)
        effective = 0.0
        for job in snapshot.problem.jobs:
            placement, fastest = snapshot.running.get(job.name), max(job.throughput.values(), default=0.0)
            if placement is not None and fastest > 0:
                effective += job.throughput.get(placement.gpu_type, 0.0) / fastest
        metrics.effective_throughput.set(effective)

    async def _report(self, item: Object, report: PolicyReport) -> None:
        body, notices = policy_status(item, report, now=self._clock())
        if body is None:
            return
        written = await self._cluster.apply(POLICY, body, subresource="status")
        self._observer.caches.wrote(POLICY, written)
        metadata = item["metadata"]
        await self._recorder.post(POLICY, "", metadata["name"], metadata["uid"], notices)


def _without_id(wish: Wish | None) -> Wish | None:
    return None if wish is None else dataclasses.replace(wish, plan_id="", why="", next_best="")
