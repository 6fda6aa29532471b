"""Fill in what a policy needs and the cluster does not state.

A missing value never stops the allocator: it is replaced by a default that conditions name
(``InputsComplete`` of the job or of the ClusterPolicy), and the other jobs are not affected.

| missing | policies | default |
|---|---|---|
| price of a GPU type | those that minimise cost | the mean of the other types; 1 where no pool has a price |
| speed of a job | those that compare speeds | the other jobs' mean speed a GPU; 1 step/s without any |
| team of a job | ``hierarchical`` | the job stands beside the teams, with its own weight |
| user of a job | ``hierarchical``, in teams that share by users | jobs without one are those of one user |
"""

import dataclasses
from collections.abc import Mapping

from ballast_policies.allocation.policy import CLOCK, Reads
from ballast_policies.allocation.price_classes import PriceClasses
from ballast_policies.allocation.problem import Entity, Job, Problem
from ballast_policies.allocation.registry import find_policy
from ballast_policies.scheduling.state import ClusterState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompletedProblem:
    """A problem that the policy can be asked, and the defaults in it.

    Attributes:
        problem: the snapshot's, completed.
        job_defaults: job -> its defaults, as text.
        pool_defaults: defaults in place of prices, as text.
    """

    problem: Problem
    job_defaults: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    pool_defaults: tuple[str, ...] = ()


def complete(
    objective: str, teams: Mapping[str, Entity], problem: Problem, unmeasured: frozenset[str]
) -> CompletedProblem:
    """``problem`` with all that a policy needs. Raises ProblemError: there is no such policy.

    ``teams``: that there are; empty: each job's entity is one. ``unmeasured``: jobs whose speed is a guess.
    """
    policy = find_policy(objective)
    job_defaults: dict[str, list[str]] = {}
    pool_defaults: tuple[str, ...] = ()
    if Reads.TEAMS in policy.reads:
        problem = _with_teams(teams, problem, job_defaults)
    if Reads.PRICES in policy.reads:
        problem, pool_defaults = _with_prices(problem)
    if policy.compares_speeds and unmeasured:
        problem = _with_speeds(problem, unmeasured, job_defaults)
    return CompletedProblem(
        problem=problem,
        job_defaults={name: tuple(words) for name, words in job_defaults.items()},
        pool_defaults=pool_defaults,
    )


def price_classes(
    state: ClusterState,
    prices: Mapping[str, float] | None,
    closed: Mapping[str, frozenset[str]],
    *,
    by_region: bool,
) -> PriceClasses:
    """The columns that a policy decides on: one for each price of a GPU type where it reads prices.

    Where a job is not offered some pools, the pools of a type that it is offered are another column.

    ``prices``: GPU type -> price, of the completed problem; None: the policy reads none, and to it pools of a
    type differ in nothing else. ``closed``: job -> pools that it is not offered. ``by_region``: some job pays
    for data that it reads from another region.
    """
    sets = sorted(set(closed.values()), key=sorted)
    pools = [
        dataclasses.replace(
            pool,
            price=0.0 if prices is None else pool.price,
            group=tuple(number for number, names in enumerate(sets) if pool.pool in names),
            region=state.capacity.regions.get(pool.pool, "") if by_region else "",
        )
        for pool in state.useful_prices
    ]
    return PriceClasses.of(pools, prices or {})


def _with_teams(teams: Mapping[str, Entity], problem: Problem, job_defaults: dict[str, list[str]]) -> Problem:
    unknown_teams = set()
    for job in problem.jobs:
        if job.entity is None:
            lack = "not set"
        elif teams and job.entity not in teams:
            known = ", ".join(sorted(teams)[:5])
            lack = f"{job.entity} is not one of the ClusterPolicy's entities ({known})"
            unknown_teams.add(job.name)
        else:
            if teams and teams[job.entity].by_user and not job.user:
                job_defaults.setdefault(job.name, []).append(
                    f"spec.user: not set; all such jobs of team {job.entity} share one user's part"
                )
            continue
        job_defaults.setdefault(job.name, []).append(
            f"spec.entity: {lack}; the job counts as a team of its own, by spec.weight"
        )
    jobs = (
        dataclasses.replace(job, entity=None) if job.name in unknown_teams else job for job in problem.jobs
    )
    return dataclasses.replace(problem, jobs=tuple(jobs), entities=dict(teams))


def _with_prices(problem: Problem) -> tuple[Problem, tuple[str, ...]]:
    missing = [gpu_type for gpu_type in problem.gpu_types if gpu_type not in problem.prices]
    if not missing:
        return problem, ()
    known = problem.prices.values()
    price = sum(known) / len(known) if known else 1.0
    why = "the mean of the others" if known else "as no pool has a price"
    words = f"nodePools[].pricePerGpuHour: none for {', '.join(missing)}; {price:.4g} counts, {why}"
    return dataclasses.replace(problem, prices={**problem.prices, **dict.fromkeys(missing, price)}), (words,)


def _with_speeds(problem: Problem, unmeasured: frozenset[str], job_defaults: dict[str, list[str]]) -> Problem:
    measured = tuple(job for job in problem.jobs if job.name not in unmeasured)
    speed_a_gpu = _speed_a_gpu(measured, problem.gpu_types)
    what = "the other jobs' mean speed a GPU" if speed_a_gpu else "1 step/s on every GPU type"
    for name in unmeasured:
        job_defaults.setdefault(name, []).append(
            f"spec.throughput: nothing given and nothing measured yet; {what} counts"
        )

    def known(job: Job) -> Job:
        if job.name not in unmeasured:
            return job
        rates = {t: speed_a_gpu[t] * job.gpus if speed_a_gpu else 1.0 for t in job.throughput}
        return dataclasses.replace(job, throughput=rates)

    return dataclasses.replace(problem, jobs=tuple(known(job) for job in problem.jobs))


def _speed_a_gpu(jobs: tuple[Job, ...], gpu_types: tuple[str, ...]) -> dict[str, float]:
    """GPU type -> mean steps/s a GPU of the jobs that run there, or over all types; empty: none runs."""
    means = {}
    for gpu_type in gpu_types:
        rates = [job.throughput[gpu_type] / job.gpus for job in jobs if job.throughput.get(gpu_type, 0.0) > 0]
        if rates:
            means[gpu_type] = sum(rates) / len(rates)
    if not means:
        return {}
    overall = sum(means.values()) / len(means)
    return {gpu_type: means.get(gpu_type, overall) for gpu_type in gpu_types}


def structure(policy: str, problem: Problem, unmeasured: frozenset[str], *, now: float) -> tuple[object, ...]:
    """Equal while neither the jobs, what they ask for, nor the GPUs change; ``now`` in epoch seconds.

    Speeds, steps and times are not in it: within a round their changes do not call for another solve.
    """
    jobs = [
        (
            job.name,
            job.gpus,
            job.weight,
            (job.entity, job.user),
            sorted([gpu_type for gpu_type, rate in job.throughput.items() if rate > 0]),
            job.name in unmeasured,
            None if job.deadline is None else round(now + job.deadline),
            [(each.name, sorted(each.gpus.items())) for each in job.configurations],
        )
        for job in problem.jobs
    ]
    return policy, jobs, sorted(problem.capacity.items()), sorted(problem.prices.items())


def values(policy: str, problem: Problem) -> list[list[object]]:
    """Values that change while jobs run, as far as the policy reads them: to two digits, times to three."""
    row = find_policy(policy)
    steps = Reads.STEPS in row.reads
    jobs = []
    for job in problem.jobs:
        entry: list[object] = [
            {gpu_type: f"{rate:.1e}" for gpu_type, rate in sorted(job.throughput.items())},
            _digits(job.steps_remaining) if steps else None,
            *(f"{each.throughput:.1e}" for each in job.configurations),
        ]
        if job.usd_per_step:
            entry.append({column: f"{usd:.1e}" for column, usd in sorted(job.usd_per_step.items())})
        entry += [f"{each.usd_per_step:.1e}" for each in job.configurations if each.usd_per_step]
        if Reads.BUDGETS in row.reads:
            entry.append(_digits(job.budget))
        entry += [_digits(getattr(job, field), 2) for field in CLOCK if field in row.reads]
        jobs.append(entry)
    return jobs


def _digits(value: float | None, after_the_first: int = 1) -> str | None:
    return None if value is None else f"{value:.{after_the_first}e}"
