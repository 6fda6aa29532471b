"""The status of a ClusterPolicy after a decision."""

import asyncio
import dataclasses
import datetime
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from ballast_policies.rounds.values import Round
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.inputs import CompletedProblem
from ballast_policies.scheduling.refusals import Verdict

from ballast_operator.allocator.costs.bill import brought_up_to, next_bill, next_team_costs, written_bill
from ballast_operator.allocator.costs.price_feeds import (
    PoolReading,
    known_prices,
    price_status,
    prices_current,
    saved_prices,
)
from ballast_operator.allocator.decider import MadeDecision
from ballast_operator.allocator.problem.capacity import (
    ClusterCapacity,
    held_by_pool,
    spot_limits,
    types_differ,
    within_spot_limits,
)
from ballast_operator.allocator.problem.hazards import next_hazards
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.allocator.solver import Solve
from ballast_operator.api import cluster_policy_status as api
from ballast_operator.api.base import Condition, set_condition, storable
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.conditions import JobState, PolicyCondition, PolicyReason, some_of
from ballast_operator.api.read import unknown_fields
from ballast_operator.api.training_job_status import plain
from ballast_operator.errors import Conflict, Fenced, NotFound, Rejected, Unavailable, for_good
from ballast_operator.history.recording import Decided, Stated, TwinResult
from ballast_operator.history.writer import HistoryWriter
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.client import Cluster, DroppedFields
from ballast_operator.kube.kinds import POLICY, Object
from ballast_operator.observation.events import EventToPost, Recorder, flips
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import STUCK_FIX
from ballast_operator.waits import WaitReason, Waits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PolicyReport:
    """The outcome for one policy: a decision, or why there is none.

    ``lacking``: what definitions of another release do not keep of statuses, as text.
    """

    misconfigured: str = ""
    failed: str = ""
    policy_in_force: str = ""
    made: MadeDecision | None = None
    prices: Sequence[PoolReading] = ()
    twin: TwinResult | None = None
    lacking: Sequence[str] = ()

    @property
    def failure(self) -> bool:
        """True if decisions failed, or the solver did: the next report may not say so any more."""
        return bool(self.failed) or (
            self.made is not None and self.made.solve.health is not PolicyReason.SOLVER_ANSWERS
        )


def decided(made: MadeDecision) -> Decided:
    """Record of a decision for history."""
    return Decided(
        at=made.of.seen.now.timestamp(),
        state=made.of.snapshot,
        policy=made.of.scheduling,
        round_ends=made.decision.memory.next_at,
        jobs={
            job_id(view.key): Stated(
                uid=view.uid,
                live=spec.grow and not spec.is_script,
                deadline=None if spec.asked.deadline is None else spec.asked.deadline.timestamp(),
                budget=spec.asked.budget,
            )
            for view in made.of.seen.jobs
            if (spec := view.spec) is not None
        },
    )


NAMED_JOBS = 5
"""Jobs named in the condition InputsComplete; each of them has the condition itself, too."""

NAMED_NODES = 5
"""Nodes named in the conditions Valid and NodesHealthy."""


def policy_status(
    item: Object,
    report: PolicyReport,
    *,
    now: Time,
    dropped: DroppedFields,
    told: Mapping[str, int] = MappingProxyType({}),
) -> tuple[dict[str, Any] | None, tuple[EventToPost, ...]]:
    """(the object to apply, or None where nothing worth a write has changed; notices of flips).

    ``told``: as of :func:`next_hazards`.
    """
    old = item.get("status") or {}
    before = api.ClusterPolicyStatus.model_validate({"conditions": old.get("conditions") or []}).conditions
    generation = item["metadata"].get("generation", 0)
    found = verdicts(report)
    order: list[str] = [verdict.type for verdict in found]
    if report.failed:  # the rest is as the last decision has left it
        order = list(dict.fromkeys([*(condition.type for condition in before), *order]))
    conditions = tuple(condition for condition in before if condition.type in order)
    for verdict in found:
        conditions = set_condition(conditions, *verdict, now=now, generation=generation)
    conditions = tuple(sorted(conditions, key=lambda condition: order.index(condition.type)))
    notices = flips(before, conditions)
    made = report.made
    of = None if made is None else made.of
    status = _status(report, conditions, generation)
    status = status.replace(
        bill=_bill(old, made, status, now),
        bill_at=now,
        prices=price_status(saved_prices(old) if made is None else known_prices(report.prices)),
        teams=next_team_costs(old, of.policy if of else None, made.paid if made else None, now),
        hazard=next_hazards(old, of.seen_nodes if of else None, of.snapshot if of else None, told, now),
    )
    content: Object = {
        name: value for name, value in storable(status.to_dict()).items() if value not in ({}, [])
    } | unknown_fields(api.ClusterPolicyStatus, old)
    if report.failed:
        content = {**old, "conditions": content["conditions"]}
    content = dropped.without(POLICY, content)
    if not _differs_beyond_counters(old, content):
        return None, ()
    # On the version that this was added to: the bill of a storage that was set back is not written over.
    metadata = {name: item["metadata"][name] for name in ("name", "resourceVersion")}
    return POLICY.object(metadata=metadata, status=content), notices


def least_status(old: Object, new: dict[str, Any], why: str) -> dict[str, Any]:
    """Status written in place of ``new``, which the API server refuses for the reason ``why``.

    Texts are plain, what is proposed is left out, and a team whose name is not plain stays as it is stored.
    """
    conditions = [{**each, "message": plain(each.get("message", ""))} for each in new.get("conditions", [])]
    for each in conditions:
        if each["type"] == PolicyCondition.READY:
            each["message"] += f"; the API server refused the policy's full status: {plain(why)}"
    teams = [team for team in new.get("teams", []) if plain(team["team"]) == team["team"]]
    teams += [team for team in old.get("teams") or [] if plain(team["team"]) != team["team"]]
    least = {name: value for name, value in new.items() if name not in ("proposed", "teams")}
    return {**least, "conditions": conditions, **({"teams": teams} if teams else {})}


def verdicts(report: PolicyReport) -> tuple[Verdict, ...]:
    """The conditions in order: Valid; after a solve Solved to InputsComplete; PricesCurrent; Ready."""
    if report.misconfigured:
        return (
            Verdict(PolicyCondition.VALID, False, PolicyReason.MISCONFIGURED, report.misconfigured),
            Verdict(PolicyCondition.READY, False, PolicyReason.NOT_VALID, "see condition Valid"),
        )
    if report.failed:
        return (Verdict(PolicyCondition.READY, False, PolicyReason.DECISIONS_FAIL, report.failed),)
    if report.policy_in_force:
        message = f"ClusterPolicy {report.policy_in_force} is older and in force. To fix: delete one"
        return (Verdict(PolicyCondition.READY, False, PolicyReason.ANOTHER_POLICY_IN_FORCE, message),)
    made = report.made
    assert made is not None
    snapshot, policy, solve = made.of.snapshot, made.of.policy, made.solve
    found = [_valid(snapshot.capacity, policy)]
    solved = PolicyCondition.SOLVED
    if not any(node.gpus for node in snapshot.capacity.nodes):
        message = "no node of the pools has a GPU that a job may use"
        barred_to_all = snapshot.capacity.tolerance.by_no_job
        if excluded := [node.name for node in snapshot.capacity.nodes if node.taints in barred_to_all]:
            message += f": no job's template allows {some_of(excluded, NAMED_NODES)}; see the jobs"
        found.append(Verdict(solved, False, PolicyReason.NO_CAPACITY, message))
    elif not snapshot.problem.jobs:
        found.append(Verdict(solved, True, PolicyReason.NOTHING_TO_ALLOCATE, "no job wants GPUs"))
    else:
        optimal, allocation = solve.outcome is PolicyReason.OPTIMAL, made.decision.allocation
        how = f"by {policy.spec.objective.policy}, {allocation.status}, solver {allocation.solver}"
        found.append(Verdict(solved, optimal, solve.outcome, how if optimal else solve.message))
        found += [_healthy(solve), _informed(made.of.request.inputs)]
    if report.prices:
        found.append(prices_current(report.prices))
    found += types_differ(snapshot.capacity.kinds.values())
    if snapshot.sick_nodes:
        fix = "repair or replace them; nodes with such a condition open when it is gone (spec.nodeHealth)"
        message = f"{some_of(snapshot.sick_nodes, NAMED_NODES, between='; ')}. To fix: {fix}"
        found.append(Verdict(PolicyCondition.NODES_HEALTHY, False, PolicyReason.SICK_NODES, message))
    found += within_spot_limits(
        spot_limits(policy.spec, snapshot.capacity.kinds), made.decision.round, snapshot.capacity.nodes
    )
    if report.twin is not None:
        found.append(_twin_agrees(report.twin))
    if policy.spec.dry_run:
        applied, reason = False, PolicyReason.DRY_RUN
        message = "spec.dryRun is set: nothing is started or stopped; see status.proposed"
    else:
        applied, reason = True, PolicyReason.IN_FORCE
        message = f"rounds of {policy.spec.round_seconds} s by {policy.spec.objective.policy}"
    found.append(Verdict(PolicyCondition.READY, applied, reason, "; ".join((message, *report.lacking))))
    return tuple(found)


def _twin_agrees(twin: TwinResult) -> Verdict:
    kind, off = PolicyCondition.TWIN_AGREES, twin.text
    if twin.agrees is None:
        return Verdict(kind, None, PolicyReason.NOTHING_TO_REPLAY, off)
    if not twin.agrees:
        fix = "see which jobs by `ballast twin`; until it agrees, read `ballast whatif` with this error"
        return Verdict(kind, False, PolicyReason.REPLAY_DIFFERS, f"{off}. To fix: {fix}")
    return Verdict(kind, True, PolicyReason.REPLAY_AGREES, off)


def _healthy(solve: Solve) -> Verdict:
    answers = solve.health is PolicyReason.SOLVER_ANSWERS
    message = "the solver's process answers within its limit" if answers else solve.message
    return Verdict(PolicyCondition.SOLVER_HEALTHY, answers, solve.health, message)


def _informed(inputs: CompletedProblem) -> Verdict:
    words = list(inputs.pool_defaults)
    if inputs.job_defaults:
        named = [f"{job} ({'; '.join(said)})" for job, said in sorted(inputs.job_defaults.items())]
        words.append(f"defaults for {some_of(named, NAMED_JOBS, kind=' jobs')}")
    if words:
        message = f"{'. '.join(words)}. To fix: set the fields"
        return Verdict(PolicyCondition.INPUTS_COMPLETE, False, PolicyReason.DEFAULTS_USED, message)
    return Verdict(PolicyCondition.INPUTS_COMPLETE, True, PolicyReason.COMPLETE, "no default is used")


def _valid(capacity: ClusterCapacity, policy: ClusterPolicy) -> Verdict:
    reason, message = _pools_valid(capacity, policy)
    if capacity.orphans:
        message += f"; pods without a job hold GPUs: {some_of(capacity.orphans)}. To fix: delete them"
    if capacity.stuck:
        message += f"; pods that do not end hold GPUs: {some_of(capacity.stuck)}. To fix: {STUCK_FIX}"
    return Verdict(PolicyCondition.VALID, True, reason, message)


def _pools_valid(capacity: ClusterCapacity, policy: ClusterPolicy) -> tuple[PolicyReason, str]:
    """(reason, message) of what is wrong with the pools, the worst first; of their size where nothing is."""
    if capacity.overlaps:
        return PolicyReason.OVERLAPPING_POOLS, (
            f"{some_of(capacity.overlaps, NAMED_NODES, between='; ')}: no gang is started there. "
            "To fix: make the node selectors exclude each other, or change the nodes' labels"
        )
    tenants, teams = policy.spec.tenants, policy.spec.objective.entities
    limits = [tenants.each_namespace.max_gpus_by_type]
    limits += [each.max_gpus_by_type for each in tenants.namespaces.values()]
    limits += [each.max_gpus_by_type for each in teams.values()]
    limited = {name for by_type in limits for name in by_type or ()}
    if unknown := sorted(limited - {pool.gpu_type for pool in policy.spec.node_pools}):
        message = f"maxGpusByType limits {some_of(unknown)}, of which no pool is"
        return PolicyReason.NO_SUCH_NODES, message
    pools = [pool for pool in policy.spec.node_pools if not pool.max_nodes]  # nodes of others are made
    if empty := [pool.name for pool in pools if not capacity.members[pool.name]]:
        return PolicyReason.NO_SUCH_NODES, f"no node matches pool {', '.join(empty)} at present"
    if capacity.pools_without_gpus:
        named = ", ".join(capacity.pools_without_gpus)
        return PolicyReason.NO_GPUS, f"nodes of pool {named} do not offer the pool's gpuResource"
    if capacity.levels_without_nodes:
        message = f"no node has label {some_of(capacity.levels_without_nodes)} of topology.levels"
        return PolicyReason.NO_SUCH_NODES, message
    return PolicyReason.VALID, f"{len(policy.spec.node_pools)} pools, {len(capacity.nodes)} nodes"


def _status(
    report: PolicyReport, conditions: tuple[Condition, ...], generation: int
) -> api.ClusterPolicyStatus:
    made = report.made
    if made is None:
        return api.ClusterPolicyStatus(observed_generation=generation, conditions=conditions)
    policy, jobs, allocation = made.of.policy, made.of.seen.jobs, made.decision.allocation
    capacity = _capacity(policy, made.of.snapshot.capacity, jobs)
    present = [view.status for view in jobs if not view.deleting]
    return api.ClusterPolicyStatus(
        observed_generation=generation,
        conditions=conditions,
        capacity=capacity,
        gpus=sum(entry.gpus for entry in capacity),
        gpus_held=sum(entry.gpus_held for entry in capacity),
        jobs_running=sum(status.allocation is not None and not status.finished for status in present),
        jobs_waiting=sum(status.summary_state is JobState.WAITING for status in present),
        last_round=api.Round(
            plan_id=made.decision.plan_id,
            time=made.of.seen.now,
            policy=allocation.policy,
            solve_seconds=round(made.solve.seconds, 4),
            objective_value=_finite(allocation.objective),
            gap=_finite(allocation.gap),
        ),
        shadow_prices={t: price for t, price in allocation.shadow_prices.items() if math.isfinite(price)},
        twin=None if report.twin is None else _twin(report.twin),
        proposed=_proposed(made.of.snapshot, made.decision.round) if policy.spec.dry_run else (),
    )


def _twin(found: TwinResult) -> api.Twin:
    return api.Twin(
        time=datetime.datetime.fromtimestamp(found.until, datetime.UTC),
        hours=round((found.until - found.since) / 3600, 2),
        jobs=found.jobs,
        time_error=_finite(found.time_error),
        cost_error=_finite(found.cost_error),
    )


def _bill(
    old: Object, made: MadeDecision | None, status: api.ClusterPolicyStatus, now: Time
) -> tuple[api.PoolBill, ...]:
    """The bill of the old status brought up to now; nothing new begins where a policy cannot be used."""
    bill, at = written_bill(old)
    if made is None or not status.capacity:
        return brought_up_to(bill, at, now)
    pools = made.of.policy.spec.node_pools
    return next_bill(bill, at, now, pools=pools, capacity=status.capacity, paid=made.paid)


def _capacity(
    policy: ClusterPolicy, capacity: ClusterCapacity, jobs: Sequence[JobView]
) -> tuple[api.PoolCapacity, ...]:
    held, gpus = held_by_pool(jobs), capacity.gpus_by_pool
    return tuple(
        api.PoolCapacity(
            pool=pool.name,
            gpu_type=pool.gpu_type,
            capacity_type=capacity.kinds[pool.name].capacity_type,
            region=capacity.regions.get(pool.name, ""),
            memory_per_gpu=round(capacity.memory[pool.name]) if pool.name in capacity.memory else None,
            nodes=len(capacity.members[pool.name]),
            gpus=gpus[pool.name],
            gpus_held=held[pool.name],
        )
        for pool in policy.spec.node_pools
    )


def _finite(value: float | None) -> float | None:
    """The value; None where it is infinite (a job gets nothing) or no number: JSON has neither."""
    return value if value is not None and math.isfinite(value) else None


def _proposed(snapshot: Snapshot, round_: Round) -> tuple[api.Proposed, ...]:
    found = []
    for name in sorted(snapshot.by_name)[:1000]:
        placement = round_.placements.get(name)
        found.append(
            api.Proposed(
                job=name,
                gpu_type=placement.gpu_type if placement is not None else "",
                pool=placement.pool if placement is not None else "",
                gpus=len(placement.nodes) if placement is not None else 0,
                why=round_.reasons.get(name, "")[:4096],
            )
        )
    return tuple(found)


SUMS = frozenset({"gpuSeconds", "cost", "heldCost", "dataCost", "monthCost", "nodeHours"})
"""Fields that grow as time passes, at rates that are written."""


def _differs_beyond_counters(old: Object, new: Object) -> bool:
    """True if more has changed than the name, time and duration of the last round, and sums of the bill."""

    def stable(status: Object) -> dict[str, Any]:
        last = status.get("lastRound") or {}
        kept = {k: v for k, v in last.items() if k not in ("planId", "time", "solveSeconds")}
        found = {**status, "lastRound": kept, "billAt": None}
        for part in ("bill", "teams", "hazard"):
            entries = status.get(part) or []
            found[part] = [{k: v for k, v in entry.items() if k not in SUMS} for entry in entries]
        return found

    return stable(old) != stable(new)


PAUSE_SECONDS = 1.0
"""Pause between two writes: while jobs arrive, each decision has something new to report."""

FAILURES_TOLD = 2
"""So many decisions in a row fail before the ClusterPolicy and ``/healthz`` say it."""

logger = logging.getLogger(__name__)


class PolicyReporter:
    """Brings statuses up to the newest report, in the background.

    Of those that wait the newest is written; before it the newest of a failure, so that the conditions and an
    Event tell of one that has passed meanwhile.
    ``history`` is told of decisions, and knows how far their replay is off; None: none is kept. ``waits``: of
    the operator.
    """

    def __init__(
        self,
        cluster: Cluster,
        caches: Caches,
        recorder: Recorder,
        *,
        clock: Callable[[], Time],
        history: HistoryWriter | None = None,
        waits: Waits | None = None,
    ) -> None:
        self._cluster = cluster
        self._waits = waits if waits is not None else Waits()
        self._caches = caches
        self._recorder = recorder
        self._clock = clock
        self.history = history
        self._waiting: dict[str, tuple[str, tuple[PolicyReport, ...]]] = {}
        self._told: Mapping[str, int] = {}
        self._arrived = asyncio.Event()

    def report(self, item: Object, report: PolicyReport) -> None:
        """Have ``report`` written on the ClusterPolicy ``item``, in place of one that waits for it."""
        if self.history is not None and report.made is not None:
            self.history.decided(decided(report.made))
            report = dataclasses.replace(report, twin=self.history.twin)
        report = dataclasses.replace(report, lacking=self._waits.told(WaitReason.DEFINITIONS))
        name, uid = item["metadata"]["name"], item["metadata"]["uid"]
        of, waiting = self._waiting.get(name, (uid, ()))
        self._await_turn(name, uid, (*waiting, report) if of == uid else (report,))

    def _await_turn(self, name: str, uid: str, reports: Sequence[PolicyReport]) -> None:
        *before, newest = reports
        failures = [] if newest.failure else [report for report in before if report.failure]
        self._waiting[name] = (uid, (*failures[-1:], newest))
        self._arrived.set()

    async def run(self) -> None:
        """Write what waits, until cancelled. Raises NotLeader: another replica leads."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            await self.write_waiting()
            await asyncio.sleep(PAUSE_SECONDS)

    async def write_waiting(self) -> None:
        """Write the next report on each ClusterPolicy. Raises NotLeader: another replica leads."""
        for name in tuple(self._waiting):
            await self._write_next(name)

    async def _write_next(self, name: str) -> None:
        uid, (report, *later) = self._waiting.pop(name)
        if later:
            self._await_turn(name, uid, later)
        item = self._caches[POLICY].get(("", name))
        if item is None or item["metadata"]["uid"] != uid:
            return
        try:
            await self._write(item, report)
        except (Conflict, NotFound, Unavailable) as error:
            known = isinstance(error, Fenced)  # a lapse is told once, by who renews the Lease
            logger.log(logging.DEBUG if known else logging.INFO, "report on %s repeated: %s", name, error)
            of, waiting = self._waiting.get(name, (uid, ()))
            if of == uid:
                self._await_turn(name, uid, (report, *waiting))
        except Rejected as error:
            logger.error("round not reported on ClusterPolicy %s: %s", name, error)

    async def _write(self, item: Object, report: PolicyReport) -> None:
        body, notices = await asyncio.to_thread(
            policy_status, item, report, now=self._clock(), dropped=self._cluster.dropped, told=self._told
        )
        if body is None:
            return
        try:
            written = await self._cluster.write_status(POLICY, body)
        except Rejected as error:
            if not for_good(error):
                raise
            logger.error("status of ClusterPolicy %s refused: %s", item["metadata"]["name"], error)
            body = {**body, "status": least_status(item.get("status") or {}, body["status"], str(error))}
            written = await self._cluster.write_status(POLICY, body)
        self._caches.wrote(POLICY, written)
        if report.made is not None:
            self._told = report.made.of.seen_nodes.preempted
        metadata = item["metadata"]
        self._recorder.post(POLICY, "", metadata["name"], metadata["uid"], notices)


class Failures:
    """Decisions that fail, one after the other: told by the ClusterPolicy, the log and ``/healthz``."""

    def __init__(self, reporter: PolicyReporter, waits: Waits) -> None:
        self._reporter = reporter
        self._waits = waits
        self._in_a_row = 0

    def end(self) -> None:
        """A decision has succeeded."""
        self._in_a_row = 0
        self._waits.end(WaitReason.DECISIONS)

    def tell(self, error: Exception, item: Object | None) -> None:
        """A decision has failed; ``item``: the ClusterPolicy by which it was to be made."""
        self._in_a_row += 1
        if self._in_a_row < FAILURES_TOLD:
            return
        what = (
            f"the last {self._in_a_row} decisions failed; jobs that run continue, and none starts: "
            f"{type(error).__name__}: {error}"
        )[:1000]
        self._waits.begin(WaitReason.DECISIONS, what, to_fix="report it, with the operator's log")
        if item is not None:
            self._reporter.report(item, PolicyReport(failed=what))
