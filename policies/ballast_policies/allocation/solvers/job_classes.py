"""Jobs of one kind as one row of a linear program with pairs, exactly.

A cluster runs thousands of jobs of a few dozen models.  Jobs with the same speeds, gang, demands and worth
are interchangeable: averaging a solution over them changes no limit, demand or objective, so
there is an optimum in which their shares are equal, and it is found with one row for a *class* of them:

    single column of a class of n jobs:  y = share of each member;           takes n gpus y of the capacity
    pair column of classes a, b:         y = time of all their pairs together, in units of min(n_a, n_b)

Level and time rows are those of one member.  Multipliers of a class row are divided by n to become those of
its members.  Pairs merge only where every member of a can share with every member of b at the same
speeds; shares are then divided over a sparse set of pairs (each member in few of them).
"""

import dataclasses
from collections.abc import Iterator

import numpy as np

from ballast_policies.allocation.instance import Columns, Instance

WORTH_IT = 0.7
"""Classes per job above which merging does not pay."""

MOST_ENTRIES = 30_000_000
"""Entries of the table of jobs with configurations up to which classes are looked for."""

_HASH_SEED = 20210705


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Merged:
    """An instance's jobs by class, and its columns by merged column.

    Attributes:
        of: (n,) class of each job.
        size: (classes,) number of members.
        chosen: (classes,) row of a member that stands for the class.
        columns: merged columns, over classes; a pair inside one class has ``second`` = ``first``.
        unit: (merged,) time of all original columns together at y = 1.
        column: (columns,) merged column of each original one.
        pairs: the original pair columns, those of one merged column together and in order of their members.
    """

    of: np.ndarray
    size: np.ndarray
    chosen: np.ndarray
    columns: Columns
    unit: np.ndarray
    column: np.ndarray
    pairs: np.ndarray

    def program(self) -> tuple[Columns, np.ndarray, np.ndarray]:
        """Merged columns as one member sees them at y = 1, and its time in them as first and as second."""
        columns = self.columns
        shared = columns.second >= 0
        inside = columns.second == columns.first
        part_first = self.unit / self.size[columns.first]
        part_second = np.where(shared, self.unit / self.size[columns.second], 0.0)
        rate_first, rate_second = columns.rate_first * part_first, columns.rate_second * part_second
        return (
            dataclasses.replace(
                columns.scaled(self.unit),
                second=np.where(inside, -1, columns.second),
                rate_first=np.where(inside, rate_first + rate_second, rate_first),
                rate_second=np.where(inside, 0.0, rate_second),
            ),
            np.where(inside, 2.0 * part_first, part_first),
            np.where(inside, 0.0, part_second),
        )

    def sum_of(self, value: np.ndarray) -> np.ndarray:
        """(merged,) worth at y = 1 of original columns worth ``value`` each at full time."""
        one = np.zeros(len(self.unit))
        one[self.column] = value
        worth: np.ndarray = one * self.unit
        return worth

    def spread(self, y: np.ndarray) -> np.ndarray:
        """(columns,) shares of the original columns that give every member of a class the same."""
        columns = self.columns
        alone = columns.second < 0
        x: np.ndarray = np.where(alone, y, 0.0)[self.column]
        starts = np.searchsorted(self.column[self.pairs], np.arange(len(self.unit) + 1))
        for c in np.flatnonzero(~alone & (y > 0)):
            mine = self.pairs[starts[c] : starts[c + 1]]
            first, second = int(self.size[columns.first[c]]), int(self.size[columns.second[c]])
            total = float(y[c] * self.unit[c])
            inside = columns.first[c] == columns.second[c]
            at, shares = _ring(first, total) if inside else _staircase(first, second, total)
            x[mine[at]] = shares
        return x


def merged(instance: Instance, *per_job: np.ndarray, value: np.ndarray) -> Merged | None:
    """The classes of jobs that agree in speeds, gangs, the arrays ``per_job`` (n,) and worth.

    Args:
        instance: the instance.
        *per_job: further values that must be equal, e.g. demands.
        value: (columns,) worth of full time on each column; must be equal as well.

    Returns:
        None where merging does not pay, or pairs do not allow it.
    """
    columns, n = instance.columns, len(instance.gpus)
    if n < 2 or (not instance.elastic.any() and mostly_distinct(instance.T)):
        return None
    alone = np.flatnonzero(columns.second < 0)
    first, place = columns.first[alone], columns.place[alone]
    width = int(place.max(initial=0)) + 1
    if n * width * (2 + len(instance.capacity)) > MOST_ENTRIES and instance.elastic.any():
        return None
    has = np.zeros((n, width))
    has[first, place] = columns.rate_first[alone]
    parts = [has, *(a[:, None] for a in per_job)]
    if instance.elastic.any():
        parts += [_table(first, place, gpus, (n, width)) for gpus in _gpus_by_type(columns.take(alone))]
    else:
        parts.append(instance.gpus[:, None])
    if value.any():
        parts.append(_table(first, place, value[alone], (n, width)))
    features = np.concatenate(parts, axis=1)
    if mostly_distinct(features):
        return None
    of, chosen = equal_rows(features)
    if len(chosen) > WORTH_IT * n:
        return None
    size = np.bincount(of, minlength=len(chosen))
    pairs = _merged_pairs(instance, of, size, value)
    if pairs is None:
        return None
    pair_columns, pair_unit, pair_column, order = pairs
    # One merged column for each (class, place); that of its first member stands for it.
    kept, first_at, group = np.unique(of[first] * width + place, return_index=True, return_inverse=True)
    singles = dataclasses.replace(columns.take(alone[first_at]), first=kept // width)
    column = np.empty(len(columns), dtype=np.int64)
    column[alone] = group
    column[order] = len(kept) + pair_column
    return Merged(
        of=of,
        size=size,
        chosen=chosen,
        columns=singles.with_others(pair_columns),
        unit=np.concatenate([size[singles.first].astype(float), pair_unit]),
        column=column,
        pairs=order,
    )


def _table(row: np.ndarray, place: np.ndarray, values: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """``values`` at (row, place), 0 elsewhere."""
    table = np.zeros(shape)
    table[row, place] = values
    return table


def _gpus_by_type(columns: Columns) -> Iterator[np.ndarray]:
    """(columns,) GPUs of one type after the other."""
    column, kind, gpus = columns.entries()
    for j in range(int(kind.max(initial=-1)) + 1):
        here = kind == j
        yield np.bincount(column[here], weights=gpus[here], minlength=len(columns))


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


def _merged_pairs(
    instance: Instance, of: np.ndarray, size: np.ndarray, value: np.ndarray
) -> tuple[Columns, np.ndarray, np.ndarray, np.ndarray] | None:
    """(merged pair columns, their units, merged index of each pair column, the pair columns in order).

    The pair columns come in an order in which those of one merged column are sorted by the ranks of
    their members within the classes. None where a group is not complete.
    """
    columns = instance.columns
    here = np.flatnonzero(columns.second >= 0)
    if not len(here):
        return columns.take(here), np.zeros(0), np.zeros(0, dtype=np.int64), here
    rank = np.empty(len(of), dtype=np.int64)
    rank[np.argsort(of, kind="stable")] = np.arange(len(of)) - np.repeat(np.cumsum(size) - size, size)
    pair = columns.take(here)
    a, b = of[pair.first], of[pair.second]
    swapped = (a > b) | ((a == b) & (rank[pair.first] > rank[pair.second]))
    first, second = np.where(swapped, pair.second, pair.first), np.where(swapped, pair.first, pair.second)
    rate_a = np.where(swapped, pair.rate_second, pair.rate_first)
    rate_b = np.where(swapped, pair.rate_first, pair.rate_second)
    a, b = of[first], of[second]
    key = (a * len(size) + b) * len(instance.capacity) + pair.kind
    _, chosen, group = np.unique(key, return_index=True, return_inverse=True)
    one = chosen[group]
    worth = value[here]
    alike = (rate_a == rate_a[one]) & (rate_b == rate_b[one]) & (worth == worth[one])
    if not (alike & ((a != b) | (rate_a == rate_b))).all():
        return None
    full = np.where(a == b, size[a] * (size[a] - 1) // 2, size[a] * size[b])[chosen]
    if (np.bincount(group, minlength=len(chosen)) != full).any():
        return None
    order = np.lexsort((rank[first] * len(of) + rank[second], group))
    together = dataclasses.replace(
        pair.take(chosen),
        first=a[chosen],
        second=b[chosen],
        rate_first=rate_a[chosen],
        rate_second=rate_b[chosen],
    )
    unit = np.minimum(size[together.first], size[together.second]).astype(float)
    return together, unit, group[order], here[order]


def _staircase(rows: int, columns: int, total: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions (row-major) and shares of a rows x columns table with equal row and equal column sums.

    The north-west corner rule: at most rows + columns - 1 places.
    """
    cuts = np.unique(np.concatenate([np.arange(rows + 1) * columns, np.arange(columns + 1) * rows]))
    middle = (cuts[:-1] + cuts[1:]) / 2.0
    at = (middle // columns).astype(np.int64) * columns + (middle // rows).astype(np.int64)
    return at, np.diff(cuts) * (total / (rows * columns))


def _ring(members: int, total: float) -> tuple[np.ndarray, np.ndarray]:
    """Positions among all pairs i < j (row-major) and shares: every member has 2 total / members."""
    if members == 2:
        return np.array([0]), np.array([total])
    i = np.arange(members)
    low, high = np.minimum(i, (i + 1) % members), np.maximum(i, (i + 1) % members)
    at = low * members - low * (low + 1) // 2 + high - low - 1
    return at, np.full(members, total / members)
