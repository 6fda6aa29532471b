"""Columns of the linear programs; x has one entry each.

A column is a way to spend time: a job alone on one GPU type or in one of its configurations, or a pair of
jobs on one GPU type.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from ballast_policies.allocation.problem import Pair


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Columns (ways to use GPUs), as arrays of equal length.

    Attributes:
        first, second: rows of the jobs; ``second`` is -1 where the first runs alone.
        place: number of the column in its job: the index of the GPU type, or of the configuration.
        kind: index of the GPU type; of a configuration that mixes types, one of them.
        rate_first, rate_second: steps/s of the two while they run so.
        gpus: GPUs of type ``kind`` taken while it runs.
        pair: index into ``Instance.pairs``, -1 for a job alone.
        further: sparse (columns, k), GPUs of the types other than ``kind``; None: no column mixes types.
        besides: USD an hour that running so costs besides its GPUs; None: nothing does.
    """

    first: np.ndarray
    second: np.ndarray
    place: np.ndarray
    kind: np.ndarray
    rate_first: np.ndarray
    rate_second: np.ndarray
    gpus: np.ndarray
    pair: np.ndarray
    further: Any = None
    besides: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.first)

    def take(self, index: np.ndarray) -> "Columns":
        """The columns at ``index`` (positions or a mask)."""
        taken = {name: getattr(self, name)[index] for name in _ARRAYS}
        return Columns(
            **taken,
            further=None if self.further is None else self.further[index],
            besides=None if self.besides is None else self.besides[index],
        )

    def with_others(self, others: "Columns") -> "Columns":
        """These, then ``others``."""
        both = {name: np.concatenate([getattr(self, name), getattr(others, name)]) for name in _ARRAYS}
        further = None
        if self.further is not None or others.further is not None:
            import scipy.sparse

            width = (self if others.further is None else others).further.shape[1]
            parts = [
                scipy.sparse.csr_array((len(each), width)) if each.further is None else each.further
                for each in (self, others)
            ]
            further = scipy.sparse.vstack(parts, format="csr")
        besides = None
        if self.besides is not None or others.besides is not None:
            besides = np.concatenate([_or_zeros(self), _or_zeros(others)])
        return Columns(**both, further=further, besides=besides)

    def scaled(self, by: np.ndarray) -> "Columns":
        """Columns that take ``by`` (columns,) times the GPUs."""
        further = self.further
        if further is not None:
            further = further.multiply(by[:, None]).tocsr()
        return dataclasses.replace(self, gpus=self.gpus * by, further=further)

    def total_gpus(self) -> np.ndarray:
        """(columns,) GPUs of all types."""
        if self.further is None:
            return self.gpus
        total: np.ndarray = self.gpus + self.further.sum(axis=1)
        return total

    def cost(self, prices: np.ndarray) -> np.ndarray:
        """(columns,) price of the GPUs, at ``prices`` (k,) of one of each type."""
        cost: np.ndarray = self.gpus * prices[self.kind]
        if self.further is not None:
            cost += self.further @ prices
        return cost

    def spending(self, prices: np.ndarray) -> np.ndarray:
        """(columns,) USD an hour: of the GPUs, as :meth:`cost`, and what running so costs besides."""
        cost = self.cost(prices)
        return cost if self.besides is None else cost + self.besides

    def gpus_used(self, x: np.ndarray, k: int) -> np.ndarray:
        """(k,) GPUs of each of the k types in use on average, at shares x (columns,)."""
        used: np.ndarray = np.bincount(self.kind, weights=self.gpus * x, minlength=k).astype(
            float, copy=False
        )
        if self.further is not None:
            used += x @ self.further
        return used

    def use(self, types: np.ndarray) -> np.ndarray:
        """(columns,) whether a column takes GPUs of one of the ``types`` (k,), a mask."""
        uses: np.ndarray = types[self.kind]
        if self.further is not None:
            uses = uses | (self.further @ types.astype(float) > 0)
        return uses

    def entries(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(column, index of the GPU type, GPUs) of each type that each column takes."""
        here = np.arange(len(self))
        if self.further is None:
            return here, self.kind, self.gpus
        further = self.further.tocoo()
        return (
            np.concatenate([here, further.row]),
            np.concatenate([self.kind, further.col]),
            np.concatenate([self.gpus, further.data]),
        )


_ARRAYS = tuple(
    field.name for field in dataclasses.fields(Columns) if field.name not in ("further", "besides")
)


def _or_zeros(columns: Columns) -> np.ndarray:
    return np.zeros(len(columns)) if columns.besides is None else columns.besides


def sums(index: np.ndarray, *, weights: np.ndarray, n: int) -> np.ndarray:
    """(n,) sums of ``weights`` by ``index``; floats also where there is nothing to sum."""
    return np.bincount(index, weights=weights, minlength=n).astype(float, copy=False)


def useful_pairs(
    gpu_types: tuple[str, ...],
    names: Sequence[str],
    pairs: tuple[Pair, ...],
    T: np.ndarray,
    gpus: np.ndarray,
    usd_per_step: np.ndarray | None = None,
) -> Columns:
    """Pairs that can be of use: together they make more progress than by taking turns on the same GPUs.

    Where r1/T1 + r2/T2 <= 1, turns of lengths r1/T1 and r2/T2 give both jobs as much and use no more
    GPUs and no more of either job's time, so leaving such a pair out changes no optimum.
    """
    row = {name: m for m, name in enumerate(names)}
    nothing = (0.0, 0.0)
    rates = np.array(
        [pair.throughput.get(gpu_type, nothing) for pair in pairs for gpu_type in gpu_types], dtype=float
    ).reshape(len(pairs), len(gpu_types), 2)
    first = np.array([row[pair.jobs[0]] for pair in pairs])
    second = np.array([row[pair.jobs[1]] for pair in pairs])
    alone = np.stack([T[first], T[second]], axis=2)
    together = np.divide(rates, alone, out=np.zeros_like(rates), where=alone > 0).sum(axis=2)
    which, kind = np.nonzero((together > 1) & (rates > 0).all(axis=2) & (alone > 0).all(axis=2))
    besides = None
    if usd_per_step is not None:
        of_each = np.stack([usd_per_step[first[which], kind], usd_per_step[second[which], kind]], axis=1)
        besides = 3600.0 * (rates[which, kind] * of_each).sum(axis=1)
    return Columns(
        first=first[which],
        second=second[which],
        place=kind,
        kind=kind,
        rate_first=rates[which, kind, 0],
        rate_second=rates[which, kind, 1],
        gpus=gpus[first[which]],
        pair=which,
        besides=besides,
    )


def size_at_full_speed(columns: Columns, n: int) -> np.ndarray:
    """(n,) GPUs of each job's fastest column, the smallest of several; 1 without a column."""
    size, total = np.ones(n), columns.total_gpus()
    # The last entry of each job stays: fastest last, of these the smallest.
    order = np.lexsort((-total, columns.rate_first))
    size[columns.first[order]] = total[order]
    return size
