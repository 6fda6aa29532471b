"""The table of policies: every name that ``ClusterPolicy.spec.objective`` and ``ballast allocate`` know."""

import dataclasses
from collections.abc import Callable

from ballast_policies.allocation.max_min_fairness import max_min_fairness
from ballast_policies.allocation.problem import Allocation, Problem, ProblemError

POLICIES: dict[str, Callable[[Problem], Allocation]] = {
    "max-min-fairness": max_min_fairness,
}

POLICY_NAMES: tuple[str, ...] = tuple(POLICIES)


def allocate(
    policy: str, problem: Problem, *, agnostic: bool = False, space_sharing: bool = False
) -> Allocation:
    """Solve ``problem`` by the named policy.

    Args:
        policy: one of :data:`POLICY_NAMES`.
        problem: jobs over GPU types.
        agnostic: take all GPU types for equally fast (the type-blind baseline); throughput and
            levels of the answer are still those of the real types.
        space_sharing: let the pairs of the problem share GPUs.

    Raises:
        ProblemError: the policy is unknown, or cannot do what is asked.
    """
    if policy not in POLICIES:
        raise ProblemError(f"policy: {policy!r} is not one of {', '.join(POLICY_NAMES)}")
    if space_sharing:
        raise ProblemError(f"policy: {policy} does not share GPUs between jobs")
    if not agnostic:
        return POLICIES[policy](problem)
    return priced_by_real_types(problem, POLICIES[policy](type_blind(problem)))


def type_blind(problem: Problem) -> Problem:
    """The same problem as seen by a scheduler for which every GPU that a job may use is the same."""
    jobs = tuple(
        dataclasses.replace(job, throughput={g: 1.0 for g, rate in job.throughput.items() if rate > 0})
        for job in problem.jobs
    )
    return dataclasses.replace(problem, jobs=jobs)


def priced_by_real_types(problem: Problem, allocation: Allocation) -> Allocation:
    """The same fractions with the throughput and the levels that the real types give."""
    import time

    import numpy as np

    from ballast_policies.allocation.result import as_allocation

    X = np.array([[allocation.allocation[job.name][g] for g in problem.gpu_types] for job in problem.jobs])
    real = as_allocation(
        problem,
        X,
        policy=allocation.policy,
        objective=allocation.objective,
        status=allocation.status,
        gap=allocation.gap,
        solver=allocation.solver,
        started=time.perf_counter(),
    )
    return dataclasses.replace(real, solve_seconds=allocation.solve_seconds)
