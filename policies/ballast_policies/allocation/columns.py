"""Columns of the linear programs: a job alone, or a pair of jobs, on one GPU type; x has one entry each."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ballast_policies.allocation.problem import Pair


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Columns:
    """Columns (ways to use a GPU type), as arrays of equal length.

    Attributes:
        first, second: rows of the jobs; ``second`` is -1 where the first runs alone.
        kind: index of the GPU type.
        rate_first, rate_second: steps/s of the two while they run so.
        gpus: GPUs taken while it runs.
        pair: index into ``Instance.pairs``, -1 for a job alone.
    """

    first: np.ndarray
    second: np.ndarray
    kind: np.ndarray
    rate_first: np.ndarray
    rate_second: np.ndarray
    gpus: np.ndarray
    pair: np.ndarray

    def __len__(self) -> int:
        return len(self.first)

    def take(self, index: np.ndarray) -> "Columns":
        """The columns at ``index`` (positions or a mask)."""
        return Columns(**{field.name: getattr(self, field.name)[index] for field in dataclasses.fields(self)})

    def with_others(self, others: "Columns") -> "Columns":
        """These, then ``others``."""
        both = {
            field.name: np.concatenate([getattr(self, field.name), getattr(others, field.name)])
            for field in dataclasses.fields(self)
        }
        return Columns(**both)


def useful_pairs(
    gpu_types: tuple[str, ...], names: Sequence[str], pairs: tuple[Pair, ...], T: np.ndarray, gpus: np.ndarray
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
    return Columns(
        first=first[which],
        second=second[which],
        kind=kind,
        rate_first=rates[which, kind, 0],
        rate_second=rates[which, kind, 1],
        gpus=gpus[first[which]],
        pair=which,
    )
