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

Up to ``methods.EXACT_PARTS`` programs times columns all are solved, one for each kind of job (like jobs keep
the same part), by Clarabel, and the gap is that of X*, proven by the prices of its capacities (``nash``): the
part by which the weighted geometric mean of the speeds could still grow. With more, the prices p of X* stand
in for the programs without m: the others cannot gain more from m's GPUs than these are worth, so

    f_m >= exp( - sum_j gpus_m p_j X*_mj / w_m )  >= 1/e,

and m keeps this lower bound. The gap is then the largest part by which a job might keep more under the
mechanism (up to 1 - 1/e), or that of X* if it is larger.
Objective: the weighted geometric mean of the levels (gpus x throughput / throughput of the equal share).
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.columns import Columns
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policy import Answer, nothing
from ballast_policies.allocation.solvers.dense_program import equal_rows
from ballast_policies.allocation.solvers.methods import FAIR_PRICES, LEAST_PART, Size, Task, choose
from ballast_policies.allocation.solvers.nash import (
    NashShares,
    gap_per_weight,
    nash_shares,
    nash_shares_by_prices,
)


def solve(instance: Instance) -> Answer:
    """Proportionally fair shares, each row scaled by the part that its job keeps.

    Raises:
        SolverError: a convex program was not solved.
    """
    if not instance.runnable.any():
        return nothing(instance)
    kinds = _kinds(instance)
    runs = np.flatnonzero(instance.runnable[kinds.chosen])
    size = Size(rows=len(runs), columns=len(runs) * len(kinds.columns))
    if choose(Task.PARTS, size) is LEAST_PART:
        return _by_prices(instance, _fair_shares(instance, kinds))
    found = kinds.nash(kinds.many)
    kept = np.ones(len(kinds.chosen))
    for kind in runs:
        left = kinds.many.copy()
        left[kind] -= 1
        others = runs[left[runs] > 0]
        if len(others):
            theirs = kinds.speed(kinds.nash(left))
            with np.errstate(divide="ignore", invalid="ignore"):
                loss = (left * kinds.weights)[others] @ np.log(kinds.speed(found)[others] / theirs[others])
            # Within what duality proves; the error of a sum over weights of millions may be much more, and
            # beside these a speed may be 0.
            kept[kind] = np.exp(np.clip(np.nan_to_num(loss / kinds.weights[kind], nan=-1.0), -1.0, 0.0))
    fair = kinds.spread(found)
    return Answer(
        x=fair.x * kept[kinds.of][instance.columns.first],
        solver="Clarabel",
        gap=gap_per_weight(instance, fair),
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Kinds:
    """Jobs that are alike in speeds, gang and weight; they have the same fair share, and keep the same part.

    Attributes:
        of: (n,) kind of each.
        chosen: (kinds,) a job of each.
        many: (kinds,) how many there are.
    """

    instance: Instance
    of: np.ndarray
    chosen: np.ndarray
    many: np.ndarray

    @property
    def columns(self) -> Columns:
        """Columns of the chosen jobs."""
        of_chosen = np.zeros(len(self.of), dtype=bool)
        of_chosen[self.chosen] = True
        columns = self.instance.columns
        return columns.take(of_chosen[columns.first])

    @property
    def weights(self) -> np.ndarray:
        """(kinds,) of one job."""
        weights: np.ndarray = self.instance.weights[self.chosen]
        return weights

    def nash(self, many: np.ndarray) -> NashShares:
        """Fair shares of one job of each kind, over ``columns``; there are ``many`` (kinds,) of them."""
        columns = self.columns
        here = many[self.of[columns.first]]
        merged = dataclasses.replace(
            self.instance,
            columns=columns.take(here > 0).scaled(here[here > 0]),
            weights=self.instance.weights * many[self.of],
        )
        found = nash_shares(merged)
        x = np.zeros(len(columns))
        x[here > 0] = found.x
        return dataclasses.replace(found, x=x)

    def speed(self, shares: NashShares) -> np.ndarray:
        """(kinds,) steps/s of a job of each kind."""
        columns = self.columns
        speed = columns.rate_first * shares.x
        return np.bincount(self.of[columns.first], weights=speed, minlength=len(self.chosen))

    def spread(self, shares: NashShares) -> NashShares:
        """Shares of all jobs."""
        one, every = self.columns, self.instance.columns
        X = np.zeros((len(self.chosen), int(every.place.max(initial=0)) + 1))
        X[self.of[one.first], one.place] = shares.x
        x = self.instance.feasible(X[self.of[every.first], every.place])
        return dataclasses.replace(shares, x=x)


def _kinds(instance: Instance) -> _Kinds:
    of = chosen = np.arange(len(instance.gpus))
    if not instance.elastic.any():
        features = [instance.T, instance.gpus[:, None], instance.weights[:, None]]
        of, chosen = equal_rows(np.concatenate(features, axis=1))
    many = np.bincount(of, minlength=len(chosen)).astype(float)
    return _Kinds(instance=instance, of=of, chosen=chosen, many=many)


def _fair_shares(instance: Instance, kinds: _Kinds) -> NashShares:
    size = Size(rows=len(kinds.chosen), elastic=bool(instance.elastic.any()))
    if choose(Task.FAIR_SHARES, size) is FAIR_PRICES:
        return nash_shares_by_prices(instance)
    return kinds.spread(kinds.nash(kinds.many))


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
