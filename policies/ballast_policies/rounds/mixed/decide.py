"""One round with gangs that may run in several pools at once.

1. Gangs that no single pool can hold, and those that run in several now, stand back from the round of the
   others. Then it is their turn, the most urgent by their shares of all columns together first: each takes
   GPUs that are free; else, unless it runs, those of nodes that an autoscaler would add as well; else, with
   its least size, those that elastic gangs have beyond theirs and those of less urgent gangs. Who must not
   be disturbed keeps what it has. The others' round is decided again on the rest.
2. GPUs that are still free go to gangs for which a second pool is worth it (:mod:`.free`).
"""

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping

from ballast_policies.rounds.draft import Draft
from ballast_policies.rounds.explanations import Reason
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.hysteresis import exempt_newest, keeps_free, moves_left, within_min_run
from ballast_policies.rounds.mixed.free import UseOfFree
from ballast_policies.rounds.mixed.options import best_parts
from ballast_policies.rounds.mixed.pools import AllPools
from ballast_policies.rounds.packing import has_room, in_its_pools
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.sizes.decide import decide_elastic_round
from ballast_policies.rounds.values import Placement

MOST_TURNS = 64
"""Gangs in several pools that are considered in one decision, the most urgent first; all that run are."""

Holds = Callable[[Mapping[str, int]], bool]
"""Whether the GPUs that are left of each node are enough."""


def decide_mixed_round(question: Question) -> Draft:
    """Decide the round; without gangs that may run in several pools as ``decide_elastic_round`` does.

    A gang in several pools has whole pods and consecutive ranks in each, and keeps its size until it is
    launched again.
    """
    if not question.mixed and not any(at.parts for at in question.state.running.values()):
        return decide_elastic_round(question)
    return _Turns(question).round()


class _Turns:
    """The turns of the gangs that stand back from the others' round."""

    def __init__(self, question: Question) -> None:
        q = self._q = question
        self._pools = AllPools(question)
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
        self._apart = {*spread, *(too_large & self._order.keys())}
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
        first = decided = decide_elastic_round(q.without(self._apart, self._taken()))
        turns = sorted(
            self._apart - self._placed.keys(),
            key=lambda name: (-self._urgency.get(name, 0.0), name not in self._held, self._order[name]),
        )
        for number, name in enumerate(turns):
            if number < MOST_TURNS or name in self._held:
                self._turn(name, first)
        if len(self._placed) > len(pinned) or self._kept:
            taken, tenants = self._taken() + self._kept, self._of_tenants()
            decided = decide_elastic_round(q.without(self._apart, taken, moves=self._moves, tenants=tenants))
        placements = {**decided.placements, **self._placed}
        reasons = {**decided.reasons, **self._reasons}
        use = UseOfFree(q, self._pools, decided, placements, reasons, self._urgency, self._kept)
        use.give(self._apart - self._placed.keys(), self._moves_left - self._moves)
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
            found = self._found(gang, unused, most, to_come=True)
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
        self, gang: MixedGang, left: Mapping[str, int], most: int | None, *, to_come: bool = False
    ) -> Placement | None:
        nodes = self._pools.open_nodes(gang, left, to_come=to_come)
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
