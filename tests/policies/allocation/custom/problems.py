"""A small problem with a gang too large for any type, and the functions that policies are made of."""

from typing import Any

import cvxpy as cp
import numpy as np
from ballast_policies.allocation.problem import Job, Problem

PROBLEM = Problem(
    gpu_types=("v100", "p100"),
    capacity={"v100": 4, "p100": 6},
    jobs=(
        Job(name="a", throughput={"v100": 4.0, "p100": 1.0}, gpus=2),
        Job(name="b", throughput={"v100": 3.0, "p100": 2.0}, gpus=4, weight=2.0, entity="vision"),
        Job(name="c", throughput={"p100": 2.0}, deadline=60.0),
        Job(name="too-large", throughput={"v100": 2.0}, gpus=8),
        Job(name="e", throughput={"v100": 5.0, "p100": 2.0}, gpus=2, steps_remaining=500.0),
    ),
    prices={"v100": 2.0},
)


def least_level(cluster: Any) -> Any:
    """Max-min fairness."""
    return cp.Maximize(cp.min(cluster.level))


def least_level_by_a_variable(cluster: Any) -> Any:
    """The same, with a variable of its own."""
    least = cp.Variable()
    return cp.Maximize(least), [cluster.level >= least]


def cheapest(cluster: Any) -> Any:
    """Least cost at half of a level for every job."""
    cost = cp.sum(cp.multiply(cluster.gpus[:, None] * cluster.prices, cluster.shares))
    return cp.Minimize(cost), [cluster.level >= 0.5]


def whole_problem(cluster: Any) -> Any:
    """A cvxpy problem."""
    return cp.Problem(cp.Maximize(cp.sum(cluster.throughput)), [cluster.level >= 0.1])


def nash(cluster: Any) -> Any:
    """Curved: Nash's product."""
    return cp.Maximize(cluster.weights @ cp.log(cluster.throughput))


def whole_jobs(cluster: Any) -> Any:
    """With whole numbers."""
    chosen = cp.Variable(cluster.shares.shape, boolean=True)
    return cp.Maximize(cp.sum(cluster.throughput)), [cluster.shares == chosen]


def even_shares(cluster: Any) -> Any:
    """Shares that the function computes itself."""
    share = min(1.0, cluster.capacity.sum() / cluster.gpus.sum())
    return np.where(cluster.speeds > 0, share * cluster.capacity / cluster.capacity.sum(), 0.0)


def whole_shares(cluster: Any) -> Any:
    """Jobs that are on a type or not."""
    return np.eye(2, dtype=bool)[[0, 1, 1, 0]]


def raises(cluster: Any) -> Any:
    """An error of any kind."""
    raise KeyError("nobody")


def quits(cluster: Any) -> Any:
    """The end of the program."""
    raise SystemExit(3)


def nothing(cluster: Any) -> Any:
    """No return."""


def no_constraint(cluster: Any) -> Any:
    """A text among the constraints."""
    return cp.Maximize(cp.sum(cluster.throughput)), ["fair"]


def no_scalar(cluster: Any) -> Any:
    """An objective for each job."""
    return cp.Maximize(cluster.throughput)


def nan_objective(cluster: Any) -> Any:
    """No number."""
    return cp.Maximize(float("nan") * cp.sum(cluster.throughput))


def infeasible(cluster: Any) -> Any:
    """More than there is."""
    return cp.Maximize(cp.sum(cluster.throughput)), [cluster.throughput >= 1e6]


def unbounded(cluster: Any) -> Any:
    """No largest value."""
    return cp.Maximize(cp.Variable())


def not_convex(cluster: Any) -> Any:
    """Against cvxpy's rules."""
    return cp.Maximize(cp.sum_squares(cluster.throughput))


def with_parameter(cluster: Any) -> Any:
    """A parameter without a value."""
    return cp.Maximize(cp.Parameter() * cp.sum(cluster.throughput))


def wrong_shape(cluster: Any) -> Any:
    """Shares of other jobs."""
    return np.ones((1, 1))


def too_much_time(cluster: Any) -> Any:
    """All of the time on each type."""
    return np.where(cluster.speeds > 0, 1.0, 0.0)


def too_many_gpus(cluster: Any) -> Any:
    """Everybody on the second type."""
    shares = np.zeros(cluster.speeds.shape)
    shares[:, 1] = 1.0
    return shares


def where_it_cannot_run(cluster: Any) -> Any:
    """A share of a type on which the job has no speed."""
    shares = np.zeros(cluster.speeds.shape)
    shares[2, 0] = 0.5
    return shares


def below_zero(cluster: Any) -> Any:
    """Negative shares."""
    return -0.5 * np.ones(cluster.speeds.shape)


def nan_shares(cluster: Any) -> Any:
    """No numbers."""
    return np.full(cluster.speeds.shape, np.nan)


def text_shares(cluster: Any) -> Any:
    """Texts in place of numbers."""
    return np.full(cluster.speeds.shape, "half")


def complex_shares(cluster: Any) -> Any:
    """Numbers whose imaginary part would be lost."""
    return np.full(cluster.speeds.shape, 0.1 + 1j)


def blank_docstring(cluster: Any) -> Any:
    """ """
    return even_shares(cluster)
