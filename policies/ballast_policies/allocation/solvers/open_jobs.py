"""The jobs that a search still looks at, and the mixes of those that are far from a change.

Such jobs leave the rows: their use of GPUs is linear in t as long as prices stay between bounds. Once prices
come near these, the jobs that left last are back first, so that a step back costs as few jobs as possible.
"""

import dataclasses

import numpy as np

from ballast_policies.allocation.solvers.best_response import Response
from ballast_policies.allocation.solvers.crossover import Box, Closeness, Decided, decided
from ballast_policies.allocation.solvers.dense_program import Rows

CLOSED = 6.0
"""A job this many boxes away from a change leaves the rows."""
WORTH_CLOSING = 0.6
"""Jobs leave where no more than this part stays."""
JITTER = 1e-7
"""Ties are broken by a random perturbation of each column's value, of this part of the prices."""
SEED = 20211024


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Earlier:
    """The rows, their places, and the prices that they hold for, before jobs left."""

    rows: Rows
    index: np.ndarray
    least: np.ndarray
    greatest: np.ndarray


class OpenJobs:
    """The jobs of a program ``whole``, of which ``rows`` have not left; ``index`` are their places."""

    def __init__(self, whole: Rows) -> None:
        self.whole = self.rows = whole
        n, k = len(whole), len(whole.capacity)
        self.index = np.arange(n)
        self.jitter = 0.0
        # Prices between which the jobs that left stay decided, and their mixes.
        self._least, self._greatest = np.full(k, -np.inf), np.full(k, np.inf)
        self._before: list[_Earlier] = []
        self.low, self.high = np.zeros(n, dtype=np.intp), np.zeros(n, dtype=np.intp)
        self._at_zero, self._per_t = np.zeros(n), np.zeros(n)

    @property
    def all_open(self) -> bool:
        """Whether no job has left."""
        return len(self.rows) == len(self.whole)

    def close(self, at: Response, box: Box, close: Closeness, fewest: int) -> np.ndarray | None:
        """Let jobs far from a change leave; positions of those that stay, None where that does not pay.

        Args:
            at: the response in the middle of the box.
            box: the box.
            close: how close each of ``rows`` is to a change.
            fewest: jobs that stay at least.
        """
        far = close.nearest > CLOSED
        stay = np.flatnonzero(~far)
        if not fewest < len(stay) < WORTH_CLOSING * len(far):
            return None
        gone = np.flatnonzero(far)
        self._before.append(
            _Earlier(rows=self.rows, index=self.index, least=self._least, greatest=self._greatest)
        )
        mixes = decided(self.rows, at, gone)
        self._remember(self.index[gone], mixes)
        self.rows = self.rows.take(
            stay, capacity=self.rows.capacity - mixes.used, lift=self.rows.lift + mixes.growth
        )
        self.index = self.index[stay]
        self._least = np.maximum(self._least, at.prices - CLOSED * box.prices)
        self._greatest = np.minimum(self._greatest, at.prices + CLOSED * box.prices)
        return stay

    def readmit(self, least: np.ndarray, greatest: np.ndarray) -> bool:
        """Take those jobs back that may change between these prices (k,); whether there were any."""
        changed = False
        while (least < self._least).any() or (greatest > self._greatest).any():
            changed = True
            if not self._before:
                self.reopen()
                break
            last = self._before.pop()
            self.rows, self.index = last.rows, last.index
            self._least, self._greatest = last.least, last.greatest
        return changed

    def reopen(self) -> None:
        """Take all jobs back."""
        self.rows, self.index = self.whole, np.arange(len(self.whole))
        self._least, self._greatest = np.full_like(self._least, -np.inf), np.full_like(self._greatest, np.inf)
        self._before.clear()
        if self.jitter:
            self.rows = _jittered(self.rows, self.jitter)

    def break_ties(self, usual: float) -> None:
        """Perturb the worth of all columns, relative to the ``usual`` price of a GPU."""
        self.jitter = JITTER * usual
        self.rows = _jittered(self.rows, self.jitter)
        self._before.clear()

    def remember(self, at: Response) -> None:
        """Note the mixes of the response as those of ``rows``."""
        self._remember(self.index, decided(self.rows, at, np.arange(len(self.rows))))

    def _remember(self, jobs: np.ndarray, mixes: Decided) -> None:
        self.low[jobs], self.high[jobs] = mixes.low, mixes.high
        self._at_zero[jobs], self._per_t[jobs] = mixes.at_zero, mixes.per_t

    def shares(self, t: float) -> np.ndarray:
        """(n, w + 1) shares of all jobs as noted."""
        share, everyone = self._at_zero + self._per_t * t, np.arange(len(self.whole))
        X = np.zeros(self.whole.rates.shape)
        X[everyone, self.low] = 1.0 - share
        X[everyone, self.high] = share
        return X


def _jittered(rows: Rows, most: float) -> Rows:
    noise = np.random.default_rng(SEED).uniform(0.0, most, rows.rates.shape)
    noise = np.asfortranarray(np.where(rows.usable, noise * rows.gpus[:, None], 0.0))
    noise[:, -1] = 0.0
    return dataclasses.replace(rows, value=noise if rows.value is None else rows.value + noise)
