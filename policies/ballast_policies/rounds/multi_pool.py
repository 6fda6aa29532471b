"""Gangs that may run in several pools: what is free at the end goes to those for which it is worth it.

Those that no pool holds, and those that run in several, were granted their least sizes (:mod:`.claims`) and
have grown (:mod:`.elastic`) beside the others. One that starts, or is started elsewhere, takes the fastest
division of what is free; one that waits for as many GPUs of one pool is started on those of several; at the
end of a round a running gang is started elsewhere where that wins more than its restart costs.
"""

import numpy as np

from ballast_policies.rounds.by_completion_time import grant_sizes
from ballast_policies.rounds.claims import priorities
from ballast_policies.rounds.divisions import best_parts, open_nodes, room_on
from ballast_policies.rounds.draft import Draft, Reason
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.hysteresis import keeps_free, moves_left, within_min_run
from ballast_policies.rounds.ledger import Ledger, pack
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Placement


def grant_multi_pool(question: Question) -> Draft:
    """Decide the round; without gangs that may run in several pools as ``grant_sizes`` does.

    A gang in several pools has whole pods and consecutive ranks in each.
    """
    decided = grant_sizes(question)
    return _Backfill(decided).draft() if question.mixed else decided


def _urgency(question: Question) -> dict[str, float]:
    """Job -> its priority over all columns together, as :func:`.priorities` has it for one."""
    jobs, state = question.jobs, question.state
    received = {job.name: sum(state.received.get(job.name, {}).values()) for job in jobs}
    running = (question.now - since for since in state.running_since.values())
    elapsed = max([question.settings.round_seconds, *received.values(), *running])
    share = np.array([sum(question.shares.get(job.name, {}).values()) for job in jobs])
    promised = share * elapsed
    if state.promised is not None:
        promised = np.array([sum(state.promised.get(job.name, {}).values()) for job in jobs])
    had = np.array([received[job.name] for job in jobs])
    found = priorities(share, promised, had, round_seconds=question.settings.round_seconds)
    return dict(zip(received, found.tolist(), strict=True))


MOST_GANGS = 64
"""Gangs that are considered in one decision, the most urgent first."""


class _Backfill:
    """The free GPUs of a round, as they are handed out."""

    def __init__(self, decided: Draft) -> None:
        self._q, self._decided, self._urgency = decided.question, decided, _urgency(decided.question)
        self._ledger = Ledger.of(self._q, decided.placements)
        self._placements, self._reasons = dict(decided.placements), dict[str, Reason]()

    def draft(self) -> Draft:
        """The round with what gangs take of them; running ones within the moves of the hour."""
        q, changes = self._q, self._decided.changes
        left = moves_left(q) - changes.disturbed
        order = [job.name for job in q.jobs if job.name in q.mixed]
        order.sort(key=lambda name: -self._urgency.get(name, 0.0))
        for name in order[:MOST_GANGS]:
            now, gang = self._placements.get(name), q.mixed[name]
            if name not in q.state.running or name in changes.moved:
                if not self._kept_for_others(name):
                    self._start(name, gang, now)
            elif now is not None and gang.may_move and left > 0 and not within_min_run(q, [name]):
                left -= self._move(name, gang, now)
        return self._decided.with_placements(self._placements, self._reasons)

    def _kept_for_others(self, name: str) -> bool:
        """Whether a more urgent gang waits for some that must not be disturbed: what is free may be its."""
        q = self._q
        if not keeps_free(q):
            return False
        if not within_min_run(q, q.state.running):
            return False
        mine = self._urgency.get(name, 0.0)
        waiting = (one.name for one in q.jobs if one.name not in self._placements and one.name != name)
        return any(self._urgency.get(one, 0.0) > mine for one in waiting)

    def _start(self, name: str, gang: MixedGang, now: Placement | None) -> None:
        here = 0.0 if now is None else self._speed(name, gang, now)
        found = self._found(name, gang, now, above=here * (1 + gang.min_gain))
        if found is None:
            return
        speed = gang.speed_at(found)
        why = f"{found}: no pool has as many free GPUs"
        if not gang.fits_one_pool:
            why = f"{found}: no single pool holds it"
        elif now is not None:
            why = f"{found}: {speed / here:.2f} times as fast as on {now} alone" if here else f"{found}"
        self._place(name, now, found, f"{why}; {speed:.3g} steps/s are predicted")

    def _move(self, name: str, gang: MixedGang, now: Placement) -> bool:
        """Whether the gang is started elsewhere."""
        q, here = self._q, self._speed(name, gang, now)
        stays = max(q.settings.round_seconds, q.now - q.state.running_since.get(name, q.now))
        worked = 1 - gang.restart_seconds / stays
        if here <= 0 or worked <= 0:
            return False
        above = here * (1 + gang.min_gain) / worked
        found = self._found(name, gang, now, above=above, one_pool=bool(now.parts))
        if found is None:
            return False
        speed = gang.speed_at(found)
        why = f"{found}: {speed / here:.2f} times as fast as on {now}, after a restart"
        self._place(
            name, now, found, f"{why} of {gang.restart_seconds:.0f} s; {speed:.3g} steps/s are predicted"
        )
        return True

    def _speed(self, name: str, gang: MixedGang, now: Placement) -> float:
        """Steps/s where it is placed; of an elastic gang in one pool, what is known of that size."""
        elastic = self._q.elastic.get(name)
        known = elastic.speed(now.gpu_type, len(now.nodes)) if elastic is not None and not now.parts else 0.0
        return known or gang.speed_at(now)

    def _found(
        self, name: str, gang: MixedGang, now: Placement | None, *, above: float, one_pool: bool = False
    ) -> Placement | None:
        """The gang where it is faster than ``above``, on as few nodes that exist as possible."""
        own, tenant, ledger = () if now is None else now.nodes, self._q.tenants.get(name, ""), self._ledger
        ledger.undo(own, tenant)
        nodes, most = open_nodes(gang, ledger), ledger.room_of(tenant)
        parts = best_parts(gang, room_on(nodes, gang, ledger), above=above, most=most, one_pool=one_pool)
        chosen: list[str] = []
        for part in parts:
            here = pack(part.gpus, nodes[part.pool], ledger.left, gang.per_pod) or ()
            ledger.take(here)
            chosen += here
        ledger.undo(chosen)
        ledger.take(own, tenant)
        if not parts or len(chosen) < sum(part.gpus for part in parts):
            return None
        first, several = parts[0], parts if len(parts) > 1 else ()
        return Placement(gpu_type=first.gpu_type, pool=first.pool, nodes=tuple(chosen), parts=several)

    def _place(self, name: str, now: Placement | None, found: Placement, why: str) -> None:
        tenant = self._q.tenants.get(name, "")
        if now is not None:
            self._ledger.undo(now.nodes, tenant)
        self._ledger.take(found.nodes, tenant)
        self._placements[name], self._reasons[name] = found, Reason(why)
