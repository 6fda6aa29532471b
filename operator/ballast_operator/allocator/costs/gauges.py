"""Costs for Prometheus: by pool, by team, and what was wasted."""

from collections.abc import Mapping, Sequence
from typing import Any

from ballast_operator.allocator.costs.bill import brought_up_to
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus
from ballast_operator.metrics import Metrics
from ballast_operator.report.team_costs import team_costs
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView

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
    sums = {name: status[name] for name in ("bill", "billAt", "prices") if status.get(name)}
    try:
        known = ClusterPolicyStatus.model_validate(sums)
    except ValueError:
        return
    for gauge in (
        metrics.pool_cost,
        metrics.pool_idle_cost,
        metrics.pool_price,
        metrics.price_age_seconds,
        metrics.team_cost,
        metrics.team_budget,
    ):
        gauge.clear()
    idle = data = 0.0
    for entry in brought_up_to(known.bill, known.bill_at, now):
        metrics.pool_cost.labels(entry.pool).set(entry.cost + entry.data_cost)
        data += entry.data_cost
        metrics.pool_idle_cost.labels(entry.pool).set(entry.cost - entry.held_cost)
        metrics.pool_price.labels(entry.pool).set(entry.price_per_gpu_hour)
        idle += entry.cost - entry.held_cost
    for price in known.prices:
        metrics.price_age_seconds.labels(price.pool).set(max(0.0, (now - price.time).total_seconds()))
    for team in team_costs(status, now):
        metrics.team_cost.labels(team.team or NO_TEAM).set(team.cost)
    for name, budget in policy.spec.budgets.items():
        metrics.team_budget.labels(name, budget.period).set(budget.amount)
    startup = sum(entry.startup_cost for view in jobs for entry in view.status.pool_costs)
    metrics.wasted_cost.labels("idle").set(idle)
    metrics.wasted_cost.labels("data").set(data)
    metrics.wasted_cost.labels("startup").set(startup)
    metrics.wasted_cost.labels("lostSteps").set(sum(view.status.lost_cost for view in jobs))
