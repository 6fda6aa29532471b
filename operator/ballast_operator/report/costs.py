"""Costs of jobs, teams and pools of a live cluster, past and to come: for ``ballast cost``.

The bill of the nodes is the ClusterPolicy's (``status.bill``); what jobs have cost is their own
(``status.costSoFar``, ``status.poolCosts``). Both are summed up to the same moment, at the GPUs and prices
that they say, so that for each pool

    bill = jobs + deleted jobs + idle.

Data that was read from other regions is a part of these, of the bill too. Beside a job's costs stand those
that it would have had otherwise: on demand only, and on all GPU types alike.
"""

import dataclasses
import datetime
import html
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ballast_policies.accounting import cost
from ballast_policies.contract.errors import camel
from ballast_policies.prices.egress import NO_DATA_PRICES, DataPrices

from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus, team_costs
from ballast_operator.api.costs import BudgetPeriod, DataLocation
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.training_job_status import WASTE, allocation_in
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import JOB, Object, is_ours, key_of, spec_of
from ballast_operator.report.explanation import read_policies


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    """Prices by pool, with GPU type, GPUs, region; by GPU type the cheapest on demand; prices of data."""

    price: Mapping[str, float]
    gpu_type: Mapping[str, str]
    gpus: Mapping[str, int]
    on_demand: Mapping[str, float]
    region: Mapping[str, str] = dataclasses.field(default_factory=dict)
    data: DataPrices = NO_DATA_PRICES


def read_prices(policies: Sequence[Object]) -> Prices:
    """The prices that count now."""
    price: dict[str, float] = {}
    gpu_type: dict[str, str] = {}
    gpus: dict[str, int] = {}
    on_demand: dict[str, float] = {}
    region: dict[str, str] = {}
    data: dict[tuple[str, str], float] = {}
    for policy in policies:
        status = policy.get("status") or {}
        bill = {entry["pool"]: entry for entry in status.get("bill") or []}
        capacity = {entry["pool"]: entry for entry in status.get("capacity") or []}
        region |= {name: entry.get("region", "") for name, entry in capacity.items()}
        for each in spec_of(policy).get("dataPrices") or []:
            data.setdefault((each["fromRegion"], each["toRegion"]), each["pricePerGb"])
        for pool in spec_of(policy).get("nodePools") or []:
            name, kind = pool["name"], pool["gpuType"]
            now = (bill.get(name) or {}).get("pricePerGpuHour", pool.get("pricePerGpuHour") or 0.0)
            price.setdefault(name, now)
            gpu_type.setdefault(name, kind)
            gpus.setdefault(name, (capacity.get(name) or {}).get("gpus", 0))
            found = (capacity.get(name) or {}).get("capacityType")
            if (found or pool.get("capacityType") or "onDemand") == "onDemand" and now > 0:
                on_demand[kind] = min(on_demand.get(kind, now), now)
    return Prices(
        price=price,
        gpu_type=gpu_type,
        gpus=gpus,
        on_demand=on_demand,
        region=region,
        data=DataPrices(data),
    )


def data_usd_per_step(spec: Mapping[str, Any], allocation: JobAllocation, prices: Prices) -> float:
    """Price of the data of a step of the job where it runs; 0: nothing, or it is not known."""
    if not spec.get("dataLocation"):
        return 0.0
    try:
        data = DataLocation.model_validate(spec["dataLocation"]).read_in(spec.get("totalSteps", 0))
    except ValueError:  # of a newer release
        return 0.0
    pools = {part.pool: prices.region.get(part.pool, "") for part in allocation.by_pool}
    each = {pool: data.usd_per_step(prices.data, region) or 0.0 for pool, region in pools.items()}
    return allocation.placement.mean(each)


def on_demand_cost(gpu_seconds: Mapping[str, float], status: Any, prices: Prices) -> float | None:
    """The same GPU time in the cheapest on-demand pools of the same types; None: a type has none."""
    types = {entry["pool"]: entry.get("gpuType", "") for entry in status.get("poolCosts") or []}
    total = 0.0
    for pool, seconds in gpu_seconds.items():
        price = prices.on_demand.get(types.get(pool) or prices.gpu_type.get(pool, ""))
        if price is None:
            return None
        total += cost(seconds, price)
    return total if gpu_seconds else None


def type_blind_cost(spec: Any, steps: int, prices: Prices) -> float | None:
    """Cost of ``steps`` on all pools, each for its part of the GPUs; None where a speed is not stated."""
    all_gpus = sum(prices.gpus.values())
    speeds: dict[str, tuple[int, float]] = {}
    for entry in spec.get("throughput") or []:
        known = speeds.get(entry["gpuType"])
        if known is None or entry["stages"] < known[0]:
            speeds[entry["gpuType"]] = (entry["stages"], entry["stepsPerSecond"])
    stated = {stages for stages, _ in speeds.values()}
    if not steps or not all_gpus or len(stated) != 1:
        return None
    per_second = speed = 0.0
    for pool, gpus in prices.gpus.items():
        if not gpus:
            continue
        if prices.gpu_type[pool] not in speeds:
            return None
        stages, rate = speeds[prices.gpu_type[pool]]
        per_second += gpus / all_gpus * cost(float(stages), prices.price[pool])
        speed += gpus / all_gpus * rate
    return steps / speed * per_second if speed > 0 else None


NO_TEAM = ""
"""The team of jobs without ``spec.entity``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobCost:
    """A job. Amounts in the currency of ``pricePerGpuHour``; None: not known.

    Attributes:
        cost: so far.
        projected: at its end, at its present speed and price.
        startup_cost: of ``cost``: no step was done meanwhile.
        lost_cost: of ``cost``: for steps that were done twice.
        data_cost: of ``cost``: for data that was read from other regions.
        on_demand_cost: the same GPU time in the cheapest on-demand pool of the same GPU types.
        type_blind_cost: the same steps on all GPU types, each for the part of the time that it is of the
            cluster, as an isolated share is: what not choosing would have cost.
        by_pool, data_by_pool: pool -> of ``cost`` and of ``data_cost``, what it paid there.
        partner: the job that is on its GPU as well, which pays the other half of the price; empty: none.
        goodput: the part of its GPUs' time that was productive, up to ``costAt``.
        badput: what the other parts were, each as a part of the time.
    """

    namespace: str
    job: str
    team: str
    state: str
    gpu_hours: float
    cost: float
    projected: float | None
    startup_cost: float
    lost_steps: int
    lost_cost: float
    on_demand_cost: float | None
    type_blind_cost: float | None
    by_pool: Mapping[str, float]
    data_cost: float = 0.0
    data_by_pool: Mapping[str, float] = dataclasses.field(default_factory=dict)
    partner: str = ""
    goodput: float | None = None
    badput: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpu_hours_by_pool: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def parts(self) -> list[tuple[str, float]]:
        """Parts of ``cost``."""
        return [
            ("training", self.cost - self.startup_cost - self.lost_cost - self.data_cost),
            ("start-up", self.startup_cost),
            ("lost steps", self.lost_cost),
            ("data", self.data_cost),
        ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TeamCost:
    """The jobs of a team that are not deleted; of one with a budget also where all are.

    Attributes:
        spent: what its budget is compared with: deleted jobs included, and of this month where the budget is
            one of each month; None: not known.
        budget: of the ClusterPolicy; None: none.
        goodput: of its jobs, by their GPU time.
    """

    team: str
    jobs: int
    cost: float
    projected: float | None
    spent: float | None = None
    budget: float | None = None
    goodput: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolCostLine:
    """A pool: ``bill`` = ``jobs`` + ``deleted_jobs`` + ``idle``.

    Attributes:
        price: of one GPU for an hour, now.
        since: since when the bill is kept.
        data: of ``bill``: what jobs paid for data that they read there from other regions.
        goodput: of the jobs that had GPUs of it, by their GPU time there.
    """

    pool: str
    gpu_type: str
    gpus: int
    price: float
    since: str
    bill: float
    jobs: float
    deleted_jobs: float
    idle: float
    data: float = 0.0
    goodput: float | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Costs:
    """The cluster at one moment; ``left_out``: what could not be read, and what lacks without it."""

    at: str
    jobs: tuple[JobCost, ...]
    teams: tuple[TeamCost, ...]
    pools: tuple[PoolCostLine, ...]
    left_out: str = ""

    def to_dict(self) -> dict[str, Any]:
        """Fields for JSON, with totals."""
        return {
            **dataclasses.asdict(self),
            "total": {
                "bill": sum(pool.bill for pool in self.pools),
                "jobs": sum(job.cost for job in self.jobs),
                "deleted_jobs": sum(pool.deleted_jobs for pool in self.pools),
                "idle": sum(pool.idle for pool in self.pools),
                "startup": sum(job.startup_cost for job in self.jobs),
                "lost_steps": sum(job.lost_cost for job in self.jobs),
                "data": sum(pool.data for pool in self.pools),
                "goodput": _mean_goodput((job.goodput, job.gpu_hours) for job in self.jobs),
                "saved_against_on_demand": _saved(
                    (job.cost - job.data_cost, job.on_demand_cost) for job in self.jobs
                ),
                "saved_against_type_blind": _saved(
                    (job.cost - job.data_cost, job.type_blind_cost) for job in self.jobs
                ),
            },
        }


def _saved(pairs: Iterable[tuple[float, float | None]]) -> float | None:
    """The sum over jobs whose other cost is known; None where there is none."""
    known = [other - paid for paid, other in pairs if other is not None]
    return sum(known) if known else None


async def read_costs(cluster: Cluster, namespace: str = "") -> Costs:
    """Look once; ``namespace`` empty: the jobs of all."""
    jobs, _ = await cluster.list(JOB, namespace=namespace)
    policies, why = await read_policies(cluster)
    found = costs(jobs, policies, now=datetime.datetime.now(datetime.UTC), all_jobs=not namespace)
    lacks = f"prices, and with them costs since each job's status.costAt and to come: {why}"
    return dataclasses.replace(found, left_out=lacks) if why else found


def costs(
    jobs: Sequence[Object], policies: Sequence[Object], *, now: datetime.datetime, all_jobs: bool = True
) -> Costs:
    """The costs up to ``now``, from TrainingJobs and ClusterPolicies, of which the one in force has a bill.

    Where ``jobs`` are not those of all namespaces, what pools cost besides is not known, and there are none;
    teams are those of these jobs.
    """
    prices = read_prices(policies)
    lines = tuple(_job(job, prices, now) for job in sorted(filter(is_ours, jobs), key=key_of))
    teams, budgets = [], _budgets(policies, now)
    limited = {team for team, (_, budget) in budgets.items() if all_jobs and budget is not None}
    for team in sorted({line.team for line in lines} | limited):
        members = [line for line in lines if line.team == team]
        projections = [line.projected for line in members if line.projected is not None]
        teams.append(
            TeamCost(
                team=team,
                jobs=len(members),
                cost=sum(line.cost for line in members),
                projected=sum(projections) if len(projections) == len(members) else None,
                spent=budgets.get(team, (None, None))[0],
                budget=budgets.get(team, (None, None))[1],
                goodput=_mean_goodput((line.goodput, line.gpu_hours) for line in members),
            )
        )
    pools = []
    for policy in policies if all_jobs else ():
        at = (policy.get("status") or {}).get("billAt")
        billed = datetime.datetime.fromisoformat(at) if at else now
        pools += _pools(policy, lines, [_job(job, prices, billed) for job in filter(is_ours, jobs)], now)
    return Costs(at=now.isoformat(timespec="seconds"), jobs=lines, teams=tuple(teams), pools=tuple(pools))


def _budgets(
    policies: Sequence[Object], now: datetime.datetime
) -> dict[str, tuple[float | None, float | None]]:
    """Team -> (spent, budget)."""
    found: dict[str, tuple[float | None, float | None]] = {}
    for policy in policies:
        limits = spec_of(policy).get("budgets") or {}
        for entry in team_costs(policy.get("status"), now):
            limit = limits.get(entry.team) or {}
            monthly = limit.get("period") == BudgetPeriod.MONTH
            found[entry.team] = (entry.month_cost if monthly else entry.cost, limit.get("amount"))
    return found


def _mean_goodput(jobs: Iterable[tuple[float | None, float]]) -> float | None:
    """Mean of (goodput, GPU time) of jobs; None: that of none is known."""
    known = [(goodput, held) for goodput, held in jobs if goodput is not None and held > 0]
    total = sum(held for _, held in known)
    return sum(goodput * held for goodput, held in known) / total if total > 0 else None


def _job(job: Object, prices: Prices, now: datetime.datetime) -> JobCost:
    status: Any = job.get("status") or {}
    spec: Any = spec_of(job)
    allocation, progress = allocation_in(status), status.get("progress") or {}
    held = () if allocation is None else allocation.on_nodes_by_pool
    of_price = 1.0 if allocation is None else allocation.price_part
    rates = {part.pool: cost(part.gpus * of_price, prices.price.get(part.pool, 0.0)) for part in held}
    rate = sum(rates.values())  # per second
    # As times, not as texts: one of them may have a fraction of a second.
    since = (status.get("allocation") or {}).get("since")
    made = job["metadata"].get("creationTimestamp")  # after both, of a job that a backup has brought back
    began = [time for time in (status.get("costAt"), since, made) if time]
    seconds = min((_seconds_since(time, now) for time in began), default=0.0)
    by_pool = {
        entry["pool"]: entry.get("cost", 0.0) + entry.get("dataCost", 0.0)
        for entry in status.get("poolCosts") or []
    }
    gpu_seconds = {entry["pool"]: entry.get("gpuSeconds", 0.0) for entry in status.get("poolCosts") or []}
    for part in held:
        by_pool[part.pool] = by_pool.get(part.pool, 0.0) + rates[part.pool] * seconds
        gpu_seconds[part.pool] = gpu_seconds.get(part.pool, 0.0) + part.gpus * of_price * seconds
    total = (status.get("costSoFar") or 0.0) + rate * seconds
    steps, speed = progress.get("step") or 0, progress.get("stepsPerSecond") or 0.0
    left = max(0, spec.get("totalSteps", 0) - steps)
    time = status.get("gpuTime") or {}
    finished = status.get("state") in ("Succeeded", "Failed")
    projected = None
    if finished or not left:
        projected = total
    elif allocation is not None and speed > 0 and rate > 0:
        projected = total + rate * left / speed + left * data_usd_per_step(spec, allocation, prices)
    return JobCost(
        namespace=job["metadata"].get("namespace", ""),
        job=job["metadata"]["name"],
        team=spec.get("entity") or NO_TEAM,
        state=status.get("state") or "New",
        gpu_hours=sum(gpu_seconds.values()) / 3600.0,
        cost=total,
        projected=projected,
        startup_cost=sum(entry.get("startupCost", 0.0) for entry in status.get("poolCosts") or []),
        lost_steps=status.get("lostSteps") or 0,
        lost_cost=status.get("lostCost") or 0.0,
        on_demand_cost=on_demand_cost(gpu_seconds, status, prices),
        type_blind_cost=type_blind_cost(spec, steps, prices),
        by_pool=by_pool,
        data_cost=(status.get("data") or {}).get("cost", 0.0),
        data_by_pool={e["pool"]: e.get("dataCost", 0.0) for e in status.get("poolCosts") or []},
        partner="" if allocation is None else allocation.partner,
        goodput=time.get("goodput", 0.0) if time.get("held") else None,
        badput={n: time.get(n, 0.0) / time["held"] for n in map(camel, WASTE) if time.get("held")},
        gpu_hours_by_pool={pool: seconds / 3600.0 for pool, seconds in gpu_seconds.items()},
    )


def _of_jobs(jobs: Sequence[JobCost], pool: str) -> tuple[float, float]:
    """(for GPUs of the pool, for data)."""
    data = sum(job.data_by_pool.get(pool, 0.0) for job in jobs)
    return sum(job.by_pool.get(pool, 0.0) for job in jobs) - data, data


def _pools(
    policy: Object, jobs: Sequence[JobCost], then: Sequence[JobCost], now: datetime.datetime
) -> list[PoolCostLine]:
    """``then``: the jobs as they were when the bill was written."""
    status = ClusterPolicyStatus.written(policy.get("status"), "bill", "billAt") or ClusterPolicyStatus()
    seconds = 0.0 if status.bill_at is None else max(0.0, (now - status.bill_at).total_seconds())
    found = []
    for entry in status.bill:
        bill = entry.cost + cost(entry.gpus * seconds, entry.price_per_gpu_hour)
        of_jobs, data = _of_jobs(jobs, entry.pool)
        of_jobs_then, _ = _of_jobs(then, entry.pool)
        by_jobs = of_jobs + entry.paid_for_gpus(seconds).paid_by_others(of_jobs, of_jobs_then)
        bill = max(bill, entry.cost + by_jobs - entry.held_cost)
        data_of_others = entry.paid_for_data().paid_by_others(data, data)
        found.append(
            PoolCostLine(
                pool=entry.pool,
                gpu_type=entry.gpu_type,
                gpus=entry.gpus,
                price=entry.price_per_gpu_hour,
                since=entry.to_dict()["since"],
                bill=bill + data + data_of_others,
                jobs=of_jobs + data,
                deleted_jobs=by_jobs - of_jobs + data_of_others,
                idle=bill - by_jobs,
                data=data + data_of_others,
                goodput=_mean_goodput(
                    (job.goodput, job.gpu_hours_by_pool.get(entry.pool, 0.0)) for job in jobs
                ),
            )
        )
    return found


def _seconds_since(time: str | None, now: datetime.datetime) -> float:
    if not time:
        return 0.0
    return max(0.0, (now - datetime.datetime.fromisoformat(time)).total_seconds())


MOST_JOBS = 40
"""Jobs drawn, the dearest first."""

WIDTH, LABEL, BAR = 760.0, 280.0, 22
COLOURS = {
    "training": "#4878a8",
    "start-up": "#e8a33d",
    "lost steps": "#c44e52",
    "data": "#6aa56a",
    "jobs": "#4878a8",
    "deleted jobs": "#9db7d5",
    "idle": "#c9c9c9",
    "cost": "#4878a8",
}

Bar = tuple[str, Sequence[tuple[str, float]]]


def as_html(found: Costs) -> str:
    """The page: pools by what their bill was for, teams, and the dearest jobs with their waste."""
    pools: list[Bar] = [
        (
            f"{pool.pool} ({pool.gpu_type})",
            [("jobs", pool.jobs), ("deleted jobs", pool.deleted_jobs), ("idle", pool.idle)],
        )
        for pool in found.pools
    ]
    teams: list[Bar] = [(team.team or "(none)", [("cost", team.cost)]) for team in found.teams]
    dearest = sorted(found.jobs, key=lambda job: (-job.cost, job.namespace, job.job))
    jobs: list[Bar] = [(f"{job.namespace}/{job.job}", job.parts) for job in dearest[:MOST_JOBS]]
    more = len(found.jobs) - len(jobs)
    parts = [
        _chart("Pools: bill = jobs + deleted jobs + idle", pools),
        _chart("Teams", teams),
        _chart(f"Jobs{f', without {more} cheaper ones' if more else ''}", jobs),
    ]
    title = f"Costs up to {html.escape(found.at)}"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        "<style>body{font:14px sans-serif;margin:24px}text{font-size:12px}</style></head>"
        f"<body><h1>{title}</h1>{''.join(parts)}</body></html>\n"
    )


def _chart(title: str, bars: Sequence[Bar]) -> str:
    heading = f"<h2>{html.escape(title)}</h2>"
    if not bars:
        return f"{heading}<p>none</p>"
    most = max((sum(max(0.0, value) for _, value in parts) for _, parts in bars), default=0.0) or 1.0
    shapes = []
    for row, (name, parts) in enumerate(bars):
        y, x = row * BAR, LABEL
        shapes.append(f'<text x="{LABEL - 8}" y="{y + 15}" text-anchor="end">{html.escape(name)}</text>')
        for kind, value in parts:
            width = max(0.0, value) / most * WIDTH
            shapes.append(
                f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{BAR - 5}" '
                f'fill="{COLOURS[kind]}"><title>{html.escape(name)}, {kind}: {value:,.2f}</title></rect>'
            )
            x += width
        shapes.append(f'<text x="{x + 6:.1f}" y="{y + 15}">{sum(value for _, value in parts):,.2f}</text>')
    kinds = dict.fromkeys(kind for _, parts in bars for kind, _ in parts)
    legend = " ".join(f'<span style="color:{COLOURS[kind]}">&#9632;</span> {kind}' for kind in kinds)
    size = f'width="{LABEL + WIDTH + 100:.0f}" height="{len(bars) * BAR + 4}"'
    return f"{heading}<p>{legend}</p><svg {size}>{''.join(shapes)}</svg>"
