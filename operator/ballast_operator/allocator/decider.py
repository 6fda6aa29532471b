"""The computing of a decision: from views to a problem, and from the policy's shares to assignments.

Nothing here waits or talks to the API server; the allocator calls it in a thread, one call at a time.
"""

import contextlib
import dataclasses
import logging
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from typing import TypeVar

from ballast_policies.allocation.problem import Entity
from ballast_policies.contract.limits import LEAST_RATE, MOST_RATE
from ballast_policies.contract.plan import Plan
from ballast_policies.protocol.observed import Action
from ballast_policies.scheduling.assignments import Assignment, assign
from ballast_policies.scheduling.decision import (
    Decision,
    Memory,
    SchedulingPolicy,
    SolveRequest,
    apply_allocation,
    build_problem,
)
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.measurements import LayerProfiles, Measurements
from ballast_policies.scheduling.refusals import JobFaults, Verdict
from ballast_policies.throughput.speeds import SpeedKey

from ballast_operator.allocator.advice import advice_by_job
from ballast_operator.allocator.costs.bill import (
    BudgetLeft,
    Paid,
    budgets_left,
    next_budget_change,
    next_team_costs,
    written_bill,
)
from ballast_operator.allocator.problem.admission import Admissions, FaultyJob
from ballast_operator.allocator.problem.hazards import SeenNodes, spot_seen
from ballast_operator.allocator.problem.snapshot import Observed, Snapshot, take_snapshot
from ballast_operator.allocator.solver import Solve
from ballast_operator.api.cluster_policy import ClusterPolicy, Objective
from ballast_operator.api.cluster_policy_status import team_costs
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.kube.kinds import Key
from ballast_operator.metrics import Metrics
from ballast_operator.views.assignment import PoolInfo
from ballast_operator.views.job import JobView


def record(view: JobView, measurements: Measurements, partners: "Partners | None" = None) -> None:
    """Add the job's newest report, once; ``partners``: None: no GPU is shared."""
    allocation, lease, plan = view.status.allocation, view.lease, view.launched_plan
    if allocation is None or lease is None or lease.report is None or not view.acknowledged:
        return
    if not view.as_planned:
        return  # its planner was changed since, and says other degrees for these GPUs
    report, spec = lease.report, view.spec
    if plan is None or report.epoch != plan.epoch or spec is None:
        return
    measurements.profiles.record(view.key, spec, report, several_pools=bool(allocation.parts))
    rate = report.steps_per_second
    if rate is None or not LEAST_RATE <= rate <= MOST_RATE:
        return
    if measurements.knows(view.key, allocation.launch, report.step):
        return
    alone = measured_on(allocation, plan)
    where = alone if partners is None else partners.beside(view, alone)
    measurements.record(view.key, spec, allocation.launch, report, where)


def measured_on(allocation: JobAllocation, plan: Plan) -> SpeedKey:
    """Key of the place in which the gang of ``plan`` runs."""
    if allocation.parts:
        return SpeedKey.of_types((allocation.part_of(rank.pod).gpu_type, 1) for rank in plan.ranks)
    node_of = allocation.node_of
    nodes = len({node_of[pod] for pod in plan.pods if pod in node_of})
    return SpeedKey.of(allocation.gpu_type, len(plan.ranks), nodes)


ALONE = ""
"""Name in place of a kind: the job has its GPU for itself."""


def partners_by_job(jobs: Sequence[JobView]) -> dict[Key, str | None]:
    """Job on a GPU that may be shared -> kind of the job that trains beside it.

    :data:`ALONE` where none is there; None where one is there and does not train: it starts or ends, and a
    speed that is measured meanwhile is neither.
    """
    on_node: dict[str, list[JobView]] = {}
    for view in jobs:
        allocation = view.status.allocation
        if allocation is not None and allocation.shared_gpu is not None and allocation.pays:
            on_node.setdefault(allocation.nodes[0], []).append(view)
    found: dict[Key, str | None] = {}
    for there in on_node.values():
        for view in there:
            others = [other for other in there if other.key != view.key]
            found[view.key] = _beside(others)
    return found


def _beside(others: Sequence[JobView]) -> str | None:
    if not others:
        return ALONE
    if len(others) > 1 or others[0].spec is None or others[0].running_allocation is None:
        return None
    return others[0].spec.kind if others[0].status.is_true(JobCondition.RUNNING) else None


class Partners:
    """Partners on shared GPUs, from decision to decision: a job's speed there is not its speed alone."""

    def __init__(self) -> None:
        self._now: dict[Key, tuple[int, str | None]] = {}
        self._new: set[Key] = set()
        self._mixed: set[Key] = set()

    def look(self, jobs: Sequence[JobView]) -> None:
        """Take in who is where now, before the reports that have come since the last time."""
        before = self._now
        found = partners_by_job(jobs)
        self._now = {view.key: (view.launch, found[view.key]) for view in jobs if view.key in found}
        changed = {key for key, now in self._now.items() if before.get(key) != now}
        # A launch that is alone has nothing before it that its reports could be of.
        changed -= {
            key
            for key in changed
            if self._now[key][1] == ALONE and before.get(key, (0, None))[0] != self._now[key][0]
        }
        self._mixed = (self._mixed | self._new) & self._now.keys() - changed
        self._new = changed

    def beside(self, view: JobView, alone: SpeedKey) -> SpeedKey | None:
        """Key of the job's newest report; None: not known. ``alone``: its key where it has no partner.

        Reports that have come before it was seen that a partner has come or gone, and the first one after
        them, may be of the time before.
        """
        allocation = view.status.allocation
        if allocation is None or allocation.shared_gpu is None:
            return alone
        launch, partner = self._now.get(view.key, (0, None))
        if partner is None or launch != allocation.launch or view.key in self._new:
            return None
        if view.key in self._mixed:
            self._mixed.discard(view.key)
            return None
        return alone._replace(partner=partner)


def assignments_of(
    snapshot: Snapshot,
    decision: Decision,
    *,
    advice: Mapping[str, tuple[Verdict, ...]],
    profiles: LayerProfiles,
) -> dict[Key, Assignment]:
    """An assignment for each job of the snapshot, for each refused one and for each that is left out.

    ``advice``: job -> conditions that the policy sets on it. ``profiles``: measured layers.

    Raises:
        JobFaults: jobs for which none can be made.
    """
    jobs = {job_id(one.key): one for one in snapshot.admitted}
    try:
        wanted = assign(
            snapshot,
            decision,
            advice=advice,
            layers={name: profiles.layers(one.key, one.spec) for name, one in jobs.items()},
        )
    except JobFaults as faults:
        raise JobFaults({jobs[name].key: error for name, error in faults.by_job.items()}) from faults
    found: dict[Key, Assignment] = {}
    for admitted, job in zip(snapshot.admitted, snapshot.jobs, strict=True):
        one = wanted[job.name]
        if one.kept_ranks and (held := admitted.view.held_placement) is not None:
            pods = (held.pods[rank // job.asks.per_pod] for rank in one.kept_ranks)
            one = dataclasses.replace(one, kept_pods=tuple(dict.fromkeys(pods)))
        found[admitted.key] = one
    for refused in snapshot.refused:
        found[refused.view.key] = Assignment(
            action=Action.RELEASE,
            launches=refused.view.status.launches,
            plan_id=decision.plan_id,
            reason=refused.refusal.reason,
            why=refused.refusal.message,
            advice=advice.get(job_id(refused.view.key), ()),
        )
    for faulty in snapshot.faulty:
        found[faulty.view.key] = _left_out(faulty, decision.plan_id)
    return found


def _left_out(job: FaultyJob, plan_id: str) -> Assignment:
    """A job on which nothing is decided: what runs is kept."""
    reason, message = JobReason.INTERNAL_ERROR, job.message
    undecided = Verdict(JobCondition.DECIDED, False, reason, message)
    kept = _undecided(job.view, reason, message)
    return dataclasses.replace(
        kept, plan_id=plan_id, advice=(undecided,) if kept.action is Action.KEEP else ()
    )


def _undecided(view: JobView, reason: str, why: str) -> Assignment:
    """Assignment that keeps what runs and starts nothing."""
    action = Action.RELEASE if view.status.allocation is None else Action.KEEP
    return Assignment(action=action, launches=view.status.launches, reason=reason, why=why)


def waiting_for_policy(jobs: Sequence[JobView], problem: str) -> dict[Key, Assignment]:
    """Without a usable ClusterPolicy: what runs is kept, nothing starts."""
    return {view.key: _undecided(view, JobReason.WAITING_FOR_POLICY, problem) for view in jobs}


MOST_ATTEMPTS = 40
"""Attempts at a decision: two jobs at fault among 5,000 are found with 28."""

T = TypeVar("T")

logger = logging.getLogger(__name__)


class Faults:
    """Finds the jobs for which decisions raise, so that all others are decided on.

    An error that names its job (:class:`JobFaults`) leaves out that one. For an error of a decision as a
    whole the jobs at fault are searched for: those without which the decision succeeds.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._told: dict[Key, str] = {}

    async def leave_out(
        self,
        attempt: Callable[[Mapping[Key, Exception]], Awaitable[T]],
        jobs: Sequence[Key],
        known: Mapping[Key, Exception] | None = None,
    ) -> T:
        """The outcome of ``attempt`` without the jobs for which it raises.

        ``attempt`` decides without the jobs that it is given, and changes nothing where it raises.
        ``known``: jobs that are known to be at fault.

        Raises:
            Exception: of the attempt with all jobs, where no job is at fault.
        """
        out, tries = dict(known or {}), 0
        best: T | None = None
        while True:
            try:
                return await attempt(out)
            except JobFaults as faults:
                if faults.by_job.keys() <= out.keys():
                    raise
                out |= faults.by_job
                continue
            except Exception as error:
                first = error
            # Those of the last decision come last: they are looked at first.
            suspects = [key for key in jobs if key not in out and key in self._told]
            order = [key for key in jobs if key not in out and key not in self._told] + suspects
            works, fails = -1, len(order)
            next_try = 0
            while fails - works > 1:
                without = out | dict.fromkeys(order[next_try:], first)
                tries += 1
                try:
                    best = await attempt(without)
                    works = next_try
                except Exception:
                    if next_try == 0:
                        raise first from None
                    fails = next_try
                if tries >= MOST_ATTEMPTS and best is not None:
                    return best
                unseen = len(order) - len(suspects)
                next_try = unseen if works < unseen < fails else (works + fails) // 2
            out[order[fails - 1]] = first

    def tell(self, faulty: Collection[FaultyJob]) -> None:
        """Count the jobs that a decision has left out, and log what is new."""
        for job in faulty:
            self._metrics.reconcile_errors.labels("Bug").inc()
            if self._told.get(job.view.key) != job.message:
                logger.error("job=%s/%s left out of decisions", *job.view.key, exc_info=job.error)
        self._told = {job.view.key: job.message for job in faulty}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PendingDecision:
    """A decision whose shares are still to be computed.

    Attributes:
        policy: with the prices of feeds.
        seen: all that there is, the jobs that it leaves out among it.
        snapshot: what is decided on.
        scheduling: by what.
        seen_nodes: of spot pools, with this decision.
    """

    policy: ClusterPolicy
    seen: Observed
    snapshot: Snapshot
    scheduling: SchedulingPolicy
    request: SolveRequest
    seen_nodes: SeenNodes


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MadeDecision:
    """A decision, with an assignment for each job.

    Attributes:
        of: on what, and by what it is made.
        solve: how its shares were computed.
        decision: in force once it is kept.
        paid: what jobs had paid by then.
    """

    of: PendingDecision
    solve: Solve
    decision: Decision
    assignments: Mapping[Key, Assignment]
    paid: Paid


class Decider:
    """Decides for one ClusterPolicy after the other.

    :meth:`look` takes in what has happened; :meth:`build_problem` and :meth:`apply_allocation` decide and
    change nothing, so that they can be called again without a job for which they raise; :meth:`keep` puts a
    decision in force.

    Attributes:
        faults: jobs that are left out of decisions, as these raise for them.
        measurements: what trainers have reported.
        memory: what decisions know of earlier ones.
        budgets_at: when the next team's budget is spent or begins again, epoch seconds; None: not known.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self.faults = Faults(metrics)
        self.measurements = Measurements()
        self._partners = Partners()
        self.memory = Memory()
        self.budgets_at: float | None = None
        self.seen_nodes = SeenNodes()
        self.paid = Paid()
        self._admissions = Admissions()
        self._uids: Mapping[Key, str] = {}
        self._budgets: Mapping[str, BudgetLeft] = {}

    def look(
        self, policy: ClusterPolicy, seen: Observed, reports: list[JobView], pools: Mapping[str, PoolInfo]
    ) -> None:
        """Take in what jobs have paid and reported.

        ``policy``, ``pools``: with the prices that jobs pay. ``reports``: views of jobs that have come since
        the last time.
        """
        jobs, status, now = seen.jobs, seen.status, seen.now
        bill, bill_at = written_bill(status)
        teams = team_costs(status, bill_at or now)
        self.paid = self.paid.next(jobs, pools, bill, teams, bill_at, now)
        teams = next_team_costs(status or {}, policy, self.paid, now)
        self._budgets = budgets_left(policy, teams)
        self.budgets_at = next_budget_change(self._budgets, teams, now)
        with self._taken_in("who shares a GPU is not seen"):
            self._partners.look(jobs)
        self._record(reports)
        self._forget_replaced(jobs)
        self._record(jobs)
        self.measurements.keep(view.key for view in jobs)

    def _record(self, views: Sequence[JobView]) -> None:
        for view in (view for view in views if view.lease is not None):
            with self._taken_in("job=%s/%s report not used", *view.key):
                record(view, self.measurements, self._partners)

    def _forget_replaced(self, jobs: Sequence[JobView]) -> None:
        """Forget what was measured of jobs, and owed to them, whose names other jobs have now."""
        known, self._uids = self._uids, {view.key: view.uid for view in jobs}
        stay = [view.key for view in jobs if known.get(view.key, view.uid) == view.uid]
        if len(stay) == len(jobs):
            return
        self.measurements.keep(stay)
        if self.memory.accounts is not None:
            accounts = self.memory.accounts.of_jobs({job_id(key) for key in stay})
            self.memory = dataclasses.replace(self.memory, accounts=accounts)

    def build_problem(
        self, policy: ClusterPolicy, seen: Observed, left_out: Mapping[Key, Exception]
    ) -> PendingDecision:
        """The problem to be solved.

        ``policy`` has the prices of feeds. ``left_out``: jobs at fault, with their errors.
        """
        snapshot = take_snapshot(
            policy.spec, seen, self.measurements, self._admissions, budgets=self._budgets, left_out=left_out
        )
        snapshot = spot_seen(snapshot, policy.spec.node_pools, seen.status)
        faulty = {job.view.key for job in snapshot.faulty}
        considered = [view for view in seen.jobs if view.key not in faulty]
        chosen = scheduling_policy(policy)
        return PendingDecision(
            policy=policy,
            seen=seen,
            snapshot=snapshot,
            scheduling=chosen,
            request=build_problem(snapshot, chosen, now=seen.now.timestamp()),
            seen_nodes=self.seen_nodes.next(snapshot.capacity, seen.nodes, considered),
        )

    def apply_allocation(self, pending: PendingDecision, solve: Solve) -> MadeDecision:
        """Decision with an assignment for each job. Raises JobFaults: jobs for which there is none."""
        snapshot, request, now = pending.snapshot, pending.request, pending.seen.now.timestamp()
        decision = apply_allocation(
            snapshot, self.memory, pending.scheduling, request, solve.allocation, now=now
        )
        advice = advice_by_job(pending.scheduling.objective, snapshot, request.inputs, decision.allocation)
        return MadeDecision(
            of=pending,
            solve=solve,
            decision=decision,
            assignments=assignments_of(
                snapshot, decision, advice=advice, profiles=self.measurements.profiles
            ),
            paid=self.paid,
        )

    def keep(self, made: MadeDecision) -> None:
        """The decision is in force."""
        self.memory, self.seen_nodes = made.decision.memory, made.of.seen_nodes
        self.faults.tell(made.of.snapshot.faulty)
        decided = made.decision.round
        logger.info(
            "round planId=%s extended=%d resized=%d started=%d moved=%d stopped=%d waiting=%d",
            made.decision.plan_id,
            len(decided.extended),
            len(decided.resized),
            len(decided.started),
            len(decided.moved),
            len(decided.stopped),
            len(decided.waiting),
        )

    @contextlib.contextmanager
    def _taken_in(self, failure: str, *names: str) -> Iterator[None]:
        """Context in which unusable measurements count as not measured."""
        try:
            yield
        except Exception:
            logger.exception(failure, *names)
            self._metrics.reconcile_errors.labels("Report").inc()


def scheduling_policy(policy: ClusterPolicy) -> SchedulingPolicy:
    """Policy by which ``policy`` lets decide."""
    spec, objective = policy.spec, policy.spec.objective
    return SchedulingPolicy(
        objective=objective.policy,
        heterogeneity_agnostic=objective.heterogeneity_agnostic,
        teams=teams(objective),
        round_seconds=float(spec.round_seconds),
        min_run_seconds=spec.moves.min_run_seconds,
        max_moves_per_hour=spec.moves.max_moves_per_hour,
        dry_run=spec.dry_run,
        name=policy.metadata.name,
        version=policy.metadata.generation,
    )


def teams(objective: Objective) -> dict[str, Entity]:
    """Team -> how it stands to the others."""
    return {
        name: Entity(weight=team.weight, policy=team.policy, parent=team.parent, by_user=team.by_user)
        for name, team in objective.entities.items()
    }
