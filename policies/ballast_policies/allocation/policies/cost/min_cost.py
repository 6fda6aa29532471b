"""Minimise total cost (dissertation section 6.4.2).

    maximise_X  sum_m  throughput(m, X) / cost(m, X),     cost(m, X) = sum_j gpus_m c_j X_mj

c_j is the price of one GPU of type j. A job's ratio does not change when its whole row of X is scaled,
and rows meet only in the capacities; so the exact optimum is known: every job runs on nothing but the
types where its steps are cheapest, for however little time. (The sum of ratios is not a
linear-fractional program; maximising one total ratio instead would run a single job.)

Ties: the objective leaves open how much time each job gets there, so the time is shared by water filling
on those types, with levels as in ``max_min_fairness``. Where jobs have one cheapest type each, which is
the rule, that is a closed form for each type: x_m = min(1, t / slope_m) with the t that uses all of its
GPUs. Objective: USD to finish all remaining steps, each at the cost per step of the job's shares.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.instance import Instance, from_arrays
from ballast_policies.allocation.policies import water_filling
from ballast_policies.allocation.policy import Answer, nothing

SAME_COST = 1e-9
"""Relative difference of cost per step up to which two types are equally cheap."""


def usd_per_step(instance: Instance) -> np.ndarray:
    """(columns,) USD per step of a job alone on each column."""
    per_step: np.ndarray = instance.columns.spending(instance.prices()) / 3600.0 / instance.columns.rate_first
    return per_step


def cheapest(instance: Instance) -> np.ndarray:
    """(n,) USD per step on the cheapest type or configuration; infinite where the job cannot run."""
    least = np.full(len(instance.gpus), np.inf)
    np.minimum.at(least, instance.columns.first, usd_per_step(instance))
    return least


def on_cheapest_types(instance: Instance, allowed: np.ndarray | None = None) -> np.ndarray:
    """(columns,) x: water filling on each job's cheapest types, for the jobs ``allowed`` (n,).

    Raises:
        SolverError: several types are equally cheap for some jobs, and a linear program over these failed.
    """
    columns, least = instance.columns, cheapest(instance)
    kept = (columns.second < 0) & (usd_per_step(instance) <= least[columns.first] * (1 + SAME_COST))
    if allowed is not None:
        kept &= allowed[columns.first]
    # A job whose cheapest types have no GPU left waits.
    kept &= ~columns.use(instance.capacity <= 0)
    choices = np.bincount(columns.first[kept], minlength=len(least))
    linked = _linked_types(instance, kept & (choices[columns.first] > 1), kept)
    x = np.zeros(len(columns))
    together = kept & columns.use(linked)
    alone = kept & ~together
    x[alone] = _filled_type_by_type(instance, np.flatnonzero(alone))
    if together.any():
        x[together] = _filled_together(instance, together)
    return x


def _linked_types(instance: Instance, tied: np.ndarray, kept: np.ndarray) -> np.ndarray:
    """(k,) whether a job has this type and another as its cheapest: ``tied`` or mixed columns."""
    linked = np.zeros(len(instance.capacity), dtype=bool)
    column, kind, _ = instance.columns.entries()
    mixed = np.bincount(column, minlength=len(kept)) > 1
    linked[kind[(tied | (kept & mixed))[column]]] = True
    return linked


def _filled_type_by_type(instance: Instance, chosen: np.ndarray) -> np.ndarray:
    """Shares of the columns ``chosen``, one a job: levels as high as each type's GPUs allow."""
    columns = instance.columns
    job, kind = columns.first[chosen], columns.kind[chosen]
    weight = instance.weights[job]
    # Share at level 1; the job is at full time from level 1 / share on.
    share = weight / (instance.level_scale[job] * columns.rate_first[chosen])
    x = np.zeros(len(chosen))
    for j in np.unique(kind):
        here = np.flatnonzero(kind == j)
        here = here[np.argsort(-share[here], kind="stable")]
        gpus, per_level = columns.gpus[chosen[here]], share[here]
        # With the first i jobs at full time, the others reach level t_i.
        full = np.append(0.0, np.cumsum(gpus)[:-1])
        rising = np.cumsum((gpus * per_level)[::-1])[::-1]
        level = (instance.capacity[j] - full) / rising
        # The first i at which the next job is not at full time yet; all at full time where there is none.
        stop = np.flatnonzero(level * per_level < 1.0)
        x[here] = 1.0
        if len(stop):
            x[here[stop[0] :]] = level[stop[0]] * per_level[stop[0] :]
    return x


def _filled_together(instance: Instance, chosen: np.ndarray) -> np.ndarray:
    """Shares of the columns ``chosen`` (columns,) by water filling over all of them."""
    columns = instance.columns.take(chosen)
    T = np.zeros_like(instance.T)
    gang = ~instance.elastic[columns.first]
    T[columns.first[gang], columns.kind[gang]] = columns.rate_first[gang]
    jobs = np.unique(columns.first)
    row = np.full(len(T), -1)
    row[jobs] = np.arange(len(jobs))
    some = dataclasses.replace(
        from_arrays(
            gpu_types=instance.gpu_types,
            capacity=instance.capacity,
            throughput=T[jobs],
            gpus=instance.gpus[jobs],
        ),
        weights=instance.weights[jobs],
        # A gang may have a part of its time on GPUs that others leave it, fewer than its own.
        T=T[jobs],
        equal=instance.equal[jobs],
        elastic=instance.elastic[jobs],
        level_at_equal=instance.level_at_equal[jobs],
        columns=dataclasses.replace(columns, first=row[columns.first]),
    )
    return water_filling.solve(some).x


def solve(instance: Instance) -> Answer:
    """Water filling on each job's cheapest types. Raises SolverError: as in :func:`on_cheapest_types`."""
    if not instance.runnable.any():
        return nothing(instance)
    x = on_cheapest_types(instance)
    return Answer(x=x, solver="closed form", bound=_usd(instance, cheapest(instance)))


def objective(instance: Instance, x: np.ndarray) -> float:
    """USD to finish all remaining steps at the cost per step of ``x``; jobs without shares at their least."""
    columns, n = instance.columns, len(instance.gpus)
    spent = np.bincount(columns.first, weights=columns.spending(instance.prices()) / 3600.0 * x, minlength=n)
    speed = instance.throughput(x)
    return _usd(instance, np.divide(spent, speed, out=cheapest(instance), where=speed > 0))


def _usd(instance: Instance, per_step: np.ndarray) -> float:
    runs = np.isfinite(per_step)
    return float(instance.steps()[runs] @ per_step[runs])
