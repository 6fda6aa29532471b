"""Jobs of one kind as one row of a linear program, exactly.

A cluster runs thousands of jobs of a few dozen models.  Jobs with the same speeds, gang, demands and worth
are interchangeable: averaging a solution over them changes no limit, demand or objective, so there is an
optimum in which their shares are equal, and it is found with one row for a *class* of them. A column of a
class of n jobs is the share of each member, and takes n times its GPUs.

Level and time rows are those of one member.  Multipliers of a class row are divided by n to become those of
its members.  Programs with pairs of jobs are left as they are: ``linear`` takes few of the pairs.
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
        columns: merged columns, over classes: speeds of one member, GPUs of all.
        column: (columns,) merged column of each original one.
    """

    of: np.ndarray
    size: np.ndarray
    chosen: np.ndarray
    columns: Columns
    column: np.ndarray

    def sum_of(self, value: np.ndarray) -> np.ndarray:
        """(merged,) worth of a class in original columns worth ``value`` each at full time."""
        one = np.zeros(len(self.columns))
        one[self.column] = value
        worth: np.ndarray = one * self.size[self.columns.first]
        return worth


def merged(instance: Instance, *per_job: np.ndarray, value: np.ndarray) -> Merged | None:
    """The classes of jobs that agree in speeds, gangs, the arrays ``per_job`` (n,) and worth.

    ``per_job``: further values that must be equal, e.g. demands; ``value``: (columns,) worth of full time.

    Returns:
        None where there are pairs, or merging does not pay.
    """
    columns, n = instance.columns, len(instance.gpus)
    elastic = bool(instance.elastic.any())
    if n < 2 or (columns.second >= 0).any() or (not elastic and mostly_distinct(instance.T)):
        return None
    first, place = columns.first, columns.place
    width = int(place.max(initial=0)) + 1
    if n * width * (2 + len(instance.capacity)) > MOST_ENTRIES and elastic:
        return None
    parts = [_table(first, place, columns.rate_first, (n, width)), *(a[:, None] for a in per_job)]
    if elastic:
        parts += [_table(first, place, gpus, (n, width)) for gpus in _gpus_by_type(columns)]
    else:
        parts.append(instance.gpus[:, None])
    if value.any():
        parts.append(_table(first, place, value, (n, width)))
    features = np.concatenate(parts, axis=1)
    if mostly_distinct(features):
        return None
    of, chosen = equal_rows(features)
    if len(chosen) > WORTH_IT * n:
        return None
    size = np.bincount(of, minlength=len(chosen)).astype(float)
    # One merged column for each (class, place); that of its first member stands for it.
    kept, first_at, column = np.unique(of[first] * width + place, return_index=True, return_inverse=True)
    one = dataclasses.replace(columns.take(first_at), first=kept // width)
    return Merged(of=of, size=size, chosen=chosen, columns=one.scaled(size[one.first]), column=column)


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
