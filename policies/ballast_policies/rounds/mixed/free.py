"""GPUs that a round leaves free, for gangs that may take them beside those of another pool.

- A gang that starts in one pool is started in two where that is faster by its least gain.
- A gang that waits for as many GPUs of one pool is started on those of several.
- At the end of a round a running gang is started elsewhere where that wins more than its restart costs.
"""

from collections import Counter
from collections.abc import Collection, Mapping

from ballast_policies.rounds.draft import Draft
from ballast_policies.rounds.explanations import Reason
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.hysteresis import keeps_free, within_min_run
from ballast_policies.rounds.mixed.options import best_parts
from ballast_policies.rounds.mixed.pools import AllPools
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Placement

MOST_GANGS = 64
"""Gangs that are considered in one decision, the most urgent first."""


class UseOfFree:
    """Changes ``placements`` and ``reasons`` of a round in place."""

    def __init__(
        self,
        question: Question,
        pools: AllPools,
        decided: Draft,
        placements: dict[str, Placement],
        reasons: dict[str, Reason],
        urgency: Mapping[str, float],
        kept: Mapping[str, int],
    ) -> None:
        self._q, self._pools = question, pools
        self._decided = decided
        self._placements = placements
        self._reasons = reasons
        self._urgency = urgency
        self._left = pools.free([at.nodes for at in placements.values()])
        self._left.subtract(kept)

    def give(self, without: Collection[str], moves_left: int) -> None:
        """Give them to all gangs but those ``without``; running ones within ``moves_left``."""
        q = self._q
        moves_left -= self._decided.changes.disturbed
        order = [job.name for job in q.jobs if job.name in q.mixed and job.name not in without]
        order.sort(key=lambda name: -self._urgency.get(name, 0.0))
        for name in order[:MOST_GANGS]:
            now, gang = self._placements.get(name), q.mixed[name]
            if name not in q.state.running:
                if not self._kept_for_others(name):
                    self._start(name, gang, now)
            elif now is not None and gang.may_move and moves_left > 0 and not q.settings.within_round:
                moves_left -= self._move(name, gang, now)

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
        if now is not None:
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
        own = () if now is None else now.nodes
        most = self._pools.tenant_room(name, self._placements, {})
        if most is not None:
            most += len(own)
        left = Counter(self._left)
        left.update(own)
        nodes = self._pools.open_nodes(gang, left)
        parts = best_parts(gang, self._pools.room_of(gang, nodes), above=above, most=most, one_pool=one_pool)
        return self._pools.placed(gang, parts, nodes)

    def _place(self, name: str, now: Placement | None, found: Placement, why: str) -> None:
        if now is not None:
            self._left.update(now.nodes)
        self._left.subtract(found.nodes)
        self._placements[name], self._reasons[name] = found, Reason(why)
