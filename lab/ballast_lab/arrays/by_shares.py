"""Rounds on arrays: the same priorities and the same selection as ``decide_round``.

A GPU type is one column; which node a gang gets does not change who is granted, so nodes are
left out. Gavel's own rules, where they differ, are switched by :class:`Rules`.
"""

import dataclasses
import random

import numpy as np
from ballast_policies.rounds.claims import SHARE_EPSILON, by_urgency, priorities
from ballast_policies.rounds.memory import forgetting
from ballast_policies.simulator.ledger import Ledger

from ballast_lab.arrays.rules import ArraySettings
from ballast_lab.arrays.share_accounts import ShareAccounts, positions
from ballast_lab.arrays.solving import Shares


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Parallel arrays of integers, the most urgent claim of a job, or of a pair on shared GPUs, first.

    Attributes:
        partner: row of the job that shares its GPUs, or -1.
    """

    job: np.ndarray
    partner: np.ndarray
    column: np.ndarray
    gpus: np.ndarray

    def __len__(self) -> int:
        return len(self.job)


def select(claims: Claims, room: np.ndarray) -> np.ndarray:
    """Positions of the granted claims, in their order; O(claims).

    ``room``: GPUs of each column; it is not changed.
    """
    left = room.tolist()
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
    return np.array(granted, dtype=np.int64)


GAVEL_TYPE_ORDER = ("v100", "p100", "k80")
SHUFFLER_STREAM = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """The gangs that run: parallel arrays of job rows, partners (-1: alone), columns."""

    job: np.ndarray
    partner: np.ndarray
    column: np.ndarray

    def without(self, done: np.ndarray) -> "Grant":
        """The gangs that still run; ``done``: by row. A job whose partner is done runs alone."""
        alive = ~done[self.job]
        left = (self.partner >= 0) & ~done[np.maximum(self.partner, 0)]
        kept = alive | left
        return Grant(
            job=np.where(alive, self.job, self.partner)[kept],
            partner=np.where(alive & left, self.partner, -1)[kept],
            column=self.column[kept],
        )


EMPTY_GRANT = Grant(
    job=np.zeros(0, dtype=np.int64), partner=np.zeros(0, dtype=np.int64), column=np.zeros(0, dtype=np.int64)
)


class SimulatedRounds:
    """ShareAccounts of one allocation after the other, and the grants that follow from them."""

    def __init__(self, ledger: Ledger, settings: ArraySettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._shuffler = random.Random(settings.seed + SHUFFLER_STREAM)
        # Gavel's FIFO leaves GPUs idle of which no job has a share; the operator's rounds do not.
        self._backfill = settings.policy != "fifo" or settings.rules.own_policies is None
        # The last tie of ``decide_round`` is the pool's name.
        self._by_name = np.argsort(np.argsort(ledger.gpu_types))
        k = len(ledger.gpu_types)
        self._shares = Shares(
            job=np.zeros(0, dtype=np.int64),
            partner=np.zeros(0, dtype=np.int64),
            share=np.zeros((0, k)),
            solve_seconds=0.0,
            status="",
        )
        self._accounts = ShareAccounts(k)

    def reset(self, shares: Shares) -> None:
        """Take new shares: continue the accounts or begin new ones, as the rules state."""
        rules = self._settings.rules
        self._shares = shares
        self._accounts.open(
            shares.job,
            shares.partner,
            done=self._ledger.done,
            keep=rules.keeps_accounts,
            deficits=rules.deficits,
        )

    def pass_time(self, grant: Grant, ran: np.ndarray, seconds: float) -> None:
        """Account for ``seconds`` in which the granted gangs ran for ``ran`` s each."""
        if self._settings.rules.keeps_accounts:
            kept = np.where(self._runs(grant), forgetting(seconds, self._settings.round_seconds), 1.0)
            self._accounts.promised *= kept[:, None]
            self._accounts.received *= kept[:, None]
        self._accounts.promised += self._shares.share * seconds
        entries = self._accounts.entries(grant.job, grant.partner)
        known = entries >= 0
        self._accounts.received[entries[known], grant.column[known]] += ran[known]

    def _runs(self, grant: Grant) -> np.ndarray:
        """(E,) entries of the allocation of which a job runs, alone or in any pair."""
        runs = np.zeros(self._ledger.count + 1, dtype=bool)
        runs[grant.job] = True
        runs[grant.partner[grant.partner >= 0]] = True
        # A partner of -1 reads the last place, which belongs to no job.
        entries: np.ndarray = runs[self._shares.job] | runs[self._shares.partner]
        return entries

    def fill(self, active: np.ndarray, running: Grant) -> Grant:
        """Grant within a round: running gangs continue, and others start on free GPUs."""
        ledger = self._ledger
        used = np.bincount(
            running.column, weights=ledger.gpus[running.job], minlength=len(ledger.capacity)
        ).astype(np.int64)
        room = ledger.capacity - used
        busy = np.sort(np.concatenate([running.job, running.partner[running.partner >= 0]]))
        waiting = active[positions(busy, active) < 0]
        if not room.any() or not len(waiting):
            return running
        more = self.grant(waiting, EMPTY_GRANT, room)
        return Grant(
            job=np.concatenate([running.job, more.job]),
            partner=np.concatenate([running.partner, more.partner]),
            column=np.concatenate([running.column, more.column]),
        )

    def grant(self, active: np.ndarray, running: Grant, room: np.ndarray) -> Grant:
        """Rows of ``active`` that run in the round that begins now.

        Args:
            active: rows of jobs that are not done.
            running: the gangs that ran until now.
            room: GPUs of each type to hand out.
        """
        ledger, rules, shares = self._ledger, self._settings.rules, self._shares
        # Rows are in order of arrival, so ``active`` is sorted.
        alive = (positions(active, shares.job) >= 0) & (
            (shares.partner < 0) | (positions(active, shares.partner) >= 0)
        )
        entries = np.flatnonzero(alive)
        has_entry = np.sort(shares.job[entries])
        newcomers = active[positions(has_entry, active) < 0]
        job = np.concatenate([shares.job[entries], newcomers])
        partner = np.concatenate([shares.partner[entries], np.full(len(newcomers), -1)])
        nothing = np.zeros((len(newcomers), len(ledger.gpu_types)))
        share = np.concatenate([shares.share[entries], nothing])
        promised = np.concatenate([self._accounts.promised[entries], nothing])
        received = np.concatenate([self._accounts.received[entries], nothing])
        deficit = np.concatenate([self._accounts.deficit[entries], nothing])
        usable = ledger.rate[job] > 0
        usable[partner >= 0] &= share[partner >= 0] > SHARE_EPSILON
        if not self._backfill:
            usable &= share > SHARE_EPSILON
        e, column = np.nonzero(usable)
        priority = priorities(share, promised, received, round_seconds=self._settings.round_seconds)[
            e, column
        ]
        order = self._order(job, share, received, deficit, priority, e, column, running)
        e, column = e[order], column[order]
        claims = Claims(job=job[e], partner=partner[e], column=column, gpus=ledger.gpus[job[e]])
        granted = select(claims, room)
        if rules.newcomers_block:
            granted = granted[positions(has_entry, claims.job[granted]) >= 0]
        return Grant(job=claims.job[granted], partner=claims.partner[granted], column=claims.column[granted])

    def _order(
        self,
        job: np.ndarray,
        share: np.ndarray,
        received: np.ndarray,
        deficit: np.ndarray,
        priority: np.ndarray,
        e: np.ndarray,
        column: np.ndarray,
        running: Grant,
    ) -> np.ndarray:
        ledger, rules = self._ledger, self._settings.rules
        if rules.by_type:
            rank = np.array(self._type_ranks())
            return by_urgency(
                -rank[column].astype(float),
                -priority.astype(np.float32),
                -deficit[e, column],
                -share[e, column],
                e,
            )
        rate = ledger.rate[job]
        speed = rate / np.maximum(rate.max(axis=1, keepdims=True), 1e-300)
        stays = np.zeros_like(share, dtype=bool)
        ran = np.argsort(running.job, kind="stable")
        at = positions(running.job[ran], job)
        known = np.flatnonzero(at >= 0)
        stays[known, running.column[ran][at[known]]] = True
        return by_urgency(
            priority,
            -share[e, column],
            received.sum(axis=1)[e],
            -speed[e, column],
            job[e],
            ~stays[e, column],
            self._by_name[column],
        )

    def _type_ranks(self) -> list[int]:
        """Position of each GPU type in the order in which Gavel serves them this round."""
        types = self._ledger.gpu_types
        order = [t for t in GAVEL_TYPE_ORDER if t in types]
        order += [t for t in types if t not in order]
        if self._settings.agnostic and self._settings.rules.shuffle_types:
            self._shuffler.shuffle(order)
        return [order.index(t) for t in types]
