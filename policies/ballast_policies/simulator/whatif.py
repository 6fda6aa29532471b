"""Another policy, more GPUs or other prices: which of the same jobs would gain and which would lose.

A comparison of two allocations, in steps per second that each job would have in the long run.  Nothing is
simulated over time, so it holds for the jobs that are there now.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PriceClasses, PricedPool
from ballast_policies.allocation.problem import Allocation, Problem
from ballast_policies.allocation.registry import allocate, find_policy

NOTICEABLE = 0.01
"""A relative change of speed below this is called the same."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """Another policy, GPUs and prices.

    Attributes:
        policy: its name.
        agnostic: it takes all GPU types for equally fast.
        more: GPU type -> GPUs added (negative: taken away).
        prices: GPU type -> USD per GPU hour, instead of today's.
        gpus: pool -> GPUs that may be in use, under other limits of spot machines.
    """

    policy: str
    agnostic: bool = False
    more: Mapping[str, int] = dataclasses.field(default_factory=dict)
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpus: Mapping[str, int] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """Side of the comparison.

    Attributes:
        setup: what is asked of it.
        problem: the jobs of now, with its GPUs and prices.
        pools: those that the GPUs are in; policies that read prices choose between them. Empty: one price a
            type.
        usd_per_step: job -> pool -> what a step there costs besides GPUs, for policies that read prices.
    """

    setup: Setup
    problem: Problem
    pools: Sequence[PricedPool] = ()
    usd_per_step: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)


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


def compare(before: Side, after: Side) -> Comparison:
    """Solve both sides, whose jobs are the same ones.

    Raises:
        ProblemError: a policy is unknown or lacks what it needs.
    """
    (cost_before, solved_first), (cost_after, solved_second) = map(_solved, (before, after))
    return Comparison(
        before=before.setup,
        after=after.setup,
        jobs=tuple(
            JobChange(
                job=job.name,
                before=solved_first.throughput[job.name],
                after=solved_second.throughput[job.name],
                types_before=_used(solved_first, job.name),
                types_after=_used(solved_second, job.name),
            )
            for job in before.problem.jobs
        ),
        cost_before=cost_before,
        cost_after=cost_after,
        least_level_before=min(solved_first.levels.values(), default=0.0),
        least_level_after=min(solved_second.levels.values(), default=0.0),
    )


def _solved(side: Side) -> tuple[float, Allocation]:
    """(cost per hour of the GPU time that is used, the allocation by GPU type)."""
    setup, problem = side.setup, side.problem
    if Reads.PRICES not in find_policy(setup.policy).reads:
        allocation = allocate(setup.policy, problem, agnostic=setup.agnostic)
        return _cost(problem, allocation), allocation
    classes = PriceClasses.of(side.pools, problem.prices)
    asked = classes.split(problem, None, side.usd_per_step)
    allocation = allocate(setup.policy, asked, agnostic=setup.agnostic)
    return _cost(asked, allocation), classes.merge(allocation)


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
