"""Gangs that may run in several pools at once.

1. Gangs that no single pool can hold, and those that run in several now, are deferred: the others' round is
   decided without them. Then it is their turn, the most urgent by their shares of all columns together first:
   each takes GPUs that are free; else, unless it runs, those of nodes that an autoscaler would add as well;
   else, with its least size, those that elastic gangs have beyond theirs and those of less urgent gangs. Who
   must not be disturbed keeps what it has. The others' round is decided again on the rest.
2. GPUs that are still free go to gangs for which a second pool is worth it: one that starts in one pool is
   started in two where that is faster by its least gain; one that waits for as many GPUs of one pool is
   started on those of several; at the end of a round a running gang is started elsewhere where that wins more
   than its restart costs. One that runs in several takes more in the pool of its last ranks, live.
3. Where gangs would wait, or be disturbed, that need not be if those in several pools had fewer GPUs, these
   give back live what is needed, from their last ranks on.
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from ballast_policies.rounds.by_completion_time import grant_sizes
from ballast_policies.rounds.claims import priorities
from ballast_policies.rounds.divisions import best_parts
from ballast_policies.rounds.draft import Draft, Reason
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.hysteresis import exempt_newest, keeps_free, moves_left, within_min_run
from ballast_policies.rounds.ledger import Ledger, in_its_pools, pack
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement


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


def _open_nodes(gang: MixedGang, ledger: Ledger, *, provisionable: bool = False) -> list[Node]:
    """Nodes on which the gang may be started, with their free GPUs; those to come only where asked."""
    return [
        dataclasses.replace(node, gpus=ledger.left[node.name])
        for node in ledger.nodes.values()
        if (provisionable or not node.provisionable)
        and not node.closed
        and node.group not in gang.barred
        and ledger.left[node.name] > 0
    ]


def _free_by_pool(gang: MixedGang, nodes: Sequence[Node]) -> dict[str, tuple[str, int]]:
    """Pool -> (its GPU type, free GPUs of ``nodes`` in whole pods of the gang)."""
    found: dict[str, tuple[str, int]] = {}
    for node in nodes:
        before = found.get(node.pool, (node.gpu_type, 0))[1]
        found[node.pool] = node.gpu_type, before + node.gpus // gang.per_pod * gang.per_pod
    return found


def _fastest(
    gang: MixedGang,
    ledger: Ledger,
    most: float,
    *,
    above: float = 0.0,
    one_pool: bool = False,
    provisionable: bool = False,
) -> Placement | None:
    """The gang where it is fastest on what is left, on as few nodes as possible; None: nowhere.

    Args:
        gang: that is to be placed.
        ledger: what is left.
        most: GPUs, at most.
        above: steps/s that it has to exceed.
        one_pool: one pool alone is looked at as well.
        provisionable: so are nodes that do not exist yet.
    """
    nodes = _open_nodes(gang, ledger, provisionable=provisionable)
    parts = best_parts(gang, _free_by_pool(gang, nodes), above=above, most=most, one_pool=one_pool)
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


def _waits_for(gang: MixedGang, ledger: Ledger) -> Reason:
    """What a gang lacks that waits for GPUs of several pools."""
    room = _free_by_pool(gang, _open_nodes(gang, ledger, provisionable=True))
    types = {node.pool: node.gpu_type for node in ledger.nodes.values() if gang.relative(node.gpu_type) > 0}
    has = [f"{room.get(pool, ('', 0))[1]} {kind} free in pool {pool}" for pool, kind in sorted(types.items())]
    return Reason(
        f"waits for {gang.sizes[0]} GPUs of its pools together: {'; '.join(has) or 'it may use none'}"
    )


MOST_GANGS = 64
"""Gangs that are considered in one decision, the most urgent first."""


class _Backfill:
    """Changes ``placements`` and ``reasons`` of a round in place."""

    def __init__(
        self,
        question: Question,
        placements: dict[str, Placement],
        reasons: dict[str, Reason],
        urgency: Mapping[str, float],
        ledger: Ledger,
    ) -> None:
        self._q, self._placements, self._reasons = question, placements, reasons
        self._urgency, self._ledger = urgency, ledger

    def give(self, without: Collection[str], moves_left: int) -> None:
        """Give them to all gangs but those ``without``; running ones within ``moves_left``."""
        q = self._q
        order = [job.name for job in q.jobs if job.name in q.mixed and job.name not in without]
        order.sort(key=lambda name: -self._urgency.get(name, 0.0))
        for name in order[:MOST_GANGS]:
            now, gang = self._placements.get(name), q.mixed[name]
            if name not in q.state.running:
                if not self._kept_for_others(name):
                    self._start(name, gang, now)
            elif now is None or self._grow(name, gang, now):
                continue
            elif gang.may_move and moves_left > 0 and not within_min_run(q, [name]):
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

    def _grow(self, name: str, gang: MixedGang, now: Placement) -> bool:
        """Whether the gang takes more GPUs where its last ranks are, without a restart."""
        if not gang.may_grow or not now.parts or gang.planned or now != self._q.state.running[name]:
            return False
        if self._kept_for_others(name):
            return False
        q, alike = self._q, dataclasses.replace(gang, measured={})  # sizes compare as they are predicted
        pool, here = now.by_pool[-1].pool, alike.speed_at(now)
        worked = 1 - gang.pause_seconds / max(1.0, q.sizes.stay_rounds * q.settings.round_seconds)
        nodes = [node for node in _open_nodes(gang, self._ledger) if node.pool == pool]
        free = {node.name: node.gpus for node in nodes}
        found, fastest = None, here * (1 + q.sizes.least_growth) / max(worked, 1e-9)
        for size in gang.sizes:
            more = size - len(now.nodes)
            if more <= 0 or more % gang.together or more > self._ledger.room_of(q.tenants.get(name, "")):
                continue
            taken = pack(more, nodes, free, gang.per_pod)
            if taken is not None and (speed := alike.speed_at(now.and_more(taken))) > fastest:
                found, fastest = now.and_more(taken), speed
        if found is None or here <= 0:
            return False
        self._place(name, now, found, f"{found}: {fastest / here:.2f} times as fast as on {now}")
        return True

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
        most = self._ledger.room_of(self._q.tenants.get(name, "")) + len(own)
        self._ledger.undo(own)
        found = _fastest(gang, self._ledger, most, above=above, one_pool=one_pool)
        self._ledger.take(own)
        return found

    def _place(self, name: str, now: Placement | None, found: Placement, why: str) -> None:
        tenant = self._q.tenants.get(name, "")
        if now is not None:
            self._ledger.undo(now.nodes, tenant)
        self._ledger.take(found.nodes, tenant)
        self._placements[name], self._reasons[name] = found, Reason(why)


MOST_TURNS = 64
"""Gangs in several pools that are considered in one decision, the most urgent first; all that run are."""


def grant_multi_pool(question: Question) -> Draft:
    """Decide the round; without gangs that may run in several pools as ``grant_sizes`` does.

    A gang in several pools has whole pods and consecutive ranks in each.
    """
    if not question.mixed and not any(at.parts for at in question.state.running.values()):
        return grant_sizes(question)
    return _with_what_others_need(question, _MultiPoolPlacer(question).round())


def _with_what_others_need(question: Question, whole: Draft) -> Draft:
    """The round in which gangs in several pools give back live what others need; else ``whole``."""
    least = {
        name: fewer[0]
        for name, at in question.state.running.items()
        if name in question.mixed and (fewer := question.mixed[name].smaller(at))
    }
    if not least or (len(whole.placements) == len(question.jobs) and not whole.changes.disturbed):
        return whole
    wanted = _round_with(question, least)
    if not _serves_more(wanted, whole):
        return whole
    others = {name: at for name, at in wanted.placements.items() if name not in least}
    left = Ledger(question.nodes, (question.least(name, at) for name, at in others.items()))
    kept: dict[str, Placement] = {}
    for name, smallest in least.items():
        held = question.state.running[name]
        fitting = [to for to in (*question.mixed[name].smaller(held), held) if left.holds(to.nodes)]
        kept[name] = fitting[-1] if fitting else smallest
        left.take(kept[name].nodes)
    given = _round_with(question, kept)
    if not _serves_more(given, whole):
        return whole
    new = ", ".join(sorted(given.placements.keys() - whole.placements.keys())[:3]) or "more urgent jobs"
    reasons, placements = dict(given.reasons), dict(given.placements)
    for name in least:
        now, was = given.placements.get(name), question.state.running[name]
        if now is not None and question.mixed[name].becomes(was, now):
            reasons[name] = Reason(f"stays on {now}; {new} can run on what it gives back of {was}")
            placements[name] = now if len(now.parts) > 1 else dataclasses.replace(now, parts=())
    return dataclasses.replace(given, placements=placements, reasons=reasons)


def _round_with(question: Question, running: Mapping[str, Placement]) -> Draft:
    """The round if these gangs held these first ranks alone, and kept that size."""
    fixed = {
        name: dataclasses.replace(question.mixed[name], may_grow=False, may_move=False) for name in running
    }
    state = dataclasses.replace(question.state, running={**question.state.running, **running})
    asked = dataclasses.replace(question, state=state, mixed={**question.mixed, **fixed})
    return dataclasses.replace(_MultiPoolPlacer(asked).round(), question=question)


def _serves_more(one: Draft, other: Draft) -> bool:
    """Whether the same gangs run, and more, or fewer of them are disturbed."""
    if not one.placements.keys() >= other.placements.keys():
        return False
    more = len(one.placements) > len(other.placements)
    return more or one.changes.disturbed < other.changes.disturbed


class _MultiPoolPlacer:
    """The turns of the gangs that stand back from the others' round."""

    def __init__(self, question: Question) -> None:
        q = self._q = question
        state, names = q.state, [job.name for job in q.jobs]
        self._order = {name: number for number, name in enumerate(names)}
        spread = {name: at for name, at in state.running.items() if at.parts and name in self._order}
        nodes = {node.name: node for node in q.nodes}
        ledger = Ledger(q.nodes)
        self._held: dict[str, Placement] = {}
        for name in sorted(spread, key=lambda name: (state.running_since.get(name, 0.0), name)):
            if in_its_pools(spread[name], nodes) and ledger.grant(spread[name].nodes):
                self._held[name] = spread[name]
        # Those of one pool that could stay where they are; what is granted and not held yet disturbs nobody.
        self._fitting = [
            name
            for name in self._order
            if name in state.running and name not in spread and name not in q.pending
            if ledger.grant(q.least(name, state.running[name]))
        ]
        too_large = {
            name for name, gang in q.mixed.items() if not gang.fits_one_pool and name not in state.running
        }
        self._deferred = {*spread, *(too_large & self._order.keys())}
        self._urgency = _urgency(q)
        self._protected = within_min_run(q, state.running)
        self._moves_left = moves_left(q)
        self._moves = 0
        self._undecided = 0
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
        self._undecided = len(self._held.keys() - pinned.keys())
        first = decided = grant_sizes(q.without(self._deferred, self._taken(), moves=self._undecided))
        turns = sorted(
            self._deferred - self._placed.keys(),
            key=lambda name: (-self._urgency.get(name, 0.0), name not in self._held, self._order[name]),
        )
        for number, name in enumerate(turns):
            self._undecided -= name in self._held
            if number < MOST_TURNS or name in self._held:
                self._turn(name, first)
            self._moves += name in self._held and self._placed.get(name) != self._held[name]
        if len(self._placed) > len(pinned) or self._kept or self._moves:
            moves = self._moves + self._displaced(self._placed, self._stops)
            taken, tenants = self._taken() + self._kept, self._of_tenants()
            decided = grant_sizes(q.without(self._deferred, taken, moves=moves, tenants=tenants))
        placements = {**decided.placements, **self._placed}
        reasons = {**decided.reasons, **self._reasons}
        ledger = self._ledger(placements)
        backfill = _Backfill(q, placements, reasons, self._urgency, ledger)
        left = self._moves_left - self._moves - decided.changes.disturbed
        backfill.give(self._deferred - self._placed.keys(), left)
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

    def _ledger(self, placements: Mapping[str, Placement]) -> Ledger:
        """What these gangs leave, but for what is kept for another."""
        ledger = Ledger.of(self._q, placements)
        ledger.take(self._kept.elements())
        return ledger

    def _turn(self, name: str, first: Draft) -> None:
        held, gang = self._held.get(name), self._q.mixed.get(name)
        others = {other: at for other, at in first.placements.items() if other not in self._stops}
        least = {
            other: dataclasses.replace(at, nodes=self._q.least(other, at)) for other, at in others.items()
        }
        left = self._ledger({**least, **self._placed})
        if held is not None:
            stops = self._to_stop(name, least, left, lambda: left.holds(held.nodes))
            if stops is not None:
                self._stop(stops)
                self._place(name, held, f"stays on {held}")
                return
        if gang is None:
            self._reasons[name] = Reason("more urgent jobs need its GPUs")
            return
        unused = self._ledger({**others, **self._placed})
        most = unused.room_of(self._q.tenants.get(name, "")) + (0 if held is None else len(held.nodes))
        found = _fastest(gang, unused, most)
        if found is None and held is None:
            found = _fastest(gang, unused, most, provisionable=True)
        small = dataclasses.replace(gang, sizes=gang.sizes[:1])

        def holds() -> bool:
            return _fastest(small, left, most) is not None

        stops = []
        if found is None:
            stops = self._to_stop(name, least, left, holds)
            found = None if stops is None else _fastest(small, left, most)
        if found is not None and self._may_place(name, found, stops or []):
            self._stop(stops or [])
            why = f"{found}: no single pool holds it" if not gang.fits_one_pool else f"{found}"
            self._place(name, found, f"{why}; {gang.speed_at(found):.3g} steps/s are predicted")
            return
        self._reasons[name] = _waits_for(gang, unused)
        if not self._kept:
            self._keep_for(name, gang, least, left, unused, holds)

    def _may_disturb(self, gangs: int) -> bool:
        """Whether as many may be stopped or moved, and those whose turn comes as well."""
        return self._moves + self._undecided + gangs <= self._moves_left

    def _may_place(self, name: str, found: Placement, stops: Collection[str]) -> bool:
        """Whether the moves of the hour allow it: also of those whose GPUs are free only since they move."""
        displaced = self._displaced({**self._placed, name: found}, self._stops.union(stops))
        return self._may_disturb(self._running(stops) + (name in self._held) + displaced)

    def _displaced(self, placed: Mapping[str, Placement], stops: Collection[str]) -> int:
        """Running gangs of one pool, but for ``stops``, that cannot stay beside ``placed``."""
        ledger, state = Ledger(self._q.nodes, (at.nodes for at in placed.values())), self._q.state
        others = [name for name in self._fitting if name not in stops]
        return sum(not ledger.grant(self._q.least(name, state.running[name])) for name in others)

    def _stop(self, stops: Collection[str]) -> None:
        self._stops |= set(stops)
        self._moves += self._running(stops)

    def _running(self, names: Collection[str]) -> int:
        return sum(name in self._q.state.running and name not in self._q.pending for name in names)

    def _to_stop(
        self, name: str, least: Mapping[str, Placement], left: Ledger, holds: Callable[[], bool]
    ) -> list[str] | None:
        """Less urgent gangs without which ``holds``, as few as possible; None: there are none such.

        Their GPUs are given back to ``left``, from which ``holds`` answers.
        """
        if holds():
            return []
        mine, stops = self._urgency.get(name, 0.0), list[str]()
        less = [
            other
            for other in least
            if self._urgency.get(other, 0.0) < mine * (1 - 1e-6) and other not in self._protected
        ]
        less.sort(key=lambda other: (self._urgency.get(other, 0.0), -self._order[other]))
        for other in less:
            left.undo(least[other].nodes)
            stops.append(other)
        enough = holds()
        for other in reversed(stops.copy()):  # the most urgent stay where the others are enough
            left.take(least[other].nodes)
            if not enough or holds():
                stops.remove(other)
            else:
                left.undo(least[other].nodes)
        if enough and self._may_disturb(self._running(stops) + (name in self._held)):
            return stops
        for other in stops:
            left.take(least[other].nodes)
        return None

    def _keep_for(
        self,
        name: str,
        gang: MixedGang,
        least: Mapping[str, Placement],
        left: Ledger,
        unused: Ledger,
        holds: Callable[[], bool],
    ) -> None:
        """Keep what is free for the gang, if it waits only for gangs that must not be disturbed.

        Less urgent gangs do not start there; those that run continue.
        """
        q, mine = self._q, self._urgency.get(name, 0.0)
        for other, at in least.items():
            if self._urgency.get(other, 0.0) < mine * (1 - 1e-6):
                left.undo(at.nodes)
                if other not in q.state.running:
                    unused.undo(at.nodes)
        if keeps_free(q) and holds():
            # The others' round may have moved gangs that stay when it is decided again.
            running = (other for other in self._fitting if other not in self._stops)
            stays = Ledger(q.nodes, (q.least(other, q.state.running[other]) for other in running))
            stays.take(node for at in self._placed.values() for node in at.nodes)
            free = {node.name: min(node.gpus, stays.left[node.name]) for node in _open_nodes(gang, unused)}
            self._kept = Counter({node: gpus for node, gpus in free.items() if gpus > 0})
