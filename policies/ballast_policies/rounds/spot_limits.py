"""Limits of spot machines for a whole cluster: what may be started there, whatever policy and round decide.

A round is decided as if there were no limit. Where it would start more in spot pools than the limits leave,
the GPUs of what comes last are not offered, and it is decided again: a gang that is kept off may still run on
other machines. What runs is never stopped for a limit: where more is held than it leaves, nothing is started.
"""

import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

from ballast_policies.rounds.draft import Draft
from ballast_policies.rounds.question import Question, SpotLimits
from ballast_policies.rounds.values import Node, Placement

MOST_DECISIONS = 8
"""Decisions after which nothing is started in spot pools."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """GPUs of a spot pool, or of a zone of it, that a gang takes in a round: to start, to move, or to grow.

    ``place``: as of ``Node``. ``own``: GPUs that it keeps there, where it grows.
    """

    job: str
    place: str
    nodes: tuple[str, ...]
    own: int = 0


def launches(
    placements: Mapping[str, Placement],
    running: Mapping[str, Placement],
    pools: frozenset[str],
    places: Mapping[str, str] | None = None,
) -> list[Launch]:
    """Launches of ``placements`` in ``pools`` beyond those ``running``; ``places``: node -> its place."""
    found = []
    for job, placement in placements.items():
        before = running.get(job)
        held = {} if before is None else nodes_by_place(before, places or {}, pools)
        for place, nodes in nodes_by_place(placement, places or {}, pools).items():
            more = Counter(nodes) - Counter(held.get(place, ()))
            if more:
                found.append(Launch(job, place, tuple(more.elements()), len(nodes) - more.total()))
    return found


def nodes_by_place(
    placement: Placement, places: Mapping[str, str], pools: frozenset[str]
) -> dict[str, list[str]]:
    """Place -> node of each of the ranks there, in ``pools``; the place of an unknown node is its pool."""
    found: dict[str, list[str]] = {}
    for pool, nodes in placement.nodes_by_pool.items():
        for node in nodes if pool in pools else ():
            found.setdefault(places.get(node, pool), []).append(node)
    return found


def within_spot_limits(decide: Callable[[Question], Draft], question: Question) -> Draft:
    """The round that ``decide`` makes of the nodes that the limits of spot machines leave.

    Where it takes GPUs of spot pools that running gangs do not hold, at most ``SpotLimits.most`` of the GPUs
    in use are spot afterwards, and a place in which something is started has at most its part of the spot
    GPUs in use, if its last gang is not counted: otherwise no gang could be the first. Where nothing exceeds
    the limits, the round is that of ``decide(question)``.

    ``decide`` must be content with the GPUs of a node that running gangs hold.
    """
    nodes = question.nodes
    offer = _Offer(question.spot, nodes, question.holders)
    offered, kept_off = nodes, dict[str, str]()
    while True:
        decided = decide(dataclasses.replace(question, nodes=offered))
        refused = offer.refuse(decided)
        if not refused:
            break
        kept_off |= refused
        offered = offer.nodes()
    decided = dataclasses.replace(decided, question=question)
    return decided if offered is nodes else _explained(decided, kept_off, offer)


class _Offer:
    """The nodes of one round, with fewer and fewer GPUs of spot pools."""

    def __init__(self, limits: SpotLimits, nodes: Sequence[Node], running: Mapping[str, Placement]) -> None:
        self.limits, self._nodes, self._running = limits, nodes, running
        self.spot_nodes = tuple(node for node in nodes if node.pool in limits.pools)
        self._place = {node.name: node.place for node in self.spot_nodes}
        self._held: Counter[str] = Counter()
        self._held_by_place: Counter[str] = Counter()
        for placement in running.values():
            for place, held in nodes_by_place(placement, self._place, limits.pools).items():
                self._held.update(held)
                self._held_by_place[place] += len(held)
        self._most: float = math.inf
        self._most_of: dict[str, float] = {}
        self._wanted: list[str] = []
        self._decisions = 0
        not_spot = sum(node.gpus for node in nodes if node.pool not in limits.pools)
        self._most_beside_all = limits.most_beside(not_spot)
        self.why: dict[str, str] = {}

    def refuse(self, decided: Draft) -> dict[str, str]:
        """Job -> why it gets no GPUs of a spot pool, for what the limits do not allow; empty: all is allowed.

        What is refused is not offered any more by :meth:`nodes`.
        """
        self._decisions += 1
        used, others = Counter[str](), 0
        for placement in decided.placements.values():
            there = nodes_by_place(placement, self._place, self.limits.pools)
            used.update({place: len(nodes) for place, nodes in there.items()})
            others += len(placement.nodes) - sum(map(len, there.values()))
        asked = launches(decided.placements, self._running, self.limits.pools, self._place)
        most = self._most_in_use(used.total(), others)
        kept, refused, in_use = self._admitted(asked, used, most)
        if not refused:
            return {}
        why = {}
        for launch in refused:
            if not self._one_more(launch, in_use):
                self._most_of[launch.place] = self._most_there(launch.place, used, in_use)
                why[launch.job] = self.why[launch.place] = (
                    f"spec.spot.mostInOnePool={self.limits.most_in_one_pool:g} of the ClusterPolicy: pool "
                    f"{launch.place} has {in_use[launch.place]} of {in_use.total()} spot GPUs in use"
                )
            else:
                self._most = min(self._most, most)
                total = used.total() + others
                why[launch.job] = self.why[""] = (
                    f"spec.spot.onDemandShare={self.limits.on_demand_share:g} of the ClusterPolicy: of "
                    f"{total} GPUs in use at most {self.limits.most(total)} may be spot"
                )
        if self._decisions >= MOST_DECISIONS:
            self._most_of = dict.fromkeys(self._places(), -1.0)
        self._wanted = [name for launch in kept for name in launch.nodes]
        return why

    def _places(self) -> set[str]:
        return {*self._place.values(), *self._held_by_place}

    def _most_there(self, place: str, used: Counter[str], allowed: Mapping[str, int]) -> float:
        """Spot GPUs that may be in use there; what is kept off is taken to run in other places.

        At least those that are ``allowed`` now, and fewer than are ``used``.
        """
        part = math.floor(self.limits.most_in_one_pool * used.total() + 1e-9)
        return max(allowed[place], min(part, used[place] - 1))

    def _most_in_use(self, used: int, others: int) -> float:
        """Spot GPUs that may be in use; a gang that is kept off is taken to run elsewhere.

        Elsewhere is on no more than all GPUs that are not spot.
        """
        if self.limits.on_demand_share <= 0:
            return math.inf
        return min(self.limits.most(used + others), self._most_beside_all)

    def _admitted(
        self, asked: Sequence[Launch], used: Mapping[str, int], most: float
    ) -> tuple[list[Launch], list[Launch], Counter[str]]:
        """(launches that are allowed, those that are not, place -> spot GPUs in use with the former)."""
        in_use = Counter(used)
        for launch in asked:
            in_use[launch.place] -= len(launch.nodes)
        kept: list[Launch] = []
        left = list(asked)
        while left:
            refused = []
            for launch in left:
                fits = in_use.total() + len(launch.nodes) <= most
                if fits and self._one_more(launch, in_use):
                    in_use[launch.place] += len(launch.nodes)
                    kept.append(launch)
                else:
                    refused.append(launch)
            if len(refused) == len(left):
                break
            left = refused
        return kept, left, in_use

    def _one_more(self, launch: Launch, in_use: Counter[str]) -> bool:
        """True if the place has no more than its part of the spot GPUs in use, without this gang."""
        others, total = in_use[launch.place] - launch.own, in_use.total() - launch.own
        return others <= self.limits.most_in_one_pool * total + 1e-9

    def nodes(self) -> list[Node]:
        """The nodes with the GPUs that may be handed out.

        Of spot pools: those that running gangs hold, those that the allowed launches take, and what is left
        of the limits. Places that hold more than they may take no gang.
        """
        extra = Counter(self._wanted) - self._held
        room = self._most - self._held.total()
        rooms = {
            place: self._most_of.get(place, math.inf) - self._held_by_place[place] for place in self._places()
        }
        offered: dict[str, Node] = {}
        # What the allowed launches take comes first, then nodes that exist.
        by_use = sorted(self.spot_nodes, key=lambda node: (-extra[node.name], node.provisionable))
        for only_wanted in (True, False):
            for node in by_use:
                held, place = self._held[node.name], node.place
                if (room < 0 or rooms[place] < 0) and not node.closed:
                    why = self.why.get("" if room < 0 else place) or next(iter(self.why.values()))
                    offered[node.name] = dataclasses.replace(node, gpus=min(node.gpus, held), closed=why)
                    continue
                has = offered[node.name].gpus if node.name in offered else min(node.gpus, held)
                more = min(extra[node.name], node.gpus - has) if only_wanted else node.gpus - has
                more = int(max(0, min(more, room, rooms[place])))
                room, rooms[place] = room - more, rooms[place] - more
                offered[node.name] = dataclasses.replace(node, gpus=has + more)
        return [offered.get(node.name, node) for node in self._nodes]


def _explained(
    decided: Draft,
    kept_off: Mapping[str, str],
    offer: _Offer,
) -> Draft:
    """The draft with the limit that kept each job off spot machines, in its reason and by itself."""
    open_to = {(node.gpu_type, node.taints) for node in offer.spot_nodes if not node.closed and node.gpus > 0}
    limited: dict[str, str] = {}
    for job in decided.question.jobs:
        at = decided.all_placements.get(job.name)
        if at is not None and any(part.pool in offer.limits.pools for part in at.by_pool):
            continue
        if job.name in kept_off:
            limited[job.name] = kept_off[job.name]
        elif at is None:
            barred = decided.question.asks_of(job.name).barred
            if any(job.throughput.get(kind, 0.0) > 0 and taints not in barred for kind, taints in open_to):
                limited[job.name] = "; ".join(offer.why.values())
    reasons = {
        job: why.noted(f"kept off spot machines by {limited[job]}") if job in limited else why
        for job, why in decided.reasons.items()
    }
    return dataclasses.replace(decided, reasons=reasons, blocked_by_spot_limit=limited)
