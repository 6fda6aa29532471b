"""The argument of a user's policy: jobs and GPU types as arrays, shares and throughputs in cvxpy."""

import dataclasses
from typing import TYPE_CHECKING, Any

import numpy as np

from ballast_policies.allocation.instance import Instance

if TYPE_CHECKING:
    import cvxpy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ClusterView:
    """n jobs over k GPU types. Jobs that can run nowhere now are left out.

    Attributes:
        jobs: (n) names.
        gpu_types: (k) names.
        capacity: (k,) GPUs of each type.
        gpus: (n,) size of each gang.
        weights: (n,) weight of each job, above 0.
        teams: (n) the entity of each job, or None.
        speeds: (n, k) steps/s of the whole gang; 0 where it cannot run.
        equal: (n,) steps/s on the equal share, ``capacity / sum(capacity)`` of the time on each type.
        steps_remaining: (n,) steps left; where unknown, an hour's worth on the job's fastest type.
        elapsed: (n,) seconds since arrival.
        isolated_elapsed: (n,) seconds that the progress so far would have taken on the isolated share.
        deadlines: (n,) seconds until the job should be done; infinite where it has no deadline.
        prices: (k,) price of a GPU hour; of a type without one, the mean of the others, or 1.
        shares: expression of shape (n, k): fraction of its time that each job spends on each type.
        throughput: expression of shape (n,): steps/s of each job.
        level: expression of shape (n,): ``gpus x throughput / (weight x equal)``: the level.
    """

    jobs: tuple[str, ...]
    gpu_types: tuple[str, ...]
    capacity: np.ndarray
    gpus: np.ndarray
    weights: np.ndarray
    teams: tuple[str | None, ...]
    speeds: np.ndarray
    equal: np.ndarray
    steps_remaining: np.ndarray
    elapsed: np.ndarray
    isolated_elapsed: np.ndarray
    deadlines: np.ndarray
    prices: np.ndarray
    shares: "cvxpy.Expression"
    throughput: "cvxpy.Expression"
    level: "cvxpy.Expression"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Posed:
    """A view, its variable, and the constraints that every allocation must satisfy.

    Attributes:
        view: the argument of the user's function.
        x: variable of shape (columns,), the instance's columns, between 0 and 1.
        time: (5.2) no job spends more than all of its time.
        capacity: (5.3) no type has more GPUs in use than there are.
    """

    view: ClusterView
    x: "cvxpy.Variable"
    time: "cvxpy.Constraint"
    capacity: "cvxpy.Constraint"


def pose(instance: Instance) -> Posed:
    """The instance, without pairs, in cvxpy."""
    import cvxpy
    import scipy.sparse

    columns, count, k = instance.columns, len(instance.columns), len(instance.gpu_types)
    rows = np.flatnonzero(instance.runnable)
    place = np.full(len(instance.gpus), -1)
    place[rows] = np.arange(len(rows))
    job, each = place[columns.first], np.arange(count)
    n = len(rows)

    def matrix(values: np.ndarray, index: np.ndarray, height: int) -> Any:
        return scipy.sparse.csr_array((values, (index, each)), shape=(height, count))

    x = cvxpy.Variable(count, bounds=[0, 1], name="shares")
    throughput = matrix(columns.rate_first, job, n) @ x
    ones = np.ones(count)
    deadlines = instance.deadlines[rows]
    view = ClusterView(
        jobs=tuple(instance.names[m] for m in rows.tolist()),
        gpu_types=instance.gpu_types,
        capacity=instance.capacity.copy(),
        gpus=instance.gpus[rows],
        weights=instance.weights[rows],
        teams=tuple(instance.entity_of[m] for m in rows.tolist()),
        speeds=instance.T[rows],
        equal=instance.equal[rows],
        steps_remaining=instance.steps()[rows],
        elapsed=np.asarray(instance.elapsed)[rows],
        isolated_elapsed=np.asarray(instance.isolated_elapsed)[rows],
        deadlines=np.where(np.isnan(deadlines), np.inf, deadlines),
        prices=instance.prices(),
        shares=cvxpy.reshape(matrix(ones, job * k + columns.kind, n * k) @ x, (n, k), order="C"),
        throughput=throughput,
        level=cvxpy.multiply(instance.level_scale[rows] / instance.weights[rows], throughput),
    )
    return Posed(
        view=view,
        x=x,
        time=matrix(ones, job, n) @ x <= 1,
        capacity=matrix(columns.gpus, columns.kind, k) @ x <= instance.capacity,
    )
