"""Rounds over the ledger: the same priorities and the same selection as ``decide_round``, on arrays.

A GPU type is one column here; which node a gang gets has no influence on its speed, so nodes are
left out. Gavel's own rules, where they differ, are switched by :class:`Rules`.
"""

import dataclasses
import random

import numpy as np

from ballast_policies.allocation.rounds.account import forgetting
from ballast_policies.allocation.rounds.priority import SHARE_EPSILON, by_urgency, priorities
from ballast_policies.allocation.rounds.selection import Claims, select
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.settings import Settings
from ballast_policies.simulator.solving import Shares

GAVEL_TYPE_ORDER = ("v100", "p100", "k80")
SHUFFLER_STREAM = 5


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grant:
    """Who runs: parallel arrays of job rows, partners (-1: alone), columns."""

    job: np.ndarray
    partner: np.ndarray
    column: np.ndarray

    def without(self, done: np.ndarray) -> "Grant":
        """Those that still run; ``done``: by row. Who has lost a partner runs alone."""
        alive = ~done[self.job]
        left = (self.partner >= 0) & ~done[np.maximum(self.partner, 0)]
        kept = alive | left
        return Grant(
            job=np.where(alive, self.job, self.partner)[kept],
            partner=np.where(alive & left, self.partner, -1)[kept],
            column=self.column[kept],
        )


NOBODY = Grant(
    job=np.zeros(0, dtype=np.int64), partner=np.zeros(0, dtype=np.int64), column=np.zeros(0, dtype=np.int64)
)


class Rounds:
    """Accounts of one allocation after the other, and the grants that follow from them."""

    def __init__(self, ledger: Ledger, settings: Settings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._shuffler = random.Random(settings.seed + SHUFFLER_STREAM)
        self._backfill = settings.policy != "fifo"
        # ``decide_round`` has its pools by name, so that is the last tie here too.
        self._by_name = np.argsort(np.argsort(ledger.gpu_types))
        k = len(ledger.gpu_types)
        self._shares = Shares(
            job=np.zeros(0, dtype=np.int64),
            partner=np.zeros(0, dtype=np.int64),
            share=np.zeros((0, k)),
            solve_seconds=0.0,
            status="",
        )
        self._received = np.zeros((0, k))
        self._deficit: dict[tuple[int, int], np.ndarray] = {}
        self._entry: dict[tuple[int, int], int] = {}
        self._promised = np.zeros((0, k))
        self._closed: dict[tuple[int, int], np.ndarray] = {}

    def reset(self, shares: Shares) -> None:
        """Shares have changed: go on with the accounts, or begin new ones, as the rules say."""
        rules, zero = self._settings.rules, np.zeros((2, len(self._ledger.gpu_types)))
        for key, entry in self._entry.items():
            if rules.account_goes_on:
                self._closed[key] = np.stack([self._promised[entry], self._received[entry]])
            elif rules.deficits:
                short = self._promised[entry] - self._received[entry]
                self._deficit[key] = self._deficit.get(key, 0.0) + short
        keys = list(zip(shares.job.tolist(), shares.partner.tolist(), strict=True))
        self._shares = shares
        self._entry = {key: entry for entry, key in enumerate(keys)}
        opened = np.array([self._closed.pop(key, zero) for key in keys]).reshape(len(keys), *zero.shape)
        self._promised, self._received = opened[:, 0].copy(), opened[:, 1].copy()

    def pass_time(self, grant: Grant, ran: np.ndarray, seconds: float) -> None:
        """Book that ``seconds`` have passed, in which the granted ran for ``ran`` s."""
        if self._settings.rules.account_goes_on:
            kept = forgetting(seconds, self._settings.round_seconds)
            self._promised *= kept
            self._received *= kept
        self._promised += self._shares.share * seconds
        keys = zip(grant.job.tolist(), grant.partner.tolist(), strict=True)
        entries = np.array([self._entry.get(key, -1) for key in keys], dtype=np.int64)
        known = entries >= 0
        self._received[entries[known], grant.column[known]] += ran[known]

    def fill(self, active: np.ndarray, running: Grant) -> Grant:
        """Within a round: who runs goes on, and others start on what is free."""
        ledger = self._ledger
        used = np.bincount(
            running.column, weights=ledger.gpus[running.job], minlength=len(ledger.capacity)
        ).astype(np.int64)
        room = ledger.capacity - used
        busy = np.zeros(ledger.count, dtype=bool)
        busy[running.job] = True
        busy[running.partner[running.partner >= 0]] = True
        waiting = active[~busy[active]]
        if not room.any() or not len(waiting):
            return running
        more = self.grant(waiting, NOBODY, room)
        return Grant(
            job=np.concatenate([running.job, more.job]),
            partner=np.concatenate([running.partner, more.partner]),
            column=np.concatenate([running.column, more.column]),
        )

    def grant(self, active: np.ndarray, running: Grant, room: np.ndarray) -> Grant:
        """Who of the ``active`` rows runs in the round that begins now.

        Args:
            active: rows of jobs that are not done.
            running: who ran until now.
            room: GPUs of each type to hand out.
        """
        ledger, rules, shares = self._ledger, self._settings.rules, self._shares
        alive = np.zeros(ledger.count + 1, dtype=bool)
        alive[active] = True
        alive[-1] = True  # what partner -1 refers to
        entries = np.flatnonzero(alive[shares.job] & alive[shares.partner])
        has_entry = np.zeros(ledger.count, dtype=bool)
        has_entry[shares.job[entries]] = True
        newcomers = active[~has_entry[active]]
        job = np.concatenate([shares.job[entries], newcomers])
        partner = np.concatenate([shares.partner[entries], np.full(len(newcomers), -1)])
        nothing = np.zeros((len(newcomers), len(ledger.gpu_types)))
        share = np.concatenate([shares.share[entries], nothing])
        promised = np.concatenate([self._promised[entries], nothing])
        received = np.concatenate([self._received[entries], nothing])
        usable = ledger.rate[job] > 0
        usable[partner >= 0] &= share[partner >= 0] > SHARE_EPSILON
        if not self._backfill:
            usable &= share > SHARE_EPSILON
        e, column = np.nonzero(usable)
        priority = priorities(share, promised, received, round_seconds=self._settings.round_seconds)[
            e, column
        ]
        order = self._order(job, partner, share, received, priority, e, column, running)
        e, column = e[order], column[order]
        claims = Claims(job=job[e], partner=partner[e], column=column, gpus=ledger.gpus[job[e]])
        granted = select(claims, room)
        if rules.newcomers_block:
            granted = granted[has_entry[claims.job[granted]]]
        return Grant(job=claims.job[granted], partner=claims.partner[granted], column=claims.column[granted])

    def _order(
        self,
        job: np.ndarray,
        partner: np.ndarray,
        share: np.ndarray,
        received: np.ndarray,
        priority: np.ndarray,
        e: np.ndarray,
        column: np.ndarray,
        running: Grant,
    ) -> np.ndarray:
        ledger, rules = self._ledger, self._settings.rules
        if rules.by_type:
            rank = np.array(self._type_ranks())
            zero = np.zeros(len(ledger.gpu_types))
            keys = zip(job.tolist(), partner.tolist(), strict=True)
            deficit = np.array([self._deficit.get(key, zero) for key in keys]).reshape(share.shape)
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
        where = np.full(ledger.count, -1)
        where[running.job] = running.column
        at = where[job]
        stays[np.flatnonzero(at >= 0), at[at >= 0]] = True
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
