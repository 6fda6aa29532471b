"""Jobs that can run on one GPU type alone, merged where a GPU of it is worth the same to them, exactly.

Where a program maximises worth, such jobs tie: at a price equal to that worth all of them are undecided, in
any box.  Above their demands they are interchangeable GPU for GPU, so one row stands for all: it takes all
their GPUs, and its demand is what they demand together.  What it gets above that is divided in proportion
to what each can still use.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.boxstep.one_program import Priced
from ballast_policies.allocation.solvers.dense_program import Rows

MANTISSA = 2.0**40
"""Worths that agree to this part count as the same."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OneType:
    """A program with such jobs merged.

    Attributes:
        rows: merged; first the jobs ``kept``, then a row for each group.
        kept: rows of the program that are not merged.
        merged: rows of the program that are.
        group: (merged,) group of each.
        kind: (merged,) index of its GPU type.
        least: (merged,) share of time that meets its demand.
        demanded: (groups,) likewise, of the group's row.
    """

    rows: Rows
    kept: np.ndarray
    merged: np.ndarray
    group: np.ndarray
    kind: np.ndarray
    least: np.ndarray
    demanded: np.ndarray

    def restored(self, whole: Rows, found: Priced) -> Priced:
        """The solution of ``whole``, the program before it was merged."""
        kept, here, kind = self.kept, self.merged, self.kind
        groups = len(self.demanded)
        share = found.X[len(kept) + np.arange(groups), kind[np.unique(self.group, return_index=True)[1]]]
        room = 1.0 - self.demanded
        part = np.clip(np.where(room > 0, (share - self.demanded) / np.where(room > 0, room, 1.0), 0.0), 0, 1)
        X = np.zeros((len(whole), whole.idle))
        X[kept] = found.X[: len(kept)]
        X[here, kind] = self.least + (1.0 - self.least) * part[self.group]
        assert whole.value is not None
        gain = whole.value[here, kind] - found.prices[kind] * whole.gpus[here]
        level, time = np.zeros(len(whole)), np.zeros(len(whole))
        level[kept], time[kept] = found.level[: len(kept)], found.time[: len(kept)]
        level[here] = np.maximum(-gain, 0.0) / whole.rates[here, kind]
        time[here] = np.maximum(gain, 0.0)
        return dataclasses.replace(found, X=X, level=level, time=time)


def merged_by_type(rows: Rows, fewest: int) -> OneType | None:
    """``rows`` with those jobs merged; None where not ``fewest`` of them would go, or there is a t."""
    if rows.gain or rows.value is None or rows.use is not None:
        return None
    one = np.flatnonzero((rows.usable[:, : rows.idle].sum(axis=1) == 1) & (rows.reach > 0))
    if len(one) <= fewest:
        return None
    kind = rows.usable[one, : rows.idle].argmax(axis=1)
    mantissa, exponent = np.frexp(rows.value[one, kind] / rows.gpus[one])
    keys = np.stack([kind, exponent, np.rint(mantissa * MANTISSA).astype(np.int64)], axis=1)
    _, group, size = np.unique(keys, axis=0, return_inverse=True, return_counts=True)
    several = size[group] > 1
    if several.sum() <= fewest:
        return None
    here, kind = one[several], kind[several]
    _, group = np.unique(group[several], return_inverse=True)
    groups = int(group.max()) + 1
    least = np.clip(rows.base[here] / rows.rates[here, kind], 0.0, 1.0)
    gpus = np.bincount(group, weights=rows.gpus[here])
    demanded = np.bincount(group, weights=rows.gpus[here] * least) / gpus
    kept = np.setdiff1d(np.arange(len(rows)), here, assume_unique=True)
    first = np.unique(group, return_index=True)[1]
    # The rows of one member each, with the sums of their groups in them.
    small = rows.take(np.concatenate([kept, here[first]]), capacity=rows.capacity, lift=rows.lift)
    assert small.value is not None
    at, of = len(kept) + np.arange(groups), kind[first]
    small.rates[at, of], small.reach[at] = 1.0, 1.0
    small.gpus[at], small.base[at] = gpus, demanded
    small.value[at, of] = np.bincount(group, weights=rows.value[here, kind])
    return OneType(rows=small, kept=kept, merged=here, group=group, kind=kind, least=least, demanded=demanded)
