"""Strategy-proof shares: proportional fairness, reduced by a part for every job.

The partial allocation mechanism (Cole, Gkatzelis, Goel: Mechanism design for fair division, EC 2013), the
form of the variant that the dissertation leaves to future work (section 5.4.4). First

    X* = argmax_X  sum_m w_m log throughput(m, X)      within time and capacity (5.1)-(5.3);

then job m keeps the part f_m of its row of X*:

    f_m = prod_{i != m} ( throughput(i, X*) / throughput(i, X*_{-m}) )^(w_i / w_m),

X*_{-m} being the optimum without m: m pays for the speed it takes from the others. The result of m
is then prod_i throughput(i, X)^(w_i/w_m) over a constant that its own report does not enter, and X*
maximises that if it reports its throughputs truly. (The proof needs that throughput scales
with a row, and that the limits do not depend on the reports; so pairs are left out, and
gpus_m and w_m are taken as known.) Without weights every job keeps at least 1/e of X*.

Up to ``EXACT`` jobs that is n + 1 convex programs, by Clarabel, and the gap is that of X*, proven by the
prices of its capacities (``nash``): the part by which the weighted geometric mean of the speeds could still
grow. With more jobs X* comes from prices (``nash_prices``), which also stand in for the programs without
m: with p the prices of X*, the others cannot gain more from m's GPUs than these are worth, so

    f_m >= exp( - sum_j gpus_m p_j X*_mj / w_m )  >= 1/e,

and m keeps this lower bound. The gap is then the largest part by which a job might keep more under the
mechanism (up to 1 - 1/e), or that of X* if it is larger.
Objective: the weighted geometric mean of the levels (gpus x throughput / throughput of the equal share).
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.answer import Answer, nothing
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers.nash import NashShares, gap_per_weight, nash_shares
from ballast_policies.allocation.solvers.nash_prices import nash_shares_by_prices

EXACT = 200
"""Jobs up to which every program without one of them is solved."""


def solve(instance: Instance) -> Answer:
    """Proportionally fair shares, each row scaled by the part that its job keeps.

    Raises:
        SolverError: a convex program was not solved.
    """
    runs = np.flatnonzero(instance.runnable)
    if not len(runs):
        return nothing(instance)
    if len(runs) > EXACT:
        elastic = instance.elastic.any()
        return _by_prices(instance, nash_shares(instance) if elastic else nash_shares_by_prices(instance))
    columns, weights = instance.columns, instance.weights
    found = nash_shares(instance)
    x = found.x
    speed = instance.throughput(x)
    kept = np.ones(len(weights))
    for m in runs if len(runs) > 1 else ():
        without = dataclasses.replace(instance, columns=columns.take(columns.first != m))
        theirs = without.throughput(nash_shares(without).x)
        others = runs[runs != m]
        loss = weights[others] @ np.log(speed[others] / theirs[others])
        kept[m] = min(1.0, float(np.exp(loss / weights[m])))
    return Answer(
        x=x * kept[columns.first],
        solver="Clarabel",
        gap=gap_per_weight(instance, found),
    )


def _by_prices(instance: Instance, found: NashShares) -> Answer:
    """Each row scaled by the least that the mechanism lets its job keep."""
    columns, n = instance.columns, len(instance.gpus)
    worth = columns.cost(found.prices) * found.x
    spent = np.bincount(columns.first, weights=worth, minlength=n) / instance.weights
    kept = np.exp(-np.minimum(spent, 1.0))
    return Answer(
        x=found.x * kept[columns.first],
        solver="prices",
        gap=max(gap_per_weight(instance, found), float(1.0 - kept.min())),
    )


def objective(instance: Instance, x: np.ndarray) -> float:
    """Weighted geometric mean of the levels; 0 where a job that could run gets nothing."""
    runs = instance.runnable
    levels = (instance.level_scale * instance.throughput(x))[runs]
    if not len(levels) or not (levels > 0).all():
        return 0.0
    weights = instance.weights[runs]
    return float(np.exp(weights @ np.log(levels) / weights.sum()))
