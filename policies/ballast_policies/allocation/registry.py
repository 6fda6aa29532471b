"""The table of policies, and the solution of a problem by a named policy.

Beside it stand the fallback where a solver fails or runs out of time (:func:`greedy`), and the
heterogeneity-agnostic baselines. A scheduler that ignores GPU types takes each type for as fast as the job's
fastest one. Then only a job's total time matters to it, and which types make it up is a tie in all of its
objectives. The tie is resolved without knowledge of the types, too: time is spread over them as the cluster
is made up, as far as capacities and the types a job cannot use allow.
"""

import dataclasses
import time

import numpy as np

from ballast_policies.allocation.columns import sums
from ballast_policies.allocation.custom import named_policy
from ballast_policies.allocation.instance import Instance, instance
from ballast_policies.allocation.policies import (
    allox,
    completion_time,
    fifo,
    finish_time_fairness,
    gandiva,
    hierarchical,
    isolated,
    makespan,
    max_min_fairness,
    max_throughput,
    proportional,
    shortest_job_first,
    strategy_proof,
    water_filling,
)
from ballast_policies.allocation.policies.cost import (
    fairness_per_dollar,
    makespan_within_budget,
    max_throughput_per_dollar,
    min_cost,
    min_cost_slo,
)
from ballast_policies.allocation.policies.max_min_fairness import objective
from ballast_policies.allocation.policy import (
    Answer,
    Policy,
    Reads,
    SpaceSharing,
    Surplus,
    as_allocation,
    relative_gap,
)
from ballast_policies.allocation.problem import Allocation, Problem, ProblemError
from ballast_policies.allocation.solvers.methods import fallbacks_listed
from ballast_policies.registry import Registry

FITTING_ROUNDS = 200


def agnostic_view(real: Instance) -> Instance:
    """The instance as the heterogeneity-agnostic scheduler sees it; columns stay in place.

    Pairs keep the slowdown by sharing of each of the two on that type, relative to running alone.
    """
    fastest, columns = real.fastest, real.columns
    T = np.where(real.T > 0, fastest[:, None], 0.0)
    total = real.capacity.sum()

    def agnostic(rate: np.ndarray, job: np.ndarray) -> np.ndarray:
        alone = real.T[job, columns.kind]
        relative: np.ndarray = np.divide(rate, alone, out=np.zeros_like(rate), where=alone > 0) * fastest[job]
        return relative

    return dataclasses.replace(
        real,
        T=T,
        equal=T @ (real.capacity / total) if total > 0 else np.zeros(len(T)),
        columns=dataclasses.replace(
            columns,
            rate_first=agnostic(columns.rate_first, columns.first),
            rate_second=agnostic(columns.rate_second, columns.second),
        ),
    )


def spread_over_types(instance: Instance, x: np.ndarray) -> np.ndarray:
    """``x`` with each job's time alone spread over its types in proportion to their GPUs, where that fits.

    Iterative proportional fitting to each job's time and each type's limit; the violation that remains
    after the last round is removed by mixing with ``x``, which is feasible. Each job's total time
    alone and all pairs are unchanged.
    """
    columns, capacity = instance.columns, instance.capacity
    alone = columns.second < 0
    time = sums(columns.first[alone], weights=x[alone], n=len(instance.gpus))
    shared = np.where(alone, 0.0, x)
    limit = np.maximum(capacity - instance.gpus_used(shared), 0.0)
    X = np.where(instance.T > 0, capacity, 0.0)
    total = X.sum(axis=1, keepdims=True)
    X = np.divide(X, total, out=np.zeros_like(X), where=total > 0) * time[:, None]
    for _ in range(FITTING_ROUNDS):
        used = instance.gpus @ X
        if (used <= limit * (1 + 1e-12)).all():
            break
        X = X * np.minimum(1.0, np.divide(limit, used, out=np.ones_like(used), where=used > 0))
        kept = X.sum(axis=1)
        X = X * np.divide(time, kept, out=np.zeros_like(time), where=kept > 0)[:, None]
    even = np.where(alone, X[columns.first, columns.kind], 0.0) + shared
    return mix(instance, even, x)


def mix(instance: Instance, wanted: np.ndarray, feasible: np.ndarray) -> np.ndarray:
    """Allocation with as much of ``wanted`` as the capacities allow, the rest from ``feasible``."""
    over, held = instance.gpus_used(wanted), instance.gpus_used(feasible)
    excess = over - instance.capacity
    tight = (excess > 0) & (over > held)
    part = ((instance.capacity - held)[tight] / (over - held)[tight]).min() if tight.any() else 1.0
    part = float(np.clip(part, 0.0, 1.0))
    return instance.feasible(part * wanted + (1 - part) * feasible)


def greedy(problem: Problem) -> Allocation:
    """A feasible allocation by one pass over the jobs and their types or configurations."""
    started = time.perf_counter()
    posed = instance(problem)
    left, columns = posed.capacity.copy(), posed.columns
    demand = posed.gpus.sum()
    # Under contention no job takes more than the equal share of time, so that the last job gets something.
    share = min(1.0, left.sum() / demand) if demand else 1.0
    x = np.zeros(len(columns))
    column, kind, gpus = columns.entries()
    by_column = np.argsort(column, kind="stable")
    kind, gpus = kind[by_column], gpus[by_column]
    begin = np.searchsorted(column[by_column], np.arange(len(columns) + 1))
    # Each job's columns, the fastest first.
    ranked = np.lexsort((-columns.rate_first, columns.first))
    of_job = np.searchsorted(columns.first[ranked], np.arange(len(problem.jobs) + 1))
    order = sorted(
        range(len(problem.jobs)),
        key=lambda m: (-problem.jobs[m].weight / posed.gpus[m], problem.jobs[m].name),
    )
    for m in order:
        budget = share
        for c in ranked[of_job[m] : of_job[m + 1]]:
            taken = slice(begin[c], begin[c + 1])
            fraction = min(budget, float((left[kind[taken]] / gpus[taken]).min()))
            x[c] = fraction
            left[kind[taken]] -= fraction * gpus[taken]
            budget -= fraction
    x = posed.feasible(x)
    return as_allocation(
        posed,
        Answer(x=x, solver="greedy", status="greedy"),
        policy="greedy",
        objective=objective(posed, x),
        gap=None,
        seconds=time.perf_counter() - started,
    )


POLICIES = Registry(
    "policy",
    group="ballast.policies",
    row_type=Policy,
    rows={
        "max-min-fairness": Policy(
            summary="maximise the least level (5.4.1; heterogeneity-aware LAS)",
            solve=max_min_fairness.solve,
            objective=max_min_fairness.objective,
            reads=frozenset({Reads.WEIGHTS}),
            spreads_when_agnostic=True,
            takes_configurations=True,
        ),
        "water-filling": Policy(
            summary="the least level, then the next least, and so on (5.4.3)",
            solve=water_filling.solve,
            objective=water_filling.objective,
            reads=frozenset({Reads.WEIGHTS}),
            spreads_when_agnostic=True,
            takes_configurations=True,
        ),
        "hierarchical": Policy(
            summary="the same over teams: weights between them, `fairness` or `fifo` inside, teams in teams "
            "(5.4.3)",
            solve=hierarchical.solve,
            objective=hierarchical.objective,
            reads=frozenset({Reads.WEIGHTS, Reads.TEAMS, Reads.ARRIVAL_ORDER}),
            spreads_when_agnostic=True,
            takes_configurations=True,
        ),
        "finish-time-fairness": Policy(
            summary="minimise the largest `rho_m = (elapsed_m + steps_m / throughput(m, X)) / "
            "(isolated_m + steps_m / throughput(m, X_isolated))` (5.4.2, Themis)",
            solve=finish_time_fairness.solve,
            objective=finish_time_fairness.objective,
            reads=frozenset({Reads.WEIGHTS, Reads.STEPS, Reads.ELAPSED, Reads.ISOLATED_ELAPSED}),
            compares_speeds=True,
            spreads_when_agnostic=True,
            takes_configurations=True,
            surplus=Surplus.FINISH_TIME,
        ),
        "makespan": Policy(
            summary="minimise the largest `steps_m / throughput(m, X)` (5.4.2)",
            solve=makespan.solve,
            objective=makespan.objective,
            reads=frozenset({Reads.STEPS}),
            compares_speeds=True,
            spreads_when_agnostic=True,
            takes_configurations=True,
            surplus=Surplus.LONGEST,
        ),
        "fifo": Policy(
            summary="maximise `sum_m g_m (M - m) throughput(m, X) / fastest_m`, jobs counted in order of "
            "arrival (5.4.2)",
            solve=fifo.solve,
            objective=fifo.objective,
            reads=frozenset({Reads.ARRIVAL_ORDER}),
            takes_configurations=True,
            surplus=Surplus.ARRIVAL,
        ),
        "shortest-job-first": Policy(
            summary="finish the shortest job soonest (5.4.2), then the others in order of length",
            solve=shortest_job_first.solve,
            objective=shortest_job_first.objective,
            reads=frozenset({Reads.STEPS}),
            compares_speeds=True,
            takes_configurations=True,
            surplus=Surplus.SHORTEST,
        ),
        "completion-time": Policy(
            summary="least average completion time: whole jobs, sizes of elastic ones by what "
            "progress is worth (heSRPT, 2020)",
            solve=completion_time.solve,
            objective=completion_time.objective,
            reads=frozenset({Reads.WEIGHTS, Reads.STEPS}),
            compares_speeds=True,
            space_sharing=SpaceSharing.NEVER,
            proves_gap=False,
            takes_configurations=True,
            surplus=Surplus.COMPLETION_TIME,
        ),
        "max-throughput": Policy(
            summary="maximise `sum_m throughput(m, X)` (5.3.1)",
            solve=max_throughput.solve,
            objective=max_throughput.objective,
            compares_speeds=True,
            takes_configurations=True,
            surplus=Surplus.THROUGHPUT,
        ),
        "max-throughput-per-dollar": Policy(
            summary="maximise `sum T[m, j] X[m, j] / (g_m price_j)` (Gavel's linear form of 6.4.2)",
            solve=max_throughput_per_dollar.solve,
            objective=max_throughput_per_dollar.objective,
            reads=frozenset({Reads.PRICES}),
            compares_speeds=True,
            takes_configurations=True,
            surplus=Surplus.COST,
        ),
        "min-cost": Policy(
            summary="maximise `sum_m throughput(m, X) / cost(m, X)` (6.4.2): each job on its cheapest types, "
            "shared fairly",
            solve=min_cost.solve,
            objective=min_cost.objective,
            reads=frozenset({Reads.WEIGHTS, Reads.PRICES}),
            space_sharing=SpaceSharing.NEVER,
            takes_configurations=True,
            surplus=Surplus.COST,
        ),
        "min-cost-slo": Policy(
            summary="least cost that keeps all deadlines that can be kept (6.4.3); the others are named, and "
            "run as by `min-cost`",
            solve=min_cost_slo.solve,
            objective=min_cost_slo.objective,
            reads=frozenset({Reads.WEIGHTS, Reads.PRICES, Reads.DEADLINES, Reads.STEPS}),
            names_unmet_deadlines=True,
            compares_speeds=True,
            space_sharing=SpaceSharing.NEVER,
            takes_configurations=True,
            surplus=Surplus.COST,
        ),
        "makespan-within-budget": Policy(
            summary="minimise the largest `steps_m / throughput(m, X)` at a cost of at most `budget`, of "
            "each job and of all (6.4.3)",
            solve=makespan_within_budget.solve,
            objective=makespan.objective,
            reads=frozenset({Reads.PRICES, Reads.STEPS, Reads.BUDGETS}),
            compares_speeds=True,
            space_sharing=SpaceSharing.NEVER,
            takes_configurations=True,
            surplus=Surplus.COST,
        ),
        "max-min-fairness-per-dollar": Policy(
            summary="maximise the least `throughput(m, X) cost_m / w_m`, cost_m the USD of a step on the "
            "job's cheapest GPUs: the value in dollars of what each job gets",
            solve=fairness_per_dollar.solve,
            objective=fairness_per_dollar.objective,
            reads=frozenset({Reads.WEIGHTS, Reads.PRICES}),
            space_sharing=SpaceSharing.NEVER,
            takes_configurations=True,
        ),
        "allox": Policy(
            summary="least average completion time of whole jobs, as an assignment (AlloX, EuroSys 2020); "
            "exact for gangs of 1",
            solve=allox.solve,
            objective=allox.objective,
            reads=frozenset({Reads.STEPS}),
            compares_speeds=True,
            space_sharing=SpaceSharing.NEVER,
            proves_gap=False,
            surplus=Surplus.SHORTEST,
            imports=("scipy.optimize",),
        ),
        "gandiva": Policy(
            summary="random pairs that pay stay together, equal time for all (OSDI 2018): a baseline, "
            "nothing is optimised",
            solve=gandiva.solve,
            objective=gandiva.objective,
            space_sharing=SpaceSharing.ALWAYS,
            proves_gap=False,
        ),
        "isolated": Policy(
            summary="each its part of every type, by weight: the baseline of sharing incentive",
            solve=isolated.solve,
            objective=isolated.objective,
            reads=frozenset({Reads.WEIGHTS}),
            space_sharing=SpaceSharing.NEVER,
            proves_gap=False,
            takes_configurations=True,
        ),
        "proportional": Policy(
            summary="equal share, scaled to fit",
            solve=proportional.solve,
            objective=proportional.objective,
            space_sharing=SpaceSharing.NEVER,
            proves_gap=False,
        ),
        "strategy-proof": Policy(
            summary="maximise `sum_m w_m log throughput(m, X)`, of which each job gives up the part that "
            "it takes from the others (partial allocation, EC 2013; 5.4.4)",
            solve=strategy_proof.solve,
            objective=strategy_proof.objective,
            reads=frozenset({Reads.WEIGHTS}),
            space_sharing=SpaceSharing.NEVER,
            takes_configurations=True,
            imports=("scipy.sparse",),
        ),
    },
)
"""Every policy by its name; ``ClusterPolicy.spec.objective`` and the command lines take these."""

DEFAULT_POLICY = next(iter(POLICIES.builtin))
"""The policy of a ClusterPolicy that names none."""


def find_policy(name: str) -> Policy:
    """The row of ``name``, which may also be ``module:function``: then nothing is imported yet.

    Raises:
        ProblemError: it is unknown, or the distribution that registers it is broken.
    """
    if ":" in name:
        return named_policy(name)
    return POLICIES.find(name, ProblemError)


def check_shares(policy: str) -> None:
    """Refuse to ask a policy for pairs on the same GPUs that makes none.

    Raises:
        ProblemError: it makes none, or is unknown.
    """
    if find_policy(policy).space_sharing is SpaceSharing.NEVER:
        able = ", ".join(
            n for n, row in POLICIES.builtin.items() if row.space_sharing is not SpaceSharing.NEVER
        )
        raise ProblemError(
            f"space_sharing: {policy} puts no two jobs on the same GPUs. To fix: leave it out, or choose one "
            f"of {able}"
        )


def imports_of(policy: str, problem: Problem) -> frozenset[str]:
    """Large modules that the first such allocation imports. This imports none of these, nor any policy."""
    row = POLICIES.builtin.get(policy)
    if row is None:
        return frozenset({"cvxpy"})
    of_several_types = any(len(each.gpus) > 1 for job in problem.jobs for each in job.configurations)
    return frozenset(row.imports) | ({"scipy.sparse"} if of_several_types else frozenset())


def allocate(
    policy: str,
    problem: Problem,
    *,
    agnostic: bool = False,
    space_sharing: bool = False,
) -> Allocation:
    """Solve ``problem`` by the named policy.

    Args:
        policy: one of :data:`POLICIES`, or ``module:function``.
        problem: jobs over GPU types.
        agnostic: the heterogeneity-agnostic baseline: every GPU that a job may use counts as fast as
            the job's fastest one. The answer's throughput, levels and objective are the real ones,
            its gap is that of the agnostic optimum.
        space_sharing: let the pairs of the problem share GPUs, where the policy defines it.

    Raises:
        ProblemError: the policy is unknown, or the problem lacks an input that it needs.
        SolverError: the solver failed.
    """
    started = time.perf_counter()
    defined = find_policy(policy).space_sharing
    shares = defined is SpaceSharing.ALWAYS or (space_sharing and defined is SpaceSharing.ALLOWED)
    real = instance(problem, space_sharing=shares)
    answer = solve(policy, real, agnostic=agnostic)
    assert answer.objective is not None
    return as_allocation(
        real,
        answer,
        policy=policy,
        objective=answer.objective,
        gap=answer.gap,
        seconds=time.perf_counter() - started,
    )


def _check_configurations(policy: str, chosen: Policy, real: Instance, agnostic: bool) -> None:
    """Refuse jobs with configurations where the policy or its baseline is for gangs of one size."""
    if not real.elastic.any():
        return
    job = f"jobs[{real.names[int(real.elastic.argmax())]}].configurations"
    change = "To fix: give the job throughput and gpus, or "
    if agnostic:
        raise ProblemError(
            f"{job}: the heterogeneity-agnostic baseline is for gangs of one size. {change}leave agnostic out"
        )
    if not chosen.takes_configurations:
        able = ", ".join(name for name, row in POLICIES.builtin.items() if row.takes_configurations)
        raise ProblemError(f"{job}: {policy} places gangs of one size only. {change}choose one of {able}")


def solve(policy: str, real: Instance, *, agnostic: bool = False) -> Answer:
    """Answer as of :func:`allocate`, from arrays to arrays (``instance.from_arrays``): for thousands of jobs.

    Pairs are used if the instance has them. The answer's x has an entry for each of ``real.columns``
    (``real.alone(x)`` is the matrix jobs x types); its objective and gap are filled in. Errors are the same.
    """
    chosen = find_policy(policy)
    _check_configurations(policy, chosen, real, agnostic)
    seen = agnostic_view(real) if agnostic else real
    with fallbacks_listed() as fallbacks:
        answer = chosen.solve(seen)
    if agnostic and chosen.spreads_when_agnostic:
        answer = dataclasses.replace(answer, x=spread_over_types(seen, answer.x))
    gap = answer.gap
    if gap is None and answer.bound is not None:
        gap = relative_gap(chosen.objective(seen, answer.x), answer.bound)
    value = chosen.objective(real, answer.x) if answer.value is None else answer.value(real)
    return dataclasses.replace(answer, objective=value, gap=gap, fallbacks=tuple(fallbacks))
