"""Gangs that may run in several pools at once.

1. Gangs that no single pool can hold, and those that run in several now, are deferred: the others' round is
   decided without them. Then it is their turn, the most urgent by their shares of all columns together first:
   each takes GPUs that are free; else, unless it runs, those of nodes that an autoscaler would add as well;
   else, with its least size, those that elastic gangs have beyond theirs and those of less urgent gangs. Who
   must not be disturbed keeps what it has. The others' round is decided again on the rest.
2. GPUs that are still free go to gangs for which a second pool is worth it: one that starts in one pool is
   started in two where that is faster by its least gain; one that waits for as many GPUs of one pool is
   started on those of several; at the end of a round a running gang is started elsewhere where that wins more
   than its restart costs.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ballast_policies.rounds.claims import priorities
from ballast_policies.rounds.divisions import best_parts
from ballast_policies.rounds.draft import Draft
from ballast_policies.rounds.elastic import grant_elastic
from ballast_policies.rounds.explanations import Reason
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.hysteresis import exempt_newest, keeps_free, moves_left, within_min_run
from ballast_policies.rounds.packing import has_room, in_its_pools, pack
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, PoolPart


class _AllPools:
    """The pools of a question, taken together."""

    def __init__(self, question: Question) -> None:
        self._q = question

    def urgency(self) -> dict[str, float]:
        """Job -> its priority over all columns together, as :func:`.priorities` has it for one."""
        q = self._q
        received = {job.name: sum(q.state.received.get(job.name, {}).values()) for job in q.jobs}
        running = (q.now - since for since in q.state.running_since.values())
        elapsed = max([q.settings.round_seconds, *received.values(), *running])
        share = np.array([sum(q.shares.get(job.name, {}).values()) for job in q.jobs])
        promised = share * elapsed
        if q.state.promised is not None:
            promised = np.array([sum(q.state.promised.get(job.name, {}).values()) for job in q.jobs])
        had = np.array([received[job.name] for job in q.jobs])
        found = priorities(share, promised, had, round_seconds=q.settings.round_seconds)
        return dict(zip(received, found.tolist(), strict=True))

    def free(self, used: Sequence[Sequence[str]]) -> Counter[str]:
        """Node -> GPUs that are left of it, by the nodes of gangs."""
        left = Counter({node.name: node.gpus for node in self._q.nodes})
        for nodes in used:
            left.subtract(nodes)
        return left

    def open_nodes(
        self, gang: MixedGang, left: Mapping[str, int], *, provisionable: bool = False
    ) -> list[Node]:
        """Nodes on which the gang may be started, with their free GPUs; those to come only where asked."""
        return [
            dataclasses.replace(node, gpus=left[node.name])
            for node in self._q.nodes
            if (provisionable or not node.provisionable)
            and not node.closed
            and node.group not in gang.barred
            and left[node.name] > 0
        ]

    def room_of(self, gang: MixedGang, nodes: Sequence[Node]) -> dict[str, tuple[str, int]]:
        """Pool -> (its GPU type, free GPUs of ``nodes`` in whole pods of the gang)."""
        found: dict[str, tuple[str, int]] = {}
        for node in nodes:
            before = found.get(node.pool, (node.gpu_type, 0))[1]
            found[node.pool] = node.gpu_type, before + node.gpus // gang.per_pod * gang.per_pod
        return found

    def placed(self, gang: MixedGang, parts: Sequence[PoolPart], nodes: Sequence[Node]) -> Placement | None:
        """The gang in ``parts`` on ``nodes``, as few of them as possible; None: it has no parts."""
        free, chosen = {node.name: node.gpus for node in nodes}, list[str]()
        for part in parts:
            here = pack(part.gpus, [node for node in nodes if node.pool == part.pool], free, gang.per_pod)
            if here is None:
                return None
            chosen += here
        if not parts:
            return None
        return Placement(
            gpu_type=parts[0].gpu_type,
            pool=parts[0].pool,
            nodes=tuple(chosen),
            parts=tuple(parts) if len(parts) > 1 else (),
        )

    def tenant_room(
        self, name: str, placements: Mapping[str, Placement], more: Mapping[str, Placement]
    ) -> int | None:
        """GPUs that its tenant may still be given besides ``placements`` and ``more``; None: no limit."""
        tenant = self._q.tenants.get(name, "")
        if tenant not in self._q.room:
            return None
        used = 0
        for other, at in {**placements, **more}.items():
            if self._q.tenants.get(other, "") != tenant:
                continue
            runs = other in self._q.state.running and other not in self._q.pending
            before = self._q.least(other, self._q.state.running[other]) if runs else ()
            used += len(at.nodes) - len(before)
        return max(0, self._q.room[tenant] - used)

    def waits_for(self, gang: MixedGang, left: Mapping[str, int]) -> str:
        """What a gang lacks that waits for GPUs of several pools."""
        room = self.room_of(gang, self.open_nodes(gang, left, provisionable=True))
        types = {node.pool: node.gpu_type for node in self._q.nodes if gang.relative(node.gpu_type) > 0}
        has = [
            f"{room.get(pool, ('', 0))[1]} {kind} free in pool {pool}" for pool, kind in sorted(types.items())
        ]
        return f"waits for {gang.sizes[0]} GPUs of its pools together: {'; '.join(has) or 'it may use none'}"


MOST_GANGS = 64
"""Gangs that are considered in one decision, the most urgent first."""


class _Backfill:
    """Changes ``placements`` and ``reasons`` of a round in place."""

    def __init__(
        self,
        question: Question,
        pools: _AllPools,
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


MOST_TURNS = 64
"""Gangs in several pools that are considered in one decision, the most urgent first; all that run are."""

Holds = Callable[[Mapping[str, int]], bool]
"""Whether the GPUs that are left of each node are enough."""


def grant_multi_pool(question: Question) -> Draft:
    """Decide the round; without gangs that may run in several pools as ``grant_elastic`` does.

    A gang in several pools has whole pods and consecutive ranks in each, and keeps its size until it is
    launched again.
    """
    if not question.mixed and not any(at.parts for at in question.state.running.values()):
        return grant_elastic(question)
    return _MultiPoolPlacer(question).round()


class _MultiPoolPlacer:
    """The turns of the gangs that stand back from the others' round."""

    def __init__(self, question: Question) -> None:
        q = self._q = question
        self._pools = _AllPools(question)
        state, names = q.state, [job.name for job in q.jobs]
        self._order = {name: number for number, name in enumerate(names)}
        spread = {name: at for name, at in state.running.items() if at.parts and name in self._order}
        nodes = {node.name: node for node in q.nodes}
        free = {name: node.gpus for name, node in nodes.items()}
        self._held: dict[str, Placement] = {}
        for name in sorted(spread, key=lambda name: (state.running_since.get(name, 0.0), name)):
            if in_its_pools(spread[name], nodes) and has_room(spread[name], free):
                for node in spread[name].nodes:
                    free[node] -= 1
                self._held[name] = spread[name]
        too_large = {
            name for name, gang in q.mixed.items() if not gang.fits_one_pool and name not in state.running
        }
        self._deferred = {*spread, *(too_large & self._order.keys())}
        self._urgency = self._pools.urgency()
        self._protected = within_min_run(q, state.running)
        self._moves_left = moves_left(q)
        self._moves = 0
        self._placed: dict[str, Placement] = {}
        self._reasons: dict[str, Reason] = {}
        self._stops: set[str] = set()
        self._kept: Counter[str] = Counter()

    def round(self) -> Draft:
        """The decision."""
        q = self._q
        pinned = {name: why for name, why in self._protected.items() if name in self._held}
        others = {name: at for name, at in self._held.items() if name not in pinned}
        if len(others) > self._moves_left:
            why = f"is not stopped: moves.maxMovesPerHour={q.settings.max_moves_per_hour} is reached"
            pinned |= exempt_newest(others, q.state, self._moves_left, why)
        for name, why in pinned.items():
            self._place(name, self._held[name], f"keeps {self._held[name]}: it {why}")
        first = decided = grant_elastic(q.without(self._deferred, self._taken()))
        turns = sorted(
            self._deferred - self._placed.keys(),
            key=lambda name: (-self._urgency.get(name, 0.0), name not in self._held, self._order[name]),
        )
        for number, name in enumerate(turns):
            if number < MOST_TURNS or name in self._held:
                self._turn(name, first)
        if len(self._placed) > len(pinned) or self._kept:
            taken, tenants = self._taken() + self._kept, self._of_tenants()
            decided = grant_elastic(q.without(self._deferred, taken, moves=self._moves, tenants=tenants))
        placements = {**decided.placements, **self._placed}
        reasons = {**decided.reasons, **self._reasons}
        use = _Backfill(q, self._pools, decided, placements, reasons, self._urgency, self._kept)
        use.give(self._deferred - self._placed.keys(), self._moves_left - self._moves)
        return Draft(question=q, placements=placements, reasons=reasons)

    def _place(self, name: str, placement: Placement, why: str) -> None:
        self._placed[name], self._reasons[name] = placement, Reason(why)

    def _taken(self) -> Counter[str]:
        taken: Counter[str] = Counter()
        for placement in self._placed.values():
            taken.update(placement.nodes)
        return taken

    def _of_tenants(self) -> Counter[str]:
        """Tenant -> GPUs that its gangs have been given here."""
        found: Counter[str] = Counter()
        for name, placement in self._placed.items():
            if name not in self._q.state.running or name in self._q.pending:
                found[self._q.tenants.get(name, "")] += len(placement.nodes)
        return found

    def _turn(self, name: str, first: Draft) -> None:
        held, gang = self._held.get(name), self._q.mixed.get(name)
        others = {other: at for other, at in first.placements.items() if other not in self._stops}
        mine = [at.nodes for at in self._placed.values()]
        least = {other: self._q.least(other, at) for other, at in others.items()}
        left = self._pools.free([*least.values(), *mine])
        left.subtract(self._kept)
        if held is not None:
            stops = self._to_stop(name, least, left, lambda left: has_room(held, left))
            if stops is not None:
                self._stop(stops)
                self._place(name, held, f"stays on {held}")
                return
        if gang is None or (held is not None and self._moves >= self._moves_left):
            self._reasons[name] = Reason("more urgent jobs need its GPUs")
            return
        most = self._pools.tenant_room(name, first.placements, self._placed)
        if most is not None and held is not None:
            most += len(held.nodes)
        unused = self._pools.free([*(at.nodes for at in others.values()), *mine])
        unused.subtract(self._kept)
        found = self._found(gang, unused, most)
        if found is None and held is None:
            found = self._found(gang, unused, most, provisionable=True)
        if found is None:
            small = dataclasses.replace(gang, sizes=gang.sizes[:1])

            def holds(left: Mapping[str, int]) -> bool:
                return self._found(small, left, most) is not None

            stops = self._to_stop(name, least, left, holds)
            if stops is not None:
                self._stop(stops)
                found = self._found(small, left + Counter(n for one in stops for n in least[one]), most)
            elif not self._kept:
                self._keep_for(name, gang, least, left, unused, holds)
        if found is not None:
            self._moves += held is not None
            why = f"{found}: no single pool holds it" if not gang.fits_one_pool else f"{found}"
            self._place(name, found, f"{why}; {gang.speed_at(found):.3g} steps/s are predicted")
            return
        self._reasons[name] = Reason(self._pools.waits_for(gang, unused))

    def _found(
        self, gang: MixedGang, left: Mapping[str, int], most: int | None, *, provisionable: bool = False
    ) -> Placement | None:
        nodes = self._pools.open_nodes(gang, left, provisionable=provisionable)
        return self._pools.placed(gang, best_parts(gang, self._pools.room_of(gang, nodes), most=most), nodes)

    def _stop(self, stops: Collection[str]) -> None:
        self._stops |= set(stops)
        self._moves += self._running(stops)

    def _running(self, names: Collection[str]) -> int:
        return sum(name in self._q.state.running and name not in self._q.pending for name in names)

    def _to_stop(
        self, name: str, least: Mapping[str, tuple[str, ...]], left: Counter[str], holds: Holds
    ) -> list[str] | None:
        """Less urgent gangs without which ``holds``, as few as possible; None: there are none such."""
        if holds(left):
            return []
        mine, left, stops = self._urgency.get(name, 0.0), left.copy(), []
        less = [
            other
            for other in least
            if self._urgency.get(other, 0.0) < mine * (1 - 1e-6) and other not in self._protected
        ]
        less.sort(key=lambda other: (self._urgency.get(other, 0.0), -self._order[other]))
        for other in less:
            left.update(least[other])
            stops.append(other)
        if not holds(left):
            return None
        for other in reversed(stops.copy()):  # the most urgent stay where the others are enough
            left.subtract(least[other])
            if holds(left):
                stops.remove(other)
            else:
                left.update(least[other])
        return stops if self._moves + self._running(stops) <= self._moves_left else None

    def _keep_for(
        self,
        name: str,
        gang: MixedGang,
        least: Mapping[str, tuple[str, ...]],
        left: Counter[str],
        unused: Mapping[str, int],
        holds: Holds,
    ) -> None:
        """Keep what is free for the gang, if it waits only for gangs that must not be disturbed.

        Less urgent gangs do not start there; those that run continue.
        """
        q, mine, without = self._q, self._urgency.get(name, 0.0), left.copy()
        free = Counter(unused)
        for other, nodes in least.items():
            if self._urgency.get(other, 0.0) < mine * (1 - 1e-6):
                without.update(nodes)
                if other not in q.state.running:
                    free.update(nodes)
        if keeps_free(q) and holds(without):
            self._kept = Counter({node.name: node.gpus for node in self._pools.open_nodes(gang, free)})
