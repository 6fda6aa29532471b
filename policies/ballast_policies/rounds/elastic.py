"""Gangs of several sizes: who runs is decided at the least sizes, then the rest is shared out.

1. A running elastic gang counts with its least size, on the nodes of its first ranks; what it holds beyond
   that is there for gangs that wait. So a waiting gang comes before another's extra GPUs, by every policy.
2. :func:`.grant_gpus` says which gangs run, and on which pool. Of a gang that runs in several pools the last
   ranks are there for others in the same way; it grows in the pool of its last rank.
3. Gangs go to another pool where the sizes that they reach there win more than a restart costs.
4. GPUs that are left go to elastic gangs one step of size at a time, the most urgent by the policy first.
   Within a round a gang keeps what it holds, unless a gang that starts needs it. At the end of a round, and
   when a gang starts, GPUs also pass from one gang to another, where that wins more than the pauses cost.
"""

import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence, Set

from ballast_policies.allocation.policy import Surplus
from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.draft import Draft, Reason
from ballast_policies.rounds.elastic_pools import choose_pools, claims_where_they_run
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.grants import fill, grant_gpus
from ballast_policies.rounds.ledger import Ledger
from ballast_policies.rounds.memory import moves_left, within_min_run
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.size_gain import (
    LEAST_GROWTH,
    LEAST_SIZE_GAIN,
    SizeCandidate,
    gain,
    partition_speed,
    urgency,
)
from ballast_policies.rounds.values import (
    ANY_NODES,
    Node,
    NodeRequest,
    Placement,
    beside,
    gpus_by,
)

HOLDS = 0.85
"""Factor of the urgency of what a gang holds already: equal gangs do not swap GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _GangSize:
    """A gang with its least size, and what it has beyond that now.

    Attributes:
        base: nodes of its least size.
        own: by position of the pipeline, the nodes beyond ``base`` that it holds now, in order of ranks.
        runs: its ranks hold them; a gang that is about to start takes any size at no cost.
        several: where it runs, in several pools; None: it is in one.
        asks: what it asks of its nodes.
        tenant: whose limit on GPUs counts.
    """

    one: SizeCandidate
    base: Placement
    own: tuple[tuple[str, ...], ...] = ()
    runs: bool = False
    several: Placement | None = None
    asks: NodeRequest = ANY_NODES
    tenant: str = ""

    @property
    def held(self) -> int:
        """GPUs that it has now."""
        return len(self.base.nodes) + sum(map(len, self.own))

    @property
    def grows_in(self) -> str:
        """The pool in which it may have more."""
        return (self.several or self.base).by_pool[-1].pool

    def placement(self, nodes: tuple[str, ...]) -> Placement:
        """The gang on these nodes."""
        held = self.several
        if held is None:
            return dataclasses.replace(self.base, nodes=nodes)
        if len(nodes) >= len(held.nodes):
            return held.and_more(nodes[len(held.nodes) :]) if nodes != held.nodes else held
        fewer = held.first(len(nodes))
        return fewer if len(fewer.parts) > 1 else dataclasses.replace(fewer, parts=())


class _SizeAssignment:
    """A division of the free GPUs, as it comes about."""

    def __init__(self, items: Sequence[_GangSize], ledger: Ledger, surplus: Surplus) -> None:
        """Start from the least sizes, which leave what is in the ledger; ``surplus``: who comes first."""
        self._items, self._ledger, self._surplus = items, ledger, surplus
        self.nodes: list[tuple[str, ...]] = [item.base.nodes for item in items]
        self._kept: list[set[int]] = [set() for _ in items]
        self._has_domains = any(node.domains for node in ledger.nodes.values())
        # The fullest come last, and are taken first: whole nodes stay free for gangs that start.
        self._open = {
            pool: sorted(
                (node for node in nodes if ledger.left[node.name] > 0),
                key=lambda node: (node.provisionable, ledger.left[node.name], node.name),
                reverse=True,
            )
            for pool, nodes in ledger.pools.items()
        }

    def keep_what_is_held(self, wanted: Iterable[int]) -> None:
        """Let these gangs keep their own GPUs beyond the least size, where they are still free."""
        for at in wanted:
            item = self._items[at]
            most = sum(map(len, item.own))
            while most > 0:
                nodes, positions = self._own_positions(at, most)
                if not nodes:
                    break
                is_a_size = self.size(at) + len(nodes) in item.one.gang.speeds.get(item.one.gpu_type, {})
                if is_a_size and self._ledger.room_of(item.tenant) >= len(nodes):
                    self._take(at, nodes)
                    self._kept[at] |= positions
                    break
                most = len(nodes) - 1

    def assign_extra_gpus(self) -> None:
        """Give the rest to those that become faster with it, the most urgent first."""
        queue: list[tuple[float, bool, int]] = []
        for at in range(len(self._items)):
            self._push(queue, at)
        while queue:
            _, _, at = heapq.heappop(queue)
            if self._grow(at):
                self._push(queue, at)

    def size(self, at: int) -> int:
        """GPUs of the gang in this division."""
        return len(self.nodes[at])

    def _push(self, queue: list[tuple[float, bool, int]], at: int) -> None:
        item, now = self._items[at], self.size(at)
        more = self._next_size(item, now)
        if more is None:
            return
        value = urgency(self._surplus, item.one, now, more)
        held = item.runs and more <= item.held
        if held:
            value = value * HOLDS if value > 0 else value / HOLDS
        # Of equals the one that holds the GPU keeps it.
        heapq.heappush(queue, (value, not held, at))

    def _next_size(self, item: _GangSize, now: int) -> int | None:
        """The next size by the policy that is faster by enough, its pause included; None: there is none."""
        one, slow = item.one, item.one.speed(now)
        for size in sorted(one.gang.speeds.get(one.gpu_type, {})):
            faster = size > now and one.speed(size) > slow * (1 + LEAST_GROWTH)
            if faster and urgency(self._surplus, one, now, size) < math.inf:
                if not item.runs or size <= item.held:
                    return size
                saved = one.seconds(slow) - one.seconds(one.speed(size))
                if one.gang.may_grow and saved > one.gang.change_seconds(size):
                    return size
        return None

    def _grow(self, at: int) -> bool:
        item, now = self._items[at], self.size(at)
        members = self._open.get(item.grows_in, [])  # its last ranks' pool may be gone
        while members and self._ledger.left[members[-1].name] <= 0:
            members.pop()
        size = self._next_size(item, now)
        if size is None or self._ledger.room_of(item.tenant) < size - now:
            return False
        nodes, positions = self._own_positions(at, size - now)
        missing = size - now - len(nodes)
        if missing:
            # Positions that others have got are given back before the gang may take other GPUs.
            if (item.runs or item.several) and len(self._kept[at]) + len(positions) < len(item.own):
                return False
            self._ledger.take(nodes)
            found = self._find(missing, item, near=(*self.nodes[at], *nodes))
            self._ledger.undo(nodes)
            if found is None:
                return False
            nodes = (*nodes, *found)
        self._take(at, nodes)
        self._kept[at] |= positions
        return True

    def _own_positions(self, at: int, gpus: int) -> tuple[tuple[str, ...], set[int]]:
        """(nodes, numbers) of positions that the gang holds and has not yet, as far as they are free.

        In order of ranks, and no more than ``gpus`` GPUs.
        """
        nodes: list[str] = []
        positions: set[int] = set()
        for number, position in enumerate(self._items[at].own):
            fits = number not in self._kept[at] and len(nodes) + len(position) <= gpus
            if fits and self._ledger.holds([*nodes, *position]):
                nodes += position
                positions.add(number)
            elif self._items[at].several is not None and number not in self._kept[at]:
                break  # its first ranks stay
        return tuple(nodes), positions

    def _find(self, gpus: int, item: _GangSize, near: Iterable[str]) -> tuple[str, ...] | None:
        """A node of the gang's pool for each GPU, ``near`` first, then by domain; None: too few are left."""
        left, per_pod, members = self._ledger.left, item.one.gang.per_pod, self._open[item.grows_in]
        close = dict.fromkeys(name for name in near if self._ledger.nodes[name].pool == item.grows_in)
        others: Iterable[Node] = (node for node in reversed(members) if node.name not in close)
        if self._has_domains:
            others = beside(
                others, [self._ledger.nodes[name] for name in item.base.nodes], item.asks.topology
            )
        found: list[str] = []
        for node in itertools.chain((self._ledger.nodes[name] for name in close), others):
            if len(found) == gpus:
                break
            if left[node.name] >= per_pod and not node.closed and node.group not in item.asks.barred:
                found += [node.name] * (min(left[node.name], gpus - len(found)) // per_pod * per_pod)
        return tuple(found) if len(found) == gpus else None

    def _take(self, at: int, nodes: tuple[str, ...]) -> None:
        self._ledger.take(nodes, self._items[at].tenant)
        self.nodes[at] = (*self.nodes[at], *nodes)


def grant_elastic(question: Question) -> Draft:
    """The round with the sizes of elastic gangs; without any as :func:`grant_gpus` decides it.

    No node is given more GPUs than it has, no gang has fewer than its least size, and no GPU stays free that
    a running gang could take and be faster with. A running gang becomes either smaller, on some of its nodes,
    or larger, on all of them and others of its pool (``Round.resized``).
    """
    state = question.state
    elastic = {
        name: gang for name, gang in question.elastic.items() if not question.in_several_pools(name)
    } | {
        name: question.mixed[name].where_it_runs(at)
        for name, at in state.running.items()
        if at.parts and name in question.mixed
    }
    if not elastic:
        return grant_gpus(question)
    # A restart is a move: those that started last stay, and more of them where others are moved.
    by_restart = {name for name, gang in elastic.items() if name in state.running and not gang.live}
    pinned = within_min_run(question, by_restart)
    free = sorted(by_restart - pinned.keys(), key=lambda name: (-question.ran(name), name))
    left = most = moves_left(question)
    while True:
        stay = {
            name: elastic[name].without_restart(len(state.running[name].nodes))
            for name in (*pinned, *free[most:])
        }
        decided = _sized(question, {**elastic, **stay}, by_restart)
        excess = decided.changes.disturbed - left
        if excess <= 0 or not free[:most]:
            return decided
        most = max(0, min(most, len(free)) - excess)


def _sized(question: Question, elastic: Mapping[str, ElasticGang], by_restart: Set[str]) -> Draft:
    """The round with these sizes of gangs; ``by_restart``: running ones that restart for some of them."""
    state, pending = question.state, question.pending
    surplus, settings = question.surplus, question.settings
    reduced = {
        job: _least(placement, elastic[job])
        for job, placement in state.running.items()
        if job in elastic and (job in pending or elastic[job].may_shrink)
    }
    # A gang that cannot have its least size now counts with the least that it can.
    asked = [
        _as_it_is(job, elastic[job.name], reduced.get(job.name, state.running[job.name]))
        if job.name in elastic and job.name in state.running and job.name not in reduced.keys() - by_restart
        else job
        for job in question.jobs
    ]
    cluster = dataclasses.replace(question, jobs=asked, elastic=elastic, parts=question.claimed_parts())
    claimed = claims_where_they_run(cluster, reduced)
    at_least = dataclasses.replace(claimed.state, running={**state.running, **reduced})
    decided = grant_gpus(dataclasses.replace(claimed, state=at_least), state.running)
    granted, decided = decided, choose_pools(cluster, reduced, decided)
    whole = (elastic.keys() & state.running.keys()) - reduced.keys() - by_restart
    if decided is not granted or not whole <= decided.placements.keys():
        # A gang that has to leave where it is may start elsewhere with its least size.
        jobs = [
            job if job.name in whole else as_it_is for job, as_it_is in zip(question.jobs, asked, strict=True)
        ]
        decided = fill(
            dataclasses.replace(decided, question=dataclasses.replace(decided.question, jobs=jobs))
        )
    items = _growable(decided, question, elastic, reduced)
    if not items:
        return dataclasses.replace(decided, question=question)
    kept = _SizeAssignment(items, Ledger.of(question, decided.placements), surplus)
    by_cost = surplus is Surplus.COST  # GPUs that cost more than they win are given back
    # What was granted and is not held yet comes first: its GPUs are still on their way.
    for runs in (False, True):
        kept.keep_what_is_held(
            at for at, item in enumerate(items) if item.runs == runs and (item.several or not by_cost)
        )
    kept.assign_extra_gpus()
    chosen = kept
    # Where the policy has chosen the sizes, it has weighed their pauses.
    by_choice = surplus is Surplus.COMPLETION_TIME
    if by_choice or (not by_cost and (decided.changes.started or not settings.within_round)):
        best = _SizeAssignment(items, Ledger.of(question, decided.placements), surplus)
        best.assign_extra_gpus()
        if by_choice or _pays_off(items, kept, best, question):
            chosen = best
    return _resized(decided, question, items, chosen)


def _as_it_is(job: Job, gang: ElasticGang, held: Placement) -> Job:
    """The job with the size that it has, on the types where that is one of its sizes."""
    size = len(held.nodes)
    there = {kind for kind, by_size in gang.speeds.items() if size in by_size} | {held.gpu_type}
    rates = {kind: rate if kind in there else 0.0 for kind, rate in job.throughput.items()}
    return dataclasses.replace(job, gpus=size, throughput=rates)


def _least(placement: Placement, gang: ElasticGang) -> Placement:
    by_size = gang.speeds.get(placement.gpu_type, {})
    least = min(by_size, default=gang.least)
    if placement.parts:
        return placement.first(least) if least < len(placement.nodes) else placement
    return dataclasses.replace(placement, nodes=placement.nodes[:least])


def _growable(
    decided: Draft, question: Question, elastic: Mapping[str, ElasticGang], reduced: Mapping[str, Placement]
) -> list[_GangSize]:
    """The gangs that could have more than they were given."""
    state, parts = question.state, question.claimed_parts()
    capacity = gpus_by(question.nodes, lambda node: node.gpu_type)
    items = []
    for index, job in enumerate(question.jobs):
        placement, gang = decided.placements.get(job.name), elastic.get(job.name)
        if placement is None or gang is None:
            continue
        stays = placement == reduced.get(job.name)
        several, asks = question.in_several_pools(job.name), question.asks_of(job.name)
        if several:
            asks = dataclasses.replace(asks, barred=question.mixed[job.name].barred)
        if several and not stays:
            continue  # it is started elsewhere
        if job.name in state.running and job.name not in reduced and placement == state.running[job.name]:
            continue  # it cannot change its size now
        extra = state.running[job.name].nodes[len(placement.nodes) :] if stays else ()
        each = gang.together if gang.live else gang.per_pod
        own = tuple(tuple(extra[at : at + each]) for at in range(0, len(extra), each))
        unit = partition_speed(gang, capacity, parts.get(job.name, 0.0))
        items.append(
            _GangSize(
                one=SizeCandidate(job=job, gang=gang, index=index, gpu_type=placement.gpu_type, unit=unit),
                base=placement,
                own=own,
                runs=stays and job.name not in question.pending,
                several=state.running[job.name] if several else None,
                asks=asks,
                tenant=question.tenants.get(job.name, ""),
            )
        )
    return items


def _pays_off(
    items: Sequence[_GangSize], kept: _SizeAssignment, best: _SizeAssignment, question: Question
) -> bool:
    """True if gangs should exchange GPUs: the gain is worth more than the pauses that it costs in a round."""
    stay = max(1.0, question.settings.round_seconds)
    changed = []
    for at, item in enumerate(items):
        before, after = kept.size(at), best.size(at)
        if before == after:
            continue
        pause = item.one.gang.change_seconds(after) if item.runs and after != item.held else 0.0
        worked = max(0.0, 1.0 - pause / stay)
        changed.append((item.one, item.one.speed(before), item.one.speed(after) * worked))
    return bool(changed) and gain(question.surplus, changed) >= LEAST_SIZE_GAIN


def _resized(
    decided: Draft, question: Question, items: Sequence[_GangSize], chosen: _SizeAssignment
) -> Draft:
    """The round with the gangs' sizes."""
    placements, reasons, state = dict[str, Placement](), dict[str, Reason](), question.state
    new = ", ".join(sorted(decided.changes.started)[:3]) or "more urgent jobs"
    for at, item in enumerate(items):
        name = item.one.job.name
        placements[name] = placed = item.placement(chosen.nodes[at])
        count, least = chosen.size(at), len(item.base.nodes)
        most = max(item.one.gang.speeds.get(item.one.gpu_type, {least: 0.0}))
        size = f"it may have {least} to {most} GPUs and has {count}, " if most > least else ""
        reason = decided.reasons[name]
        gang = item.one.gang
        if item.runs and count != item.held and not (gang.live or gang.becomes(state.running[name], placed)):
            restart = f"after a restart of {gang.restart_seconds:.0f} s"
            reason = Reason(f"in place of {item.held} GPUs, {restart}, since its degrees follow its size", "")
        reasons[name] = reason.noted(f"{size}at {item.one.speed(count):.3g} steps/s")
        if item.several is not None and count < item.held:
            reasons[name] = Reason(
                f"stays on {placed}; {new} can run on what it gives back of {item.several}"
            )
    return dataclasses.replace(decided, question=question).with_placements(placements, reasons)
