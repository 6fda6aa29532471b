"""The table of policies: every name that ``ClusterPolicy.spec.objective`` and ``ballast allocate`` know."""

import dataclasses
import time
from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.answer import Answer, as_allocation, relative_gap
from ballast_policies.allocation.heterogeneity_agnostic import spread, type_blind
from ballast_policies.allocation.instance import Instance, instance
from ballast_policies.allocation.policies import (
    allox,
    fifo,
    finish_time_fairness,
    gandiva,
    hierarchical,
    isolated,
    makespan,
    max_min_fairness,
    max_throughput,
    max_throughput_per_dollar,
    min_cost,
    min_cost_slo,
    proportional,
    shortest_job_first,
    strategy_proof,
    water_filling,
)
from ballast_policies.allocation.problem import Allocation, Problem, ProblemError
from ballast_policies.allocation.start import Start


@dataclasses.dataclass(frozen=True, slots=True)
class Policy:
    """A policy: how it divides the GPUs, and the value of its objective at any shares.

    Attributes:
        solve: instance -> answer; those that ``starts`` also take a ``Start`` or None.
        objective: (instance, x) -> value, in the unit that the policy's file states.
        always_shares: it lives by sharing GPUs, asked to or not.
        never_shares: sharing is not defined for it; pairs are left out.
        spreads: its baseline divides each job's time over the types as the cluster is made up
            (``type_blind``); the others' serve whole jobs, each on whatever type.
        starts: its large instances can be solved from the prices of a similar one.
    """

    solve: Callable[..., Answer]
    objective: Callable[[Instance, np.ndarray], float]
    always_shares: bool = False
    never_shares: bool = False
    spreads: bool = False
    starts: bool = False


POLICIES: dict[str, Policy] = {
    "max-min-fairness": Policy(max_min_fairness.solve, max_min_fairness.objective, spreads=True, starts=True),
    "water-filling": Policy(water_filling.solve, water_filling.objective, spreads=True),
    "hierarchical": Policy(hierarchical.solve, hierarchical.objective, spreads=True),
    "finish-time-fairness": Policy(
        finish_time_fairness.solve, finish_time_fairness.objective, spreads=True, starts=True
    ),
    "makespan": Policy(makespan.solve, makespan.objective, spreads=True, starts=True),
    "fifo": Policy(fifo.solve, fifo.objective),
    "shortest-job-first": Policy(shortest_job_first.solve, shortest_job_first.objective),
    "max-throughput": Policy(max_throughput.solve, max_throughput.objective),
    "max-throughput-per-dollar": Policy(max_throughput_per_dollar.solve, max_throughput_per_dollar.objective),
    "min-cost": Policy(min_cost.solve, min_cost.objective, never_shares=True),
    "min-cost-slo": Policy(min_cost_slo.solve, min_cost_slo.objective, never_shares=True),
    "allox": Policy(allox.solve, allox.objective, never_shares=True),
    "gandiva": Policy(gandiva.solve, gandiva.objective, always_shares=True),
    "isolated": Policy(isolated.solve, isolated.objective, never_shares=True),
    "proportional": Policy(proportional.solve, proportional.objective, never_shares=True),
    "strategy-proof": Policy(strategy_proof.solve, strategy_proof.objective, never_shares=True),
}

POLICY_NAMES: tuple[str, ...] = tuple(POLICIES)


def allocate(
    policy: str,
    problem: Problem,
    *,
    agnostic: bool = False,
    space_sharing: bool = False,
    warm: Allocation | None = None,
) -> Allocation:
    """Solve ``problem`` by the named policy.

    Args:
        policy: one of :data:`POLICY_NAMES`.
        problem: jobs over GPU types.
        agnostic: the type-blind baseline: the policy takes every GPU that a job may use for as fast as
            the job's fastest one. The answer's throughput, levels and objective are the real ones,
            its gap is that of the blind optimum.
        space_sharing: let the pairs of the problem share GPUs, where the policy defines it.
        warm: the same policy's allocation of a similar problem, e.g. from before the last arrival. With
            thousands of jobs the answer is there many times sooner, and as exact; else it is not used.

    Raises:
        ProblemError: the policy is unknown, or the problem lacks what it needs.
        SolverError: the solver failed.
    """
    started = time.perf_counter()
    sharing = policy in POLICIES and (POLICIES[policy].always_shares or space_sharing)
    real = instance(problem, space_sharing=sharing and not POLICIES[policy].never_shares)
    answer = solve(policy, real, agnostic=agnostic, start=warm.start if warm is not None else None)
    assert answer.objective is not None
    return as_allocation(
        real,
        answer,
        policy=policy,
        objective=answer.objective,
        gap=answer.gap,
        seconds=time.perf_counter() - started,
    )


def solve(policy: str, real: Instance, *, agnostic: bool = False, start: Start | None = None) -> Answer:
    """As :func:`allocate`, from arrays to arrays (``instance.from_arrays``): for thousands of jobs at a time.

    Pairs are used if the instance has them. The answer's x has an entry for each of ``real.columns``
    (``real.alone(x)`` is the matrix jobs x types); its objective and gap are filled in.
    ``start``: of the answer to a similar instance with as many types.

    Raises:
        ProblemError: the policy is unknown, or the problem lacks what it needs.
        SolverError: the solver failed.
    """
    if policy not in POLICIES:
        raise ProblemError(f"policy: {policy!r} is not one of {', '.join(POLICY_NAMES)}")
    chosen = POLICIES[policy]
    seen = type_blind(real) if agnostic else real
    fits = start is not None and chosen.starts and len(start.prices) == len(real.capacity)
    answer = chosen.solve(seen, start) if fits else chosen.solve(seen)
    if agnostic and chosen.spreads:
        answer = dataclasses.replace(answer, x=spread(seen, answer.x))
    gap = answer.gap
    if gap is None and answer.bound is not None:
        gap = relative_gap(chosen.objective(seen, answer.x), answer.bound)
    value = chosen.objective(real, answer.x) if answer.value is None else answer.value(real)
    return dataclasses.replace(answer, objective=value, gap=gap)
