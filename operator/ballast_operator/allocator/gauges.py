"""Figures for Prometheus: GPUs, throughput, costs."""

from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.rounds.values import Round

from ballast_operator.allocator.costs.bill import brought_up_to, budgets_left
from ballast_operator.allocator.problem.capacity import held_by_pool
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus, team_costs
from ballast_operator.api.conditions import JobCondition, JobReason, JobState
from ballast_operator.api.training_job_status import WASTE
from ballast_operator.metrics import Metrics, replace_series
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import dedupe_shared_allocations


def set_gauges(metrics: Metrics, snapshot: Snapshot, jobs: Sequence[JobView], round_: Round) -> None:
    """GPUs by pool, the effective throughput of the running jobs, and jobs kept off spot machines."""
    metrics.jobs_kept_off_spot.set(len(round_.blocked_by_spot_limit))
    allocations = [held for view in jobs if (held := view.status.allocation) is not None]
    pairs = Counter(held.pool for held in allocations)
    pairs.subtract(held.pool for held in dedupe_shared_allocations(allocations))
    shared = {node.pool for node in snapshot.capacity.nodes if node.name in snapshot.capacity.shared}
    replace_series(metrics.gpus_shared, {(pool,): pairs[pool] for pool in shared})
    kinds, gpus, taken = snapshot.capacity.types, snapshot.capacity.gpus_by_pool, held_by_pool(jobs)
    for pool in kinds:
        metrics.launches.labels(pool)
    replace_series(metrics.gpus_capacity, {(pool, kind): gpus[pool] for pool, kind in kinds.items()})
    replace_series(metrics.gpus_allocated, {(pool, kind): taken[pool] for pool, kind in kinds.items()})
    effective = 0.0
    for job in snapshot.problem.jobs:
        placement, fastest = snapshot.running.get(job.name), max(job.throughput.values(), default=0.0)
        if placement is not None and fastest > 0:
            effective += snapshot.by_name[job.name].speed(placement) / fastest
    metrics.effective_throughput.set(effective)


def set_job_gauges(metrics: Metrics, jobs: Sequence[JobView]) -> int:
    """Jobs by state, and waiting ones by reason; returns how many have not ended."""
    states, reasons = Counter[JobState](), Counter[str]()
    for view in jobs:
        state = view.status.summary_state
        states[state] += 1
        if state is JobState.WAITING and (admitted := view.status.condition(JobCondition.ADMITTED)):
            reasons[admitted.reason] += 1
    for state in JobState:
        metrics.jobs.labels(state).set(states[state])
    kinds = {JobReason.WAITING_FOR_CAPACITY, *reasons}
    replace_series(metrics.jobs_waiting, {(str(reason),): reasons[reason] for reason in kinds})
    return len(jobs) - states[JobState.SUCCEEDED] - states[JobState.FAILED]


NO_TEAM = "none"
"""The label of jobs without a team."""


def set_cost_gauges(
    metrics: Metrics,
    policy: ClusterPolicy,
    item: Mapping[str, Any] | None,
    jobs: Sequence[JobView],
    now: Time,
) -> None:
    """The sums of the policy's status up to ``now``; ``item``: the ClusterPolicy as it is stored."""
    status = (item or {}).get("status") or {}
    known = ClusterPolicyStatus.written(status, "bill", "billAt", "prices")
    if known is None:
        return
    bill = brought_up_to(known.bill, known.bill_at, now)
    replace_series(metrics.pool_cost, {(entry.pool,): entry.cost + entry.data_cost for entry in bill})
    replace_series(metrics.pool_idle_cost, {(entry.pool,): entry.cost - entry.held_cost for entry in bill})
    replace_series(metrics.pool_price, {(entry.pool,): entry.price_per_gpu_hour for entry in bill})
    idle = sum(entry.cost - entry.held_cost for entry in bill)
    data = sum(entry.data_cost for entry in bill)
    ages = {(price.pool,): max(0.0, (now - price.time).total_seconds()) for price in known.prices}
    replace_series(metrics.price_age_seconds, ages)
    teams = team_costs(status, now)
    replace_series(metrics.team_cost, {(team.team or NO_TEAM,): team.cost for team in teams})
    budgets = policy.spec.budgets.items()
    replace_series(
        metrics.team_budget, {(name, str(budget.period)): budget.amount for name, budget in budgets}
    )
    spent = {
        (name, str(each.budget.period)): each.budget.amount - each.left
        for name, each in budgets_left(policy, teams).items()
    }
    replace_series(metrics.team_budget_spent, spent)
    startup = sum(entry.startup_cost for view in jobs for entry in view.status.pool_costs)
    metrics.wasted_cost.labels("idle").set(idle)
    metrics.wasted_cost.labels("data").set(data)
    metrics.wasted_cost.labels("startup").set(startup)
    metrics.wasted_cost.labels("lostSteps").set(sum(view.status.lost_cost for view in jobs))
    set_goodput(metrics, jobs)


def set_goodput(metrics: Metrics, jobs: Sequence[JobView]) -> None:
    """GPU time of the jobs that are not deleted, by use; and, by pool, the part that was productive."""
    uses, held, good = (defaultdict[str, float](float) for _ in range(3))
    for view in jobs:
        time = view.status.gpu_time
        if time is None:
            continue
        uses["productive"] += time.goodput * time.held
        for name in WASTE:
            uses[name] += getattr(time, name)
        for entry in view.status.pool_costs:
            held[entry.pool] += entry.gpu_seconds
            good[entry.pool] += entry.gpu_seconds * time.goodput
    for use in ("productive", *WASTE):
        metrics.gpu_seconds.labels(use).set(uses[use])
    shares = {(pool,): good[pool] / seconds if seconds else 0.0 for pool, seconds in held.items()}
    replace_series(metrics.goodput, shares)
