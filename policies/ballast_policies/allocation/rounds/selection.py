"""Which claims are granted in a round: dissertation section 5.5, algorithm 2, on arrays.

A claim is a job (or a pair of jobs that share GPUs) on a column: a GPU type, or a pool of one.
Claims come in order of urgency; each is granted if its column still has room for its whole gang
and none of its jobs has been granted another.  The operator and the simulator both call
:func:`select`; many claims are decided in bulk, with the same result.
"""

import dataclasses

import numpy as np

BULK_FROM = 2000
"""So many claims are decided faster by array operations than in turn."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Parallel arrays of integers, the most urgent claim first.

    Attributes:
        job: index of the job.
        partner: index of the job that shares its GPUs, or -1.
        column: index of the column.
        gpus: size of the gang.
    """

    job: np.ndarray
    partner: np.ndarray
    column: np.ndarray
    gpus: np.ndarray

    def __len__(self) -> int:
        """How many claims."""
        return len(self.job)

    def take(self, positions: np.ndarray) -> "Claims":
        """The claims at ``positions`` (indices or a mask), in their order."""
        return Claims(
            job=self.job[positions],
            partner=self.partner[positions],
            column=self.column[positions],
            gpus=self.gpus[positions],
        )


def select(claims: Claims, room: np.ndarray) -> np.ndarray:
    """Positions of the granted claims, in their order; ``room``: GPUs of each column (not changed)."""
    if len(claims) < BULK_FROM or (claims.partner >= 0).any():
        return select_in_turn(claims, room)
    return select_in_bulk(claims, room)


def select_in_turn(claims: Claims, room: np.ndarray) -> np.ndarray:
    """One claim after the other: O(claims), the definition."""
    left = room.tolist()
    total = sum(left)
    taken: set[int] = set()
    granted = []
    rows = zip(
        claims.job.tolist(),
        claims.partner.tolist(),
        claims.column.tolist(),
        claims.gpus.tolist(),
        strict=True,
    )
    for position, (job, partner, column, gpus) in enumerate(rows):
        if gpus > left[column] or job in taken or partner in taken:
            continue
        granted.append(position)
        taken.add(job)
        if partner >= 0:
            taken.add(partner)
        left[column] -= gpus
        total -= gpus
        if total == 0:
            break
    return np.array(granted, dtype=np.int64)


def select_in_bulk(claims: Claims, room: np.ndarray) -> np.ndarray:
    """The same for claims without partners, a whole stretch at a time.

    Up to the first claim that does not fit, each job's first claim is granted.  That claim is then
    dropped, together with all that are too large for what is left of their column, and so on:
    a pass for each size and column that runs out.
    """
    left = np.array(room, dtype=np.int64)
    positions = np.flatnonzero(claims.gpus <= left[claims.column])
    granted: list[np.ndarray] = []
    while len(positions):
        job, column, gpus = claims.job[positions], claims.column[positions], claims.gpus[positions]
        _, first = np.unique(job, return_index=True)
        first.sort()
        over = len(positions)
        for c in range(len(left)):
            mine = first[column[first] == c]
            fits = int(np.searchsorted(np.cumsum(gpus[mine]), left[c], side="right"))
            if fits < len(mine):
                over = min(over, int(mine[fits]))
        now = first[first < over]
        left -= np.bincount(column[now], weights=gpus[now], minlength=len(left)).astype(np.int64)
        granted.append(positions[now])
        positions = positions[~np.isin(job, job[now]) & (gpus <= left[column])]
    if not granted:
        return np.zeros(0, dtype=np.int64)
    found: np.ndarray = np.sort(np.concatenate(granted))
    return found
