"""Promised and received seconds of every entry of an allocation (a job alone, or a pair), as arrays.

An entry is known by a number made of its rows, by which its account is found again in the next allocation.
"""

import numpy as np

PARTNERS = 1 << 31
"""More than there are rows: a key is job x PARTNERS + partner + 1."""


def keys_of(job: np.ndarray, partner: np.ndarray) -> np.ndarray:
    """One number for each entry; ``partner`` -1: alone."""
    keys: np.ndarray = job.astype(np.int64) * PARTNERS + partner + 1
    return keys


class ShareAccounts:
    """ShareAccounts of the entries of one allocation after the other.

    Attributes (E entries, K GPU types, in the order in which the allocation was given):
        promised, received: (E, K) seconds.
        deficit: (E, K) seconds that earlier allocations have promised and not given.
    """

    def __init__(self, types: int) -> None:
        self._types = types
        self._keys = np.zeros(0, dtype=np.int64)
        self._order = np.zeros(0, dtype=np.int64)
        self._closed = np.zeros(0, dtype=np.int64)
        self._closed_values = np.zeros((0, 3, types))
        self.promised, self.received, self.deficit = (np.zeros((0, types)) for _ in range(3))

    def open(
        self, job: np.ndarray, partner: np.ndarray, *, done: np.ndarray, keep: bool, deficits: bool
    ) -> None:
        """A new allocation, of these entries.

        Args:
            job: (E,) rows of the entries.
            partner: (E,) rows of the jobs that share their GPUs, -1: none.
            done: (N,) whether a job is done, by row; its accounts are dropped.
            keep: continue promised and received; else begin at 0.
            deficits: what is still owed is added to the deficit.
        """
        values = np.stack([self.promised, self.received, self.deficit], axis=1)
        if deficits:
            values[:, 2] += values[:, 0] - values[:, 1]
        if not keep:
            values[:, :2] = 0.0
        known = np.concatenate([self._keys, self._closed])
        all_values = np.concatenate([values, self._closed_values])
        kept = np.flatnonzero(~done[known // PARTNERS] & ~_partner_done(known, done))
        known, all_values = known[kept], all_values[kept]
        order = np.argsort(known)
        known, all_values = known[order], all_values[order]
        fresh = keys_of(job, partner)
        at = positions(known, fresh)
        opened = np.zeros((len(fresh), 3, self._types))
        found = at >= 0
        opened[found] = all_values[at[found]]
        closed = np.ones(len(known), dtype=bool)
        closed[at[found]] = False
        self._closed, self._closed_values = known[closed], all_values[closed]
        self._keys, self._order = fresh, np.argsort(fresh)
        self.promised, self.received, self.deficit = (opened[:, i].copy() for i in range(3))

    def entries(self, job: np.ndarray, partner: np.ndarray) -> np.ndarray:
        """Position of each of these entries, -1 where the allocation does not have it."""
        at = positions(self._keys[self._order], keys_of(job, partner))
        found: np.ndarray = np.where(at >= 0, self._order[at] if len(self._order) else -1, -1)
        return found


def positions(known: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Positions of ``wanted`` in ``known``, which is sorted; -1: nowhere."""
    if not len(known):
        return np.full(len(wanted), -1)
    at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
    found: np.ndarray = np.where(known[at] == wanted, at, -1)
    return found


def _partner_done(keys: np.ndarray, done: np.ndarray) -> np.ndarray:
    partner = keys % PARTNERS - 1
    gone: np.ndarray = (partner >= 0) & done[np.maximum(partner, 0)]
    return gone
