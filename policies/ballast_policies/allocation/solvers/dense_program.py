"""Linear programs of jobs that run alone: a dense row for each job, and a few rows that couple them.

    maximise    value . x + gain t
    subject to  rates_m . x_m >= base_m + slope_m t   for every job m      (level, dual lambda_m)
                sum_j x_mj <= 1                       for every job m      (time, dual mu_m)
                sum_m gpus_m x_mj + lift_j t <= capacity_j   for every type j     (capacity, dual p_j)
                x >= 0

With k GPU types only the k capacities couple the jobs; so given their prices p (and t) each job's best
answer is known in closed form (``best_response``), and the unknowns are k prices (``boxstep``).

A gang has a column for each type. An elastic job has one for each configuration, w at most, and these may
take GPUs of several types: sum_mc use_jmc x_mc + lift_j t <= capacity_j. All else is the same.
"""

import dataclasses
import functools

import numpy as np

from ballast_policies.allocation.columns import Columns

MOST_ENTRIES = 100_000_000
"""Entries of a dense table of GPUs by configuration."""
SAME = 1e-12
"""Relative difference up to which GPUs per speed are the same."""
_HASH_SEED = 20211120


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Rows:
    """The program above. The last column of ``rates`` is idling: free, and worth nothing.

    Tables are stored by columns, since all operations on them go column by column.

    Attributes:
        rates: (n, w + 1) speed of full time in each column, of order 1; 0: no such column. w is k for gangs.
        gpus: (n,) GPUs taken at full time; of an elastic job about.
        value: (n, w + 1) worth of full time, or None: nothing is worth anything but t.
        base, slope: (n,) demands.
        capacity: (k,).
        lift: (k,) GPUs of each type that a unit of t takes.
        gain: 1, or 0: there is no t (it is 0).
        use: (k, w + 1, n) GPUs of each type that each column takes; None: column j takes ``gpus`` of type j.
    """

    rates: np.ndarray
    gpus: np.ndarray
    value: np.ndarray | None
    base: np.ndarray
    slope: np.ndarray
    capacity: np.ndarray
    lift: np.ndarray
    gain: float
    use: np.ndarray | None = None

    @functools.cached_property
    def usable(self) -> np.ndarray:
        """(n, w + 1) whether there is a column."""
        usable = np.asfortranarray(self.rates > 0)
        usable[:, -1] = True
        return usable

    @functools.cached_property
    def absent(self) -> np.ndarray:
        """(n, w + 1) infinite where there is no column, else 0."""
        return np.where(self.usable, 0.0, np.inf)

    @functools.cached_property
    def reach(self) -> np.ndarray:
        """(n,) the fastest rate."""
        return np.asarray(self.rates.max(axis=1))

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

    @property
    def idle(self) -> int:
        """The column of idling."""
        return int(self.rates.shape[1]) - 1

    def costs(self, prices: np.ndarray) -> np.ndarray:
        """(n, w + 1) price of the GPUs of full time in each column, at ``prices`` (k,)."""
        costs: np.ndarray
        if self.use is None:
            costs = np.multiply(self.gpus[:, None], np.append(prices, 0.0), order="F")
        else:
            k, width, n = self.use.shape
            costs = (prices @ self.use.reshape(k, -1)).reshape(width, n).T
        return costs

    def used_by(self, jobs: np.ndarray, columns: np.ndarray, time: np.ndarray) -> np.ndarray:
        """(k,) GPUs of each type that ``jobs`` (rows) take with ``time`` in ``columns``, one entry each."""
        used: np.ndarray
        if self.use is None:
            k = len(self.capacity)
            used = np.bincount(columns, weights=self.gpus[jobs] * time, minlength=k + 1)[:k]
        else:
            used = self.use[:, columns, jobs] @ time
        return used

    def entries(self, jobs: np.ndarray, columns: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(place, index of the GPU type, GPUs) of each type that each of the columns of ``jobs`` takes."""
        if self.use is None:
            return np.arange(len(jobs)), columns, self.gpus[jobs]
        gpus = self.use[:, columns, jobs].T
        place, kind = np.nonzero(gpus)
        return place, kind, gpus[place, kind]

    def standing_for(self, weight: np.ndarray) -> "Rows":
        """The same with each row standing for ``weight`` (n,) such jobs."""
        value = None if self.value is None else np.asfortranarray(self.value * weight[:, None])
        use = None if self.use is None else self.use * weight
        return dataclasses.replace(self, gpus=self.gpus * weight, value=value, use=use)

    def take(self, index: np.ndarray, *, capacity: np.ndarray, lift: np.ndarray) -> "Rows":
        """The rows at ``index``, with other capacities (k,) and another lift (k,)."""
        return dataclasses.replace(
            self,
            rates=taken(self.rates, index),
            gpus=self.gpus[index],
            value=None if self.value is None else taken(self.value, index),
            base=self.base[index],
            slope=self.slope[index],
            capacity=capacity,
            lift=lift,
            use=None if self.use is None else np.take(self.use, index, axis=2),
        )


Tables = tuple[np.ndarray, np.ndarray, np.ndarray | None, np.ndarray | None]
"""``rates``, ``gpus``, ``value`` and ``use`` of :class:`Rows`."""


def dense(
    columns: Columns, scale: np.ndarray, k: int, *, elastic: bool, value: np.ndarray | None = None
) -> Tables | None:
    """The tables of jobs alone on k GPU types; None: some job has very many more configurations than others.

    ``scale``: (n,) by which speeds are multiplied; ``value``: (columns,) worth of full time.
    """
    n, width, first, place = len(scale), k, columns.first, columns.place
    gpus, use, kept = np.ones(n), None, np.arange(len(columns))
    rates = columns.rate_first * scale[first]
    if elastic:
        width = int(place.max(initial=-1)) + 1
        if (width + 1) * n * k > MOST_ENTRIES:
            return None
        np.maximum.at(gpus, first, columns.total_gpus())
        column, kind, amount = entries = columns.entries()
        use = np.zeros((k, width + 1, n))
        use[kind, place[column], first[column]] = amount
        kept = np.flatnonzero(needed(first, rates, value, entries)) if len(columns) else kept
    else:
        gpus[first] = columns.gpus

    def table(of_columns: np.ndarray) -> np.ndarray:
        found = np.zeros((n, width + 1), order="F")
        found[first[kept], place[kept]] = of_columns[kept]
        return found

    return table(rates), gpus, None if value is None else table(value), use


def taken(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    """Rows of a table that is stored by columns, stored by columns."""
    return table.T.take(index, axis=1).T


def needed(
    first: np.ndarray,
    rates: np.ndarray,
    value: np.ndarray | None,
    entries: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> np.ndarray:
    """(columns,) False where a faster column of the job has the same GPUs, and worth, per speed.

    A part of the time in that one and idling for the rest does the same; at all prices the two would tie.

    Args:
        first: (columns,) rows of the jobs.
        rates: (columns,) speeds of order 1.
        value: (columns,) worth of full time, or None.
        entries: (column, index of the GPU type, GPUs) of each type that a column takes.
    """
    column, kind, gpus = entries
    random = np.random.default_rng(_HASH_SEED).uniform(1.0, 2.0, int(kind.max(initial=0)) + 2)
    key = np.bincount(column, weights=random[kind] * gpus, minlength=len(first)) / rates
    if value is not None:
        key = key + random[-1] * value / rates
    order = np.lexsort((-rates, key, first))
    same = first[order][1:] == first[order][:-1]
    same &= np.diff(key[order]) <= SAME * np.abs(key[order][1:])
    group = np.append(0, np.cumsum(~same))
    # Of each group the fastest.
    best = np.lexsort((-rates[order], group))
    one = np.flatnonzero(np.append(True, np.diff(group[best]) > 0))
    found = np.zeros(len(first), dtype=bool)
    found[order[best[one]]] = True
    return found


def dot(a: np.ndarray, b: np.ndarray) -> float:
    """The product of long vectors, without the threads of ``@``: beside other work these cost more."""
    return float((a * b).sum())


def least(table: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(n,) each: the least entry of each row, and the first column that has it."""
    value = table[:, 0].copy()
    place, here = np.zeros(len(value), dtype=np.int32), np.empty(len(value), dtype=np.int32)
    less = np.empty(len(value), dtype=bool)
    for j in range(1, table.shape[1]):
        np.less(table[:, j], value, out=less)
        # Columns come in order, so the last one that was less is the largest number.
        np.multiply(less, np.int32(j), out=here)
        np.maximum(place, here, out=place)
        np.minimum(value, table[:, j], out=value)
    return value, place.astype(np.intp)


def stratified(
    size: np.ndarray, stratum: np.ndarray, rank: np.ndarray, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """A deterministic sample with probabilities in proportion to size.

    Args:
        size: (n,) > 0; jobs so large that they would be drawn more than once are all taken.
        stratum: (n,) whole numbers; every stratum gets its part of the sample.
        rank: (n,) order within a stratum, over which the sample is spread evenly.
        most: jobs in the sample, about.

    Returns:
        (positions in order, weight of each: how many of its size it stands for).
    """
    n = len(size)
    if n <= most:
        return np.arange(n), np.ones(n)
    certain = np.zeros(n, dtype=bool)
    while True:
        left = most - int(certain.sum())
        step = size[~certain].sum() / max(left, 1)
        larger = ~certain & (size >= step)
        if not larger.any() or left <= 1:
            break
        certain |= larger
    order = np.lexsort((rank, stratum))
    order = order[~certain[order]]
    along = np.cumsum(size[order])
    points = (np.arange(max(left, 1)) + 0.5) * step
    drawn = order[np.minimum(np.searchsorted(along, points), len(order) - 1)]
    drawn = np.unique(drawn)
    chosen = np.sort(np.concatenate([np.flatnonzero(certain), drawn]))
    weight = np.where(certain[chosen], 1.0, step / size[chosen])
    return chosen, weight


WORTH_IT = 0.7
"""Classes per job above which merging does not pay."""


def mostly_distinct(features: np.ndarray) -> bool:
    """A quick look: equal rows have equal products with a random vector, but for rounding."""
    weights = np.random.default_rng(_HASH_SEED).uniform(1.0, 2.0, features.shape[1])
    products = np.sort(features @ weights)
    apart = products[1:] - products[:-1] > 1e-12 * np.abs(products[1:])
    return bool(1 + apart.sum() > WORTH_IT * len(features))


def equal_rows(features: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(class of each row, a row of each class) for rows that are equal bit for bit."""
    bits: np.ndarray = np.ascontiguousarray(features + 0.0).view(np.uint64)
    random = np.random.default_rng(_HASH_SEED)
    odd = 2 * random.integers(0, 2**62, (1, bits.shape[1]), dtype=np.uint64) + np.uint64(1)
    with np.errstate(over="ignore"):
        mixed = (bits ^ (bits >> np.uint64(31))) * odd
        hashed: np.ndarray = (mixed ^ (mixed >> np.uint64(29))).sum(axis=1, dtype=np.uint64)
    _, chosen, of = np.unique(hashed, return_index=True, return_inverse=True)
    if not (bits == bits[chosen[of]]).all():
        _, chosen, of = np.unique(features, axis=0, return_index=True, return_inverse=True)
    # Classes in the order of their first members, so that ties fall as without merging.
    order = np.argsort(chosen, kind="stable")
    place = np.empty(len(order), dtype=np.int64)
    place[order] = np.arange(len(order))
    return place[of.ravel()], chosen[order]
