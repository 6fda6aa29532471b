"""Linear programs of jobs that run alone: a dense row for each job, and a few rows that couple them.

    maximise    value . x + gain t
    subject to  rates_m . x_m >= base_m + slope_m t   for every job m      (level, dual lambda_m)
                sum_j x_mj <= 1                       for every job m      (time, dual mu_m)
                sum_m gpus_m x_mj + lift_j t <= capacity_j   for every type j     (capacity, dual p_j)
                x >= 0

With k GPU types only the k capacities couple the jobs; so given their prices p (and t) each job's best
answer is known in closed form (``best_response``), and the unknowns are k prices (``boxstep``).
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rows:
    """The program above. Column k of ``rates`` and ``usable`` is idling: free, and worth nothing.

    Tables are stored by columns, since all operations on them go column by column.

    Attributes:
        rates: (n, k + 1) speed of full time on each type, of order 1; 0: no such column.
        usable: (n, k + 1) whether there is a column.
        gpus: (n,) GPUs taken at full time.
        value: (n, k + 1) worth of full time, or None: nothing is worth anything but t.
        base, slope: (n,) demands.
        capacity: (k,).
        lift: (k,) GPUs of each type that a unit of t takes.
        gain: 1, or 0: there is no t (it is 0).
        reach: (n,) the fastest rate.
        absent: (n, k + 1) infinite where there is no column, else 0.
    """

    rates: np.ndarray
    usable: np.ndarray
    gpus: np.ndarray
    value: np.ndarray | None
    base: np.ndarray
    slope: np.ndarray
    capacity: np.ndarray
    lift: np.ndarray
    gain: float
    reach: np.ndarray
    absent: np.ndarray

    def __len__(self) -> int:
        return len(self.gpus)

    @property
    def highest(self) -> float:
        """The t at which the first job would be at full speed for all of its time."""
        rising = self.slope > 0
        if not rising.any():
            return float("inf")
        return float(((self.reach - self.base)[rising] / self.slope[rising]).min())

    def demand(self, t: float) -> np.ndarray:
        """(n,) demanded at t, as far as a job can reach it at all."""
        rising = self.slope * t if self.slope.any() else 0.0
        demand: np.ndarray = np.minimum(self.base + rising, self.reach)
        return demand

    def take(self, index: np.ndarray, *, capacity: np.ndarray, lift: np.ndarray) -> "Rows":
        """The rows at ``index``, with other capacities (k,) and another lift (k,)."""
        return dataclasses.replace(
            self,
            rates=_taken(self.rates, index),
            usable=_taken(self.usable, index),
            gpus=self.gpus[index],
            value=None if self.value is None else _taken(self.value, index),
            base=self.base[index],
            slope=self.slope[index],
            capacity=capacity,
            lift=lift,
            reach=self.reach[index],
            absent=_taken(self.absent, index),
        )


def _taken(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Rows of a table that is stored by columns, stored by columns."""
    result = np.empty((len(index), table.shape[1]), dtype=table.dtype, order="F")
    for j in range(table.shape[1]):
        np.take(table[:, j], index, out=result[:, j])
    return result


def dense_rows(
    *,
    first: np.ndarray,
    kind: np.ndarray,
    rates: np.ndarray,
    gpus: np.ndarray,
    value: np.ndarray | None,
    base: np.ndarray,
    slope: np.ndarray,
    capacity: np.ndarray,
    gain: float,
) -> Rows:
    """Rows from columns: entry c belongs to job ``first[c]`` on type ``kind[c]``; gpus: (n,)."""
    n, k = len(base), len(capacity)
    table, usable = np.zeros((n, k + 1), order="F"), np.zeros((n, k + 1), dtype=bool, order="F")
    table[first, kind] = rates
    usable[first, kind] = True
    usable[:, k] = True
    worth = None
    if value is not None:
        worth = np.zeros((n, k + 1), order="F")
        worth[first, kind] = value
    return Rows(
        rates=table,
        usable=usable,
        gpus=gpus,
        value=worth,
        base=base,
        slope=slope,
        capacity=capacity,
        lift=np.zeros(k),
        gain=gain,
        reach=largest(table),
        absent=np.where(usable, 0.0, np.inf),
    )


def largest(table: np.ndarray) -> np.ndarray:
    """(n,) the largest entry of each row; by columns, which for few columns is several times faster."""
    result = table[:, 0].copy()
    for j in range(1, table.shape[1]):
        np.maximum(result, table[:, j], out=result)
    return result


def least(table: np.ndarray) -> np.ndarray:
    """(n,) the least entry of each row."""
    result = table[:, 0].copy()
    for j in range(1, table.shape[1]):
        np.minimum(result, table[:, j], out=result)
    return result
