"""Gavel's AlloX: a job that has a GPU keeps it; waiting jobs are matched to places in queues of free GPUs.

The matching is AlloX's own (``policies/allox.py`` there): the i-th from last of a GPU's queue counts i
times, and the heads of the queues begin. All waiting jobs take part (alpha is 1 where Gavel's simulations
make the policy), and gangs are refused. Ours (``allocation.policies.allox``) matches all jobs again each
time, which moves running jobs to where they are faster.

One thing differs: Gavel also keeps it indefinitely that a job had no GPU; where the queue grows, no job
would end.
"""

import numpy as np
from ballast_policies.simulator.ledger import Ledger
from scipy.optimize import linear_sum_assignment


class AlloX:
    """Machine of each job, from one allocation to the next."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._kept: dict[int, int] = {}

    def solve(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Job rows, partner rows (-1: alone), (n, k) shares of 0 or 1."""
        ledger, present = self._ledger, rows.tolist()
        kept = {row: column for row, column in self._kept.items() if row in set(present)}
        room = ledger.capacity.astype(int)
        for column in kept.values():
            room[column] -= 1
        waiting = np.array([row for row in present if row not in kept], dtype=np.int64)
        if len(waiting) and room.sum():
            kept |= self._matched(waiting, room)
        self._kept = kept
        shares = np.zeros((len(rows), len(room)))
        place = {row: at for at, row in enumerate(present)}
        for row, column in kept.items():
            shares[place[row], column] = 1.0
        return rows, np.full(len(rows), -1), shares

    def _matched(self, waiting: np.ndarray, room: np.ndarray) -> dict[int, int]:
        """Job at the head of each queue -> GPU type."""
        ledger = self._ledger
        gpu = np.repeat(np.arange(len(room)), room)
        with np.errstate(divide="ignore"):
            seconds = ledger.left[waiting, None] / ledger.rate[waiting]
        seconds = np.where(np.isfinite(seconds), seconds, 1e15)[:, gpu]
        longest = -(-len(waiting) // len(gpu)) + 1
        _, chosen = linear_sum_assignment(
            np.concatenate([i * seconds for i in range(1, longest + 1)], axis=1)
        )
        heads: dict[int, tuple[int, int]] = {}
        for row, at in zip(waiting.tolist(), chosen.tolist(), strict=True):
            worker, from_last = at % len(gpu), at // len(gpu)
            if worker not in heads or from_last > heads[worker][0]:
                heads[worker] = (from_last, row)
        return {row: int(gpu[worker]) for worker, (_, row) in heads.items()}
