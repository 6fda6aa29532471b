"""Gavel's Gandiva: random pairs that stay together, equal time for all (its ``policies/gandiva.py``).

A pair is made where the jobs do not all fit, and is given up when one of the two is done or when the two
do less together, summed over all types, than one alone on one of them.
"""

import random
from collections.abc import Callable

import numpy as np
from ballast_policies.simulator.ledger import Ledger


class Gandiva:
    """The pairs, from one allocation to the next."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        seed: int,
        shared_rates: Callable[[int, int, int], tuple[float, float]],
    ) -> None:
        self._ledger, self._shared_rates = ledger, shared_rates
        self._draw = random.Random(seed)
        self._partner: dict[int, int] = {}
        """Row -> its partner, or itself where it stays alone."""

    def solve(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Job rows, partner rows (-1: alone), (entries, k) shares."""
        ledger, present = self._ledger, set(rows.tolist())
        for row, other in list(self._partner.items()):
            # A job on its own counts as "less than one": it may be paired again each time.
            if row not in present or other not in present or row == other or self._gain(row, other) < 1.0:
                self._partner.pop(row, None)
                self._partner.pop(other, None)
        if ledger.gpus[rows].sum() <= ledger.capacity.sum():
            return self._equal_time([(row, -1) for row in rows.tolist()])
        self._pair_up([row for row in rows.tolist() if row not in self._partner])
        units = [(row, -1 if other == row else other) for row, other in self._partner.items() if row <= other]
        return self._equal_time(sorted(units))

    def _pair_up(self, free: list[int]) -> None:
        for _ in range(len(free)):
            if len(free) < 2:
                break
            one, other = self._draw.sample(free, 2)
            if self._ledger.gpus[one] != self._ledger.gpus[other]:
                continue
            free.remove(one)
            free.remove(other)
            self._partner[one], self._partner[other] = other, one
        for row in free:
            self._partner[row] = row

    def _gain(self, row: int, other: int) -> float:
        """Relative speeds of the two together, summed over all types; 0 where they do not fit on one."""
        total, rate = 0.0, self._ledger.rate
        for column in range(len(self._ledger.capacity)):
            together = self._shared_rates(row, other, column)
            if min(together) <= 0 or min(rate[row, column], rate[other, column]) <= 0:
                return 0.0
            total += together[0] / rate[row, column] + together[1] / rate[other, column]
        return total

    def _equal_time(self, units: list[tuple[int, int]]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        ledger = self._ledger
        job = np.array([row for row, _ in units], dtype=np.int64)
        partner = np.array([other for _, other in units], dtype=np.int64)
        shares = ledger.capacity[None, :] / (len(units) * ledger.gpus[job][:, None])
        shares = shares / np.maximum(1.0, shares.sum(axis=1, keepdims=True))
        for at, (row, other) in enumerate(units):
            if other >= 0:
                for column in range(len(ledger.capacity)):
                    if min(self._shared_rates(row, other, column)) <= 0:
                        shares[at, column] = 0.0
        paired = np.concatenate([job[partner >= 0], partner[partner >= 0]])
        # Who is in a pair may still run alone where GPUs would idle.
        return (
            np.concatenate([job, paired]),
            np.concatenate([partner, np.full(len(paired), -1)]),
            np.concatenate([shares, np.zeros((len(paired), shares.shape[1]))]),
        )
