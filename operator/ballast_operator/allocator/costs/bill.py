"""Costs of pools and of teams with their budgets: what nodes cost, and what jobs have paid for GPUs and data.

Both are summed up in the ClusterPolicy's status. Each job sums up its own cost, from the moment at which
it takes GPUs to that at which it gives them back. The allocator looks at other moments, so a sum of GPUs x
seconds between its looks would differ from the jobs' by about a second a launch. So bill and budgets take the
jobs' sums, and keep beside them what deleted jobs have paid.
"""

import dataclasses
import datetime
import logging
import math
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from ballast_policies.accounting import SECONDS_PER_HOUR, cost
from ballast_policies.scheduling.refusals import Refusal

from ballast_operator.allocator.problem.admission import RefusedJob
from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus, PoolBill, PoolCapacity, team_costs
from ballast_operator.api.conditions import JobReason
from ballast_operator.api.costs import (
    BudgetPeriod,
    OnTeamLimit,
    TeamBudget,
    TeamCost,
    Written,
    first_of_month,
    month_of,
)
from ballast_operator.api.node_pool import NodePool
from ballast_operator.kube.kinds import Object
from ballast_operator.views.assignment import UNKNOWN_POOL, PoolInfo
from ballast_operator.views.clock import Time
from ballast_operator.views.job import ROUNDING, JobView

logger = logging.getLogger(__name__)

_ByKey = Mapping[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """Payments of the jobs that exist, each from its start: uid -> key, a pool or a team -> cost.

    Attributes:
        paid: until ``now``.
        per_second: of jobs that hold GPUs.
        then: until the sums were written, for keys that are in no sum here yet.
        earlier: of jobs that a backup has brought back, until then: it counts as paid already.
    """

    now: Time
    paid: dict[str, _ByKey] = dataclasses.field(default_factory=dict)
    per_second: dict[str, _ByKey] = dataclasses.field(default_factory=dict)
    then: dict[str, _ByKey] = dataclasses.field(default_factory=dict)
    earlier: dict[str, _ByKey] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sums:
    """Sums that jobs have paid at one moment, each from its start, by key: a pool, or a team.

    Attributes:
        at: the moment; None: nothing was looked at yet.
        by_job: uid -> key -> cost.
        per_second: uid -> key -> cost a second, of jobs that hold GPUs.
        by_key: the sum over these jobs.
        others: key -> what deleted jobs have paid, and those that have another key now; less what the others
            had paid before the sum began.
    """

    at: Time | None = None
    by_job: Mapping[str, _ByKey] = dataclasses.field(default_factory=dict)
    per_second: Mapping[str, _ByKey] = dataclasses.field(default_factory=dict)
    by_key: Mapping[str, float] = dataclasses.field(default_factory=dict)
    others: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def of(self, key: str) -> float:
        """Cost that jobs have paid since the sum of ``key`` began, deleted ones included."""
        return max(0.0, self.by_key.get(key, 0.0) + self.others.get(key, 0.0))

    def next(
        self,
        look: _Look,
        written: Mapping[str, Written],
        *,
        keys: Collection[str] = (),
        from_start: bool = False,
    ) -> "Sums":
        """The same at ``look``.

        ``written``: what was written last; a key that it does not have begins now. ``keys``: that are wanted
        besides. ``from_start``: a sum that begins has what its jobs have paid before.
        """
        changed: defaultdict[str, float] = defaultdict(float)
        seconds = (look.now - self.at).total_seconds() if self.at is not None else 0.0
        for uid, before in self.by_job.items():
            present = look.paid.get(uid)
            if present is not None and present.keys() == before.keys():
                continue
            for key, amount in before.items():
                if present is None:
                    changed[key] += amount + self.per_second.get(uid, {}).get(key, 0.0) * seconds
                elif key not in present:
                    changed[key] += amount
            if present is None or present.keys() & before.keys():
                continue  # to a key that it comes to it has paid nothing before
            for key in present:
                # It does not say by key what it has paid, and all of it was another key's until now.
                changed[key] -= sum(before.values()) if from_start else 0.0
        total, total_then, lived = _sum(look.paid), _sum(look.then), _sum(look.earlier)
        others = {}
        for key in {*written, *keys, *total}:
            if key not in written and not from_start:
                others[key] = -total[key]
            elif key in self.others or key not in written:
                others[key] = self.others.get(key, 0.0) + changed[key] - lived[key]
            else:
                since = written[key].paid_by_others(total[key] - lived[key], total_then[key])
                others[key] = since - lived[key]
        return Sums(at=look.now, by_job=look.paid, per_second=look.per_second, by_key=total, others=others)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Paid:
    """Costs that jobs have paid at one moment.

    Attributes:
        gpus: for GPUs, by pool.
        data: for data that was read there from other regions, by pool.
        teams: for both, by team; empty: jobs without one.
    """

    gpus: Sums = Sums()
    data: Sums = Sums()
    teams: Sums = Sums()

    def next(
        self,
        jobs: Sequence[JobView],
        pools: Mapping[str, PoolInfo],
        bill: Sequence[PoolBill],
        teams: Sequence[TeamCost],
        written_at: Time | None,
        now: Time,
    ) -> "Paid":
        """The same at ``now``, of all ``jobs`` that exist.

        ``bill``, ``teams``: as written at ``written_at``; what they do not have begins now.
        """
        seconds = 0.0 if written_at is None else max(0.0, (now - written_at).total_seconds())
        looks = gpus, data, of_both = _Look(now=now), _Look(now=now), _Look(now=now)
        for_gpus = {entry.pool: entry.paid_for_gpus(seconds) for entry in bill}
        for_data = {entry.pool: entry.paid_for_data() for entry in bill}
        of_teams = {entry.team: entry.paid(seconds) for entry in teams}
        # Only of sums that another leader has written: what is known here already counts on by itself.
        unknown = for_gpus.keys() - self.gpus.others.keys() or of_teams.keys() - self.teams.others.keys()
        for view in jobs:
            uid = view.uid
            try:
                for look, (paid, rates) in zip(looks, _paid_by(view, pools, now), strict=True):
                    look.paid[uid], look.per_second[uid] = paid, rates
                if self._is_new(view, written_at):
                    before = _paid_by(view, pools, self.gpus.at or written_at or now)
                    for look, (paid, _) in zip(looks, before, strict=True):
                        look.earlier[uid] = paid
                elif unknown:
                    before = _paid_by(view, pools, written_at or now)
                    for look, (paid, _) in zip(looks, before, strict=True):
                        look.then[uid] = paid
            except Exception:  # it has paid what it had, until that can be read again
                logger.exception("job=%s/%s what it has paid cannot be read", *view.key)
                for look, sums in zip(looks, (self.gpus, self.data, self.teams), strict=True):
                    look.paid[uid], look.per_second[uid] = sums.by_job.get(uid, {}), {}
        return Paid(
            gpus=self.gpus.next(gpus, for_gpus, keys=pools),
            data=self.data.next(data, for_data, keys=pools),
            teams=self.teams.next(of_both, of_teams, from_start=True),
        )

    def _is_new(self, view: JobView, written_at: Time | None) -> bool:
        """True if the job was made since the last look; or since the sums were written, and has not paid."""
        if self.gpus.at is not None:
            return view.uid not in self.gpus.by_job
        made, paid_at = view.created, view.status.cost_at
        if made is None or written_at is None or (paid_at is not None and paid_at >= made):
            return False
        return made >= written_at.replace(microsecond=0)


def _paid_by(view: JobView, pools: Mapping[str, PoolInfo], now: Time) -> tuple[tuple[_ByKey, _ByKey], ...]:
    """(paid, a second) for GPUs by pool, for data by pool, and for both by team."""
    status, by_team = view.status, {part.team: part.cost for part in view.status.team_costs}
    team = (view.spec.asked.entity if view.spec is not None else None) or ""
    if by_team:
        team = status.team_costs[-1].team
    gpus = {entry.pool: entry.cost for entry in status.pool_costs}
    data = {entry.pool: entry.data_cost for entry in status.pool_costs}
    by_team = by_team or {team: status.cost_so_far}
    allocation = status.allocation
    since = None if allocation is None else view.status.unpaid_since
    if allocation is None or since is None:
        return (gpus, {}), (data, {}), (by_team, {})
    rates, present = dict[str, float](), 0.0
    for part in allocation.on_nodes_by_pool:
        pool = pools.get(part.pool, UNKNOWN_POOL)
        gpu_part = part.gpus * allocation.price_part
        present += cost(gpu_part, pool.pool.price_per_gpu_hour)
        rates[part.pool] = rate = cost(gpu_part, pool.mean_price(since, now))
        unpaid = rate * max(0.0, (now - since).total_seconds())
        gpus[part.pool] = gpus.get(part.pool, 0.0) + unpaid
        by_team[team] += unpaid
    return (gpus, rates), (data, {}), (by_team, {team: present})


def _sum(by_job: Mapping[str, _ByKey]) -> defaultdict[str, float]:
    total: defaultdict[str, float] = defaultdict(float)
    for paid in by_job.values():
        for key, amount in paid.items():
            total[key] += amount
    return total


MOST_POOLS = 256
"""Pools that a bill keeps, those of earlier policies included."""


def written_bill(status: Object | None) -> tuple[tuple[PoolBill, ...], Time | None]:
    """(the bill of a ClusterPolicy's status, up to when it is); nothing where it cannot be read."""
    read = ClusterPolicyStatus.written(status, "bill", "billAt")
    return ((), None) if read is None else (read.bill, read.bill_at)


def brought_up_to(
    bill: Sequence[PoolBill], at: Time | None, now: Time, paid: Paid | None = None
) -> tuple[PoolBill, ...]:
    """The bill with the time from ``at`` to ``now`` added, at the GPUs and prices that it says.

    Every change of these is written when it is seen, so that they held all the time; while no operator ran,
    they are taken to have held as well. What jobs held is what they have ``paid``; None: by the GPUs, too.
    """
    seconds = 0.0 if at is None else max(0.0, (now - at).total_seconds())
    found = []
    for entry in bill:
        more = cost(entry.gpus * seconds, entry.price_per_gpu_hour)
        held, others = entry.held_cost, entry.deleted_jobs_cost
        data, others_data = entry.data_cost, entry.deleted_jobs_data_cost
        if paid is None:
            held += entry.paid_for_gpus(seconds).since
        else:
            held, others = paid.gpus.of(entry.pool), paid.gpus.others.get(entry.pool)
            data, others_data = paid.data.of(entry.pool), paid.data.others.get(entry.pool)
        # A node that came since is paid for from when a job had it.
        more = max(more, held - entry.held_cost)
        found.append(
            entry.replace(
                gpu_seconds=entry.gpu_seconds + entry.gpus * seconds,
                cost=entry.cost + more,
                held_cost=held,
                deleted_jobs_cost=others,
                data_cost=data,
                deleted_jobs_data_cost=others_data,
            )
        )
    return tuple(found)


def next_bill(
    bill: Sequence[PoolBill],
    at: Time | None,
    now: Time,
    *,
    pools: Sequence[NodePool],
    capacity: Sequence[PoolCapacity],
    paid: Paid,
) -> tuple[PoolBill, ...]:
    """The bill up to now, and what is paid from now on; pools that are gone keep what they have cost."""
    known = {entry.pool: entry for entry in brought_up_to(bill, at, now, paid)}
    prices = {pool.name: pool.price_per_gpu_hour for pool in pools}
    found = {name: entry.replace(gpus=0, gpus_held=0) for name, entry in known.items()}
    for entry in capacity:
        before = known.get(entry.pool) or PoolBill(
            pool=entry.pool,
            since=now,
            deleted_jobs_cost=paid.gpus.others.get(entry.pool),
            deleted_jobs_data_cost=paid.data.others.get(entry.pool),
        )
        found[entry.pool] = before.replace(
            gpu_type=entry.gpu_type,
            gpus=max(entry.gpus, entry.gpus_held),
            gpus_held=entry.gpus_held,
            price_per_gpu_hour=prices.get(entry.pool, before.price_per_gpu_hour),
        )
    # The pools in use are last: where there are too many, those go that are gone.
    used = {entry.pool for entry in capacity}
    ordered = sorted(found.values(), key=lambda entry: entry.pool in used)
    return tuple(ordered[-MOST_POOLS:])


def pool_infos(
    pools: Sequence[NodePool], before: Mapping[str, PoolInfo], status: Object | None, *, at: Time
) -> dict[str, PoolInfo]:
    """The pools from ``at`` on; those that were not known ``before`` have cost until now what the bill says.

    ``status``: of the ClusterPolicy, as an operator has left it.
    """
    billed = {
        entry.get("pool"): entry.get("pricePerGpuHour", 0.0) for entry in (status or {}).get("bill") or []
    }
    losses = {entry.get("pool"): entry.get("perHour") for entry in (status or {}).get("hazard") or []}
    regions = {entry.get("pool"): entry.get("region", "") for entry in (status or {}).get("capacity") or []}
    found = {}
    for pool in pools:
        known = before.get(pool.name)
        if known is None:
            billed_at = {"price_per_gpu_hour": billed.get(pool.name, pool.price_per_gpu_hour)}
            known = PoolInfo(pool=pool.model_copy(update=billed_at), region=regions.get(pool.name, ""))
        found[pool.name] = dataclasses.replace(
            known.changed(pool, at=at), losses_per_hour=losses.get(pool.name)
        )
    return found


def with_regions(infos: Mapping[str, PoolInfo], capacity: ClusterCapacity) -> dict[str, PoolInfo]:
    """``infos`` with the regions in which the pools are, and the prices of data between these."""
    regions, prices = capacity.regions, capacity.data_prices
    return {
        name: dataclasses.replace(info, region=regions.get(name, info.region), data_prices=prices)
        for name, info in infos.items()
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BudgetLeft:
    """A team's budget, and what is ``left`` of it."""

    team: str
    budget: TeamBudget
    left: float

    @property
    def spent(self) -> bool:
        """True if nothing is left."""
        return self.left <= ROUNDING * self.budget.amount

    @property
    def suspends(self) -> bool:
        """True if the team's jobs hold no GPUs while it is spent."""
        return self.budget.on_exhausted is OnTeamLimit.SUSPEND

    @property
    def message(self) -> str:
        """Message that it is spent, with what to change."""
        monthly = self.budget.period is BudgetPeriod.MONTH
        message = f"the jobs of team {self.team} have cost its budget of {self.budget.amount:.10g}"
        message += " of this month" if monthly else ""
        if not self.suspends:
            return f"{message}, and continue, as the budget's onExhausted is Continue"
        wait = "wait for the next month, or " if monthly else ""
        raise_it = f"ask the cluster's administrator to raise budgets.{self.team}.amount of the ClusterPolicy"
        return f"{message}. To fix: {wait}{raise_it}"

    def begins_again(self, now: Time) -> float:
        """Time after ``now`` when the whole amount is there again, epoch seconds; infinite: never."""
        monthly = self.budget.period is BudgetPeriod.MONTH
        next_month = first_of_month(first_of_month(now) + datetime.timedelta(days=32))
        return next_month.timestamp() if monthly else math.inf


def without_suspended_teams(
    wanting: Sequence[JobView], budgets: Mapping[str, BudgetLeft]
) -> tuple[list[JobView], list[RefusedJob]]:
    """(jobs that may take part, jobs that may not)."""
    kept, refused = [], []
    for view in wanting:
        over = budgets.get(view.spec.asked.entity or "") if view.spec is not None else None
        if over is None or not (over.spent and over.suspends):
            kept.append(view)
            continue
        refusal = Refusal(JobReason.TEAM_BUDGET_SPENT, over.message)
        refused.append(RefusedJob(view, refusal))
    return kept, refused


MOST_TEAMS = 256
"""Teams whose costs are kept: those with a budget and those with GPUs first."""


def next_team_costs(
    status: Mapping[str, Any], policy: ClusterPolicy | None, paid: Paid | None, now: Time
) -> tuple[TeamCost, ...]:
    """The costs up to ``now``, and what each team's GPUs cost from now on.

    ``policy``, ``paid`` (by jobs, a moment ago) None: no policy can be used; what teams cost counts on.
    """
    known = {entry.team: entry for entry in team_costs(status, now)}
    if policy is None or paid is None or paid.teams.at is None:
        return tuple(known.values())
    sums, seconds = paid.teams, max(0.0, (now - paid.teams.at).total_seconds())
    per_second: defaultdict[str, float] = defaultdict(float)
    for rates in sums.per_second.values():
        for team, rate in rates.items():
            per_second[team] += rate
    found = []
    for team in {**known, **sums.by_key, **dict.fromkeys(policy.spec.budgets)}:
        cost = sums.of(team) + per_second[team] * seconds
        entry = known.get(team)
        if entry is None:
            entry = TeamCost(team=team, since=now, month=month_of(now))
        month = max(0.0, entry.month_cost + cost - entry.cost)
        found.append(
            entry.replace(
                cost=cost,
                month_cost=month,
                cost_per_hour=per_second[team] * SECONDS_PER_HOUR,
                deleted_jobs_cost=sums.others.get(team, 0.0),
            )
        )
    found.sort(key=lambda entry: (entry.team in policy.spec.budgets, entry.cost_per_hour > 0, entry.cost))
    return tuple(sorted(found[-MOST_TEAMS:], key=lambda entry: entry.team))


def budgets_left(policy: ClusterPolicy, teams: Sequence[TeamCost]) -> dict[str, BudgetLeft]:
    """The budget of each team that has one."""
    found = {}
    for entry in teams:
        budget = policy.spec.budgets.get(entry.team)
        if budget is not None:
            paid = entry.month_cost if budget.period is BudgetPeriod.MONTH else entry.cost
            found[entry.team] = BudgetLeft(team=entry.team, budget=budget, left=budget.amount - paid)
    return found


def next_budget_change(
    budgets: Mapping[str, BudgetLeft], teams: Sequence[TeamCost], now: Time
) -> float | None:
    """Time when the next budget is spent or begins again, epoch seconds; None: none is known."""
    per_hour = {entry.team: entry.cost_per_hour for entry in teams}
    found = [math.inf]
    for team, budget in budgets.items():
        if budget.spent:
            found.append(budget.begins_again(now))
        elif per_hour[team] > 0:
            found.append(now.timestamp() + budget.left / per_hour[team] * SECONDS_PER_HOUR)
    return None if math.isinf(min(found)) else min(found)
