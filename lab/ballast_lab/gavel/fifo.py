"""Gavel's FIFO: whole GPUs strictly in order of arrival (its ``policies/fifo.py``).

Heterogeneity-aware: every job on the fastest type with room, decided again each time. Agnostic: a job keeps
its type, and the first waiting job replaces one that is done. New jobs should go to a random type with room,
but Gavel uses another variable than the one it draws: they go to the last type by name that has not been
struck off (v100), with room or without, and what is struck off when that is full is the drawn one.
With space sharing, a waiting job joins the running job with which it does most, if that is more than 1.5
jobs' worth. One thing differs: no job is put where it cannot run at all, which would never end.
"""

import random
from collections.abc import Callable

import numpy as np
from ballast_policies.simulator.ledger import Ledger

PACKING_THRESHOLD = 1.5


class Fifo:
    """Placement of each job, from one allocation to the next."""

    def __init__(
        self,
        ledger: Ledger,
        *,
        agnostic: bool,
        space_sharing: bool,
        seed: int,
        shared_rates: Callable[[int, int, int], tuple[float, float]],
    ) -> None:
        self._ledger = ledger
        self._agnostic, self._space_sharing = agnostic, space_sharing
        self._shared_rates = shared_rates
        self._kept: dict[int, int] = {}
        self._draw = random.Random(seed)
        self._by_name = np.argsort(ledger.gpu_types).tolist()

    def solve(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Job rows, partner rows (-1: alone), (entries, k) shares of 0 or 1."""
        ledger, present = self._ledger, rows.tolist()
        kept = self._kept if self._agnostic else {}
        queue = [row for row in present if row not in kept]
        room = ledger.capacity.tolist()
        self._take_over(kept, queue, room, set(present))
        open_ = [column for column in self._by_name if room[column] > 0]
        while queue and open_:
            row = queue.pop(0)
            gpus = int(ledger.gpus[row])
            fits = [column for column in open_ if room[column] >= gpus]
            runs = [column for column in open_ if ledger.rate[row, column] > 0]
            if not fits or not runs:
                queue.insert(0, row)
                break
            if self._agnostic:
                drawn, column = fits[self._draw.randrange(len(fits))], runs[-1]
            else:
                drawn = column = max(fits, key=lambda j: ledger.rate[row, j])
            kept[row] = column
            room[column] -= gpus
            if room[column] == 0:
                open_.remove(drawn)
        self._kept = kept
        partners = self._pack(kept, queue) if self._space_sharing else {}
        return self._as_shares(rows, kept, partners)

    def _take_over(self, kept: dict[int, int], queue: list[int], room: list[int], present: set[int]) -> None:
        """The first waiting jobs take the types of jobs that are done; the others keep theirs."""
        gpus = self._ledger.gpus
        for row in sorted(kept):
            column = kept[row]
            if row in present:
                room[column] -= int(gpus[row])
                continue
            if queue:
                follower = queue.pop(0)
                if gpus[follower] <= room[column] and self._ledger.rate[follower, column] > 0:
                    kept[follower] = column
                    room[column] -= int(gpus[follower])
            del kept[row]

    def _pack(self, kept: dict[int, int], queue: list[int]) -> dict[int, int]:
        """Waiting row -> running row that it joins; ends with the first row that suits no running one."""
        ledger, joined = self._ledger, {}
        alone = dict(kept)
        for row in queue:
            best, gain = None, PACKING_THRESHOLD
            for other, column in alone.items():
                if ledger.gpus[other] != ledger.gpus[row] or ledger.rate[row, column] <= 0:
                    continue
                of_other, of_row = self._shared_rates(other, row, column)
                together = of_other / ledger.rate[other, column] + of_row / ledger.rate[row, column]
                if together > gain:
                    best, gain = other, together
            if best is None:
                break
            joined[row] = best
            del alone[best]
        return joined

    def _as_shares(
        self, rows: np.ndarray, kept: dict[int, int], partners: dict[int, int]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        k = len(self._ledger.capacity)
        place = {row: at for at, row in enumerate(rows.tolist())}
        shares = np.zeros((len(rows) + len(partners), k))
        shared = set(partners.values())
        for row, column in kept.items():
            if row not in shared:
                shares[place[row], column] = 1.0
        for at, other in enumerate(partners.values()):
            shares[len(rows) + at, kept[other]] = 1.0
        ordered = [tuple(sorted((row, other))) for row, other in partners.items()]
        first, second = [pair[0] for pair in ordered], [pair[1] for pair in ordered]
        return (
            np.concatenate([rows, np.array(first, dtype=np.int64)]),
            np.concatenate([np.full(len(rows), -1), np.array(second, dtype=np.int64)]),
            shares,
        )
