"""Another policy, more GPUs or other prices: which of the same jobs would gain and which would lose.

A comparison of two allocations, in steps per second that each job would have in the long run.  Nothing is
simulated over time, so it holds for the jobs that are there now.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PriceClasses, PricedPool
from ballast_policies.allocation.problem import Allocation, Problem, ProblemError
from ballast_policies.allocation.registry import allocate, find_policy

NOTICEABLE = 0.01
"""A relative change of speed below this is called the same."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Side of the comparison.

    Attributes:
        policy: its name.
        agnostic: it takes all GPU types for equally fast.
        more: GPU type -> GPUs added (negative: taken away).
        prices: GPU type -> USD per GPU hour, instead of today's.
        gpus: pool -> GPUs that may be in use, instead of today's.
    """

    policy: str
    agnostic: bool = False
    more: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobChange:
    """A job in both; speeds in steps/s."""

    job: str
    before: float
    after: float
    types_before: Mapping[str, float]
    types_after: Mapping[str, float]

    @property
    def change(self) -> float | None:
        """Relative; None: it had nothing before."""
        return self.after / self.before - 1.0 if self.before > 0 else None

    @property
    def verdict(self) -> str:
        """``gains``, ``loses`` or ``same``."""
        change = self.change
        if change is None:
            return "gains" if self.after > 0 else "same"
        return "same" if abs(change) < NOTICEABLE else "gains" if change > 0 else "loses"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both sides; costs in USD per hour of the GPU time that is used."""

    before: Setup
    after: Setup
    jobs: tuple[JobChange, ...]
    cost_before: float
    cost_after: float
    least_level_before: float
    least_level_after: float

    def to_json(self) -> dict[str, Any]:
        """The form of ``ballast whatif --output json``."""
        return {
            "before": dataclasses.asdict(self.before),
            "after": dataclasses.asdict(self.after),
            "cost_per_hour_before": self.cost_before,
            "cost_per_hour_after": self.cost_after,
            "least_level_before": self.least_level_before,
            "least_level_after": self.least_level_after,
            "jobs": [
                {**dataclasses.asdict(job), "change": job.change, "verdict": job.verdict} for job in self.jobs
            ],
        }


def compare(
    problem: Problem,
    before: Setup,
    after: Setup,
    pools: Sequence[PricedPool] = (),
    usd_per_step: Mapping[str, Mapping[str, float]] | None = None,
) -> Comparison:
    """Solve ``problem`` both ways.

    Args:
        problem: the jobs of now.
        before: one side.
        after: the other.
        pools: those that the problem's GPUs are in; policies that read prices choose between them. GPUs that
            a side adds or takes away are the cheapest ones of their type. Empty: one price a type.
        usd_per_step: job -> pool -> what a step there costs besides GPUs, for policies that read prices.

    Raises:
        ProblemError: a policy is unknown or lacks what it needs, a GPU type is not in the problem, or more
            GPUs would be taken away than there are.
    """
    own = [
        [dataclasses.replace(pool, gpus=side.gpus.get(pool.pool, pool.gpus)) for pool in pools]
        for side in (before, after)
    ]
    sides = [
        (side, _with(_of_pools(problem, pools, of), side), of)
        for side, of in zip((before, after), own, strict=True)
    ]
    (cost_before, solved_first), (cost_after, solved_second) = [
        _solved(changed, side, of, usd_per_step or {}) for side, changed, of in sides
    ]
    return Comparison(
        before=before,
        after=after,
        jobs=tuple(
            JobChange(
                job=job.name,
                before=solved_first.throughput[job.name],
                after=solved_second.throughput[job.name],
                types_before=_used(solved_first, job.name),
                types_after=_used(solved_second, job.name),
            )
            for job in problem.jobs
        ),
        cost_before=cost_before,
        cost_after=cost_after,
        least_level_before=min(solved_first.levels.values(), default=0.0),
        least_level_after=min(solved_second.levels.values(), default=0.0),
    )


def _of_pools(problem: Problem, pools: Sequence[PricedPool], others: Sequence[PricedPool]) -> Problem:
    """``problem`` with the GPUs of ``others`` instead of those of the same ``pools``."""
    capacity = dict(problem.capacity)
    for before, after in zip(pools, others, strict=True):
        if after.gpus != before.gpus:
            capacity[after.gpu_type] = capacity.get(after.gpu_type, 0) + after.gpus - before.gpus
    return dataclasses.replace(problem, capacity=capacity)


def _with(problem: Problem, side: Setup) -> Problem:
    for field, types in (("more", side.more), ("prices", side.prices)):
        for gpu_type in sorted(set(types) - set(problem.gpu_types)):
            raise ProblemError(
                f"{field}: {gpu_type} is not one of {', '.join(problem.gpu_types)}; the speed of jobs on "
                "other GPU types is not known"
            )
    capacity = {t: problem.capacity.get(t, 0) + side.more.get(t, 0) for t in problem.gpu_types}
    for gpu_type, count in capacity.items():
        if count < 0:
            raise ProblemError(
                f"more: {gpu_type}: {-side.more[gpu_type]} GPUs cannot be taken away, there are "
                f"{problem.capacity.get(gpu_type, 0)}"
            )
    return dataclasses.replace(problem, capacity=capacity, prices={**problem.prices, **side.prices})


def _solved(
    problem: Problem,
    side: Setup,
    pools: Sequence[PricedPool],
    usd_per_step: Mapping[str, Mapping[str, float]],
) -> tuple[float, Allocation]:
    """(cost per hour of the GPU time that is used, the allocation by GPU type)."""
    if Reads.PRICES not in find_policy(side.policy).reads:
        allocation = allocate(side.policy, problem, agnostic=side.agnostic)
        return _cost(problem, allocation), allocation
    classes = PriceClasses.of(_changed(pools, side), problem.prices)
    asked = classes.split(problem, None, usd_per_step)
    allocation = allocate(side.policy, asked, agnostic=side.agnostic)
    return _cost(asked, allocation), classes.merge(allocation)


def _changed(pools: Sequence[PricedPool], side: Setup) -> list[PricedPool]:
    """The pools with a side's prices and GPUs."""
    more, found = dict(side.more), []
    for pool in sorted(pools, key=lambda pool: (pool.price, pool.pool)):
        wanted = more.pop(pool.gpu_type, 0)
        change = max(-pool.gpus, wanted)
        if change != wanted:
            more[pool.gpu_type] = wanted - change
        price = side.prices.get(pool.gpu_type, pool.price)
        found.append(dataclasses.replace(pool, price=price, gpus=pool.gpus + change))
    return found


def _used(allocation: Allocation, job: str) -> dict[str, float]:
    return {t: x for t, x in allocation.allocation.get(job, {}).items() if x > 1e-6}


def _cost(problem: Problem, allocation: Allocation) -> float:
    total = 0.0
    for job in problem.jobs:
        mixtures = {each.name: each.gpus for each in job.configurations}
        for name, share in allocation.allocation.get(job.name, {}).items():
            gpus = mixtures.get(name, {name: job.gpus})
            total += sum(problem.prices.get(t, 0.0) * count * share for t, count in gpus.items())
    return total
