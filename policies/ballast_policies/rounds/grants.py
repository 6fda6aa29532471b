"""Gangs of one size, on one pool or several, granted by priority (dissertation section 5.5).

1. Gangs that must not be disturbed keep their nodes (too young to stop).
2. The others are granted pools by priority; what no job with a share needs goes to any job that can use it.
3. If more running gangs would be stopped or moved than the hour allows, second jobs on a GPU stay, with their
   first jobs, then the newest gangs.
4. Where a gang waits for gangs that must not be disturbed, what comes free is kept for it.
5. Nodes: a gang that stays in its pool keeps its own, the others are packed, the largest first. Where the
   pods of one find no node with as many free GPUs, or it finds no domain, the most urgent is packed first, on
   nodes of less urgent ones if it must, and what is left goes to those that fit, by urgency.
"""

import bisect
import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from types import MappingProxyType

import numpy as np

from ballast_policies.rounds.claims import SEVERAL, Claims, Groups, Pools, ordered_claims
from ballast_policies.rounds.draft import Draft, Explained, Reason, explain_placement
from ballast_policies.rounds.ledger import Ledger, pack
from ballast_policies.rounds.memory import (
    exempt_newest,
    keeps_free,
    moves_left,
    reserved_columns,
    valid_placements,
    within_min_run,
)
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, NodeRequest, Placement, PoolPart

Granted = tuple[str, str, int]
"""Job, pool (of rank 0), GPUs."""

Splits = Mapping[str, Sequence[tuple[str, Mapping[str, int]]]]
"""Gang that starts or moves -> in the order of its ranks: pool, and its GPUs there by group of nodes
(``Node.group``)."""


def grant_gpus(question: Question, held: Mapping[str, Placement] | None = None) -> Draft:
    """The round of gangs of one size, granted by priority.

    ``held``: running gang -> all that it holds, where the question has its least size.
    """
    pools, valid = Pools.of(question.nodes, question.columns), valid_placements(question)
    state, sizes = question.state, {job.name: job.gpus for job in question.jobs}
    claims, received_fraction = ordered_claims(question, pools, valid)
    groups = Groups.of(question, pools, valid, state.running if held is None else held)
    seconds = question.second_jobs.items()
    first_of = {name: first for name, first in seconds if first in valid and sizes.get(name) == 1}
    here = {**valid, **{name: state.running[name] for name in first_of}}
    pinned = within_min_run(question, here)
    limit = moves_left(question)
    keep = keeps_free(question)
    while True:
        placements, kept_for = _grant(question, groups, claims, here, pinned, keep=keep)
        continuing = _continuing(question, placements)
        now = {**placements, **continuing}
        disturbed = {job: at for job, at in here.items() if now.get(job) != at}
        if len(disturbed) <= limit:
            break
        most = question.settings.max_moves_per_hour
        reason = f"would be stopped or moved, but moves.maxMovesPerHour={most} is reached"
        # Second jobs come first: what parts a pair disturbs two jobs for one GPU.
        more = dict.fromkeys(disturbed.keys() & first_of.keys(), reason)
        more = more or exempt_newest(disturbed, state, limit, reason)
        with_them = {
            first_of[job]: f"shares its GPU with {job}, which {why}"
            for job, why in more.items()
            if job in first_of
        }
        pinned = {**with_them, **pinned, **more}
    reasons = _reasons(question, pools, received_fraction, placements, kept_for, pinned, first_of)
    return Draft(
        question=question, placements=placements, reasons=reasons, seconds=continuing, kept_for=kept_for
    )


def _continuing(question: Question, placements: Mapping[str, Placement]) -> dict[str, Placement]:
    """Running job without a GPU of its own -> the GPU that it is on, where it stays beside the first job.

    That is one that is there already, or one that suits it. ``placements``: of first jobs.
    """
    shared, state, running = question.shared, question.state, question.state.running
    first_on, found = shared.first_jobs(placements), {}
    for name in sorted(running.keys() - shared.unable, key=state.by_age) if first_on else ():
        at, first = running[name], first_on.get(node := shared.on(running[name]))
        if name in placements or first is None:
            continue
        if running.get(first) == at or shared.may_begin(name, first, at):
            found[name] = at
            del first_on[node]  # it has two jobs
    return found


def _grant(
    question: Question,
    groups: Groups,
    claims: Claims,
    here: Mapping[str, Placement],
    pinned: Mapping[str, str],
    *,
    keep: bool,
) -> tuple[dict[str, Placement], dict[str, str]]:
    """(job -> where it runs, pool -> job for which its free GPUs are kept).

    ``here``: running job -> where it could continue, with GPUs of its own or as a second job.
    """
    pools, names = groups.pools, [job.name for job in question.jobs]
    index, position = {name: m for m, name in enumerate(names)}, np.arange(len(claims))
    holding = [job for job in sorted(pinned) if index[job] in groups.held]
    keeping = [index[job] for job in holding]
    open_ = unpinned = ~np.isin(claims.job, [index[job] for job in pinned])
    chosen, splits = groups.select(claims.take(open_), keeping)
    granted = position[open_][chosen]
    kept_for, shut = {}, dict[int, frozenset[int]]()
    if pinned and keep:
        unhindered, there = groups.select(claims, ())
        closed = reserved_columns(
            claims,
            np.flatnonzero(~unpinned | np.isin(position, granted)),
            unhindered,
            {job: [column for column, _ in parts] for job, parts in {**groups.held, **there}.items()},
        )
        ahead = position <= np.array([closed.get(column, len(claims)) for column in claims.column.tolist()])
        shut = {
            int(claims.job[at]): frozenset(column for column, first in closed.items() if first < at)
            for at in np.flatnonzero(claims.column == SEVERAL).tolist()
        }
        open_ = unpinned & (claims.stays | ahead)
        chosen, splits = groups.select(claims.take(open_), keeping, shut)
        granted = position[open_][chosen]
        kept_for = {pools.names[column]: names[claims.job[at]] for column, at in closed.items()}
    wanted = [(job, here[job].pool, len(here[job].nodes)) for job in holding]
    for k in granted.tolist():
        job, column, gpus = int(claims.job[k]), int(claims.column[k]), int(claims.gpus[k])
        if column == SEVERAL:
            parts = splits.get(job) or groups.held[job]
            column, gpus = parts[0][0], sum(sum(split.values()) for _, split in parts)
        wanted.append((names[job], pools.names[column], gpus))
    by_name = {
        names[job]: [(pools.names[column], split) for column, split in parts]
        for job, parts in (splits.items() if groups.apart else ())
    }
    ledger = Ledger(question.nodes)
    placements, kept = assign_nodes(wanted, ledger, here, by_name, question), dict[str, list[str]]()
    if len(placements) < len(wanted):
        # The pods of some gang find no node with as many GPUs, or it finds no domain: by urgency.
        ledger = Ledger(question.nodes)
        protected = pinned if keep else None
        placements, kept = _assign_by_urgency(wanted, ledger, here, by_name, question, protected)
        kept_for |= {ledger.nodes[name].pool: job for job, nodes in kept.items() for name in nodes}
    elif all(asks.required is None for asks in question.asks.values()):
        return placements, kept_for
    _fill(placements, question, pools, claims.take(open_), here, ledger)
    while elsewhere := [pool for pool, job in kept_for.items() if job in placements]:
        for pool in elsewhere:
            ledger.undo(kept.pop(kept_for.pop(pool), ()))
            open_ = open_ | (unpinned & (claims.column == pools.names.index(pool)))
        _fill(placements, question, pools, claims.take(open_), here, ledger)
    return placements, kept_for


def _fill(
    placements: dict[str, Placement],
    question: Question,
    pools: Pools,
    claims: Claims,
    here: Mapping[str, Placement],
    ledger: Ledger,
) -> None:
    """Add gangs that fit on what the placements leave free; ``here``: running ones, where they could stay.

    Claims are granted by the GPUs of a pool; where a gang that was granted some finds no nodes for its pods,
    or takes others for its domain, they are free for those after it.
    """
    members = {
        pool: [node for node in ledger.pools[pool] if not node.closed and ledger.left[node.name] > 0]
        for pool in pools.names
    }
    without_room: set[tuple[object, ...]] = set()
    for job, column, gpus in zip(
        claims.job.tolist(), claims.column.tolist(), claims.gpus.tolist(), strict=True
    ):
        name = question.jobs[job].name
        if name in placements:
            continue
        tenant = "" if question.trains(name) else question.tenants.get(name, "")
        now = here.get(name)
        if (
            now is not None
            and column in (SEVERAL, pools.names.index(now.pool))
            and ledger.grant(now.nodes, tenant)
        ):
            placements[name] = now
            continue
        if column == SEVERAL:
            continue  # what is free at the end may be its
        pool = pools.names[column]
        asks = question.asks_of(name)
        alike = (pool, gpus, asks)
        if alike in without_room or ledger.room_of(tenant) < gpus:
            continue
        usable = asks.open(members[pool])
        chosen = pack(gpus, usable, ledger.left, asks.per_pod, asks.topology)
        if chosen is None:
            without_room.add(alike)
            continue
        ledger.take(chosen, tenant)
        placements[name] = Placement(gpu_type=usable[0].gpu_type, pool=pool, nodes=chosen)


def fill(decided: Draft) -> Draft:
    """The draft with gangs that would wait on what moves have left free, the most urgent first.

    What is kept for a gang is its own.
    """
    there = decided.all_placements.keys()
    waiting = [job for job in decided.question.jobs if job.name not in there]
    question = dataclasses.replace(decided.question, jobs=waiting)
    pools, valid = Pools.of(question.nodes, question.columns), valid_placements(question)
    claims, received_fraction = ordered_claims(question, pools, valid)
    kept_for = {pools.names.index(pool): job for pool, job in decided.kept_for.items() if job not in there}
    open_ = [
        kept_for.get(column, waiting[job].name) == waiting[job].name
        for job, column in zip(claims.job.tolist(), claims.column.tolist(), strict=True)
    ]
    placements = dict(decided.placements)
    ledger = Ledger.of(question, placements)
    _fill(placements, question, pools, claims.take(np.array(open_, dtype=bool)), valid, ledger)
    still = {pool: job for pool, job in decided.kept_for.items() if job not in placements}
    reasons = _reasons(question, pools, received_fraction, placements, still)
    return dataclasses.replace(decided, kept_for=still).with_placements(placements, reasons)


def assign_nodes(
    granted: Iterable[Granted],
    ledger: Ledger,
    running: Mapping[str, Placement],
    splits: Splits,
    question: Question,
) -> dict[str, Placement]:
    """Exact nodes for gangs that fit their pools by count, the largest first.

    Left out are gangs whose pods find no node with as many free GPUs, and those that find no domain
    (:mod:`.values`); a gang of pods with one GPU each that requires none always finds its nodes.

    ``granted``: the most urgent first; ``running``: a gang that stays in its pool keeps its nodes;
    ``splits``: where nodes are told apart, and of gangs in several pools.
    """
    found = _Assignment(granted, ledger, running, splits, question)
    # Large pods find no room behind small ones.
    found.movers.sort(key=lambda at: (-found.asks(at).per_pod, -found.granted[at][2]))
    while found.movers:
        found.place(found.movers.pop(0))
    return found.placements


def _assign_by_urgency(
    granted: Iterable[Granted],
    ledger: Ledger,
    running: Mapping[str, Placement],
    splits: Splits,
    question: Question,
    pinned: Collection[str] | None = None,
) -> tuple[dict[str, Placement], dict[str, list[str]]]:
    """Nodes by :func:`assign_nodes`, the most urgent first: (job -> its place, job -> nodes kept for it).

    A gang that finds no domain, or no nodes for its pods, is given those of less urgent gangs, which move. If
    these must not be disturbed, what is free of the nodes that it would get without them is kept for it.

    ``pinned``: jobs that must not be disturbed; None: nothing is kept.
    """
    found = _Assignment(granted, ledger, running, splits, question)
    kept: dict[str, list[str]] = {}
    closed: set[str] = set()
    while found.movers:
        at = found.movers.pop(0)
        if not found.place(at) and not found.make_room(at) and pinned and not closed & found.pools(at):
            nodes = found.keep(at, pinned)
            if nodes:
                closed |= found.pools(at)
                kept[found.granted[at][0]] = nodes
    return found.placements, kept


class _Assignment:
    """The nodes of the gangs, as they are found.

    Attributes:
        granted: the gangs, the most urgent first.
        placements: job -> where it runs.
        movers: positions of the gangs that do not stay where they run, in order.
    """

    def __init__(
        self,
        granted: Iterable[Granted],
        ledger: Ledger,
        running: Mapping[str, Placement],
        splits: Splits,
        question: Question,
    ) -> None:
        """Let those that stay keep their nodes."""
        self.granted, self._ledger, self._splits, self._question = list(granted), ledger, splits, question
        self._tells_nodes_apart = any(asks.barred for asks in question.asks.values()) or any(
            node.closed for node in question.nodes
        )
        self.placements: dict[str, Placement] = {}
        self.movers: list[int] = []
        self._staying: list[int] = []
        seconds = question.second_jobs
        # A second job gets its GPU where the first has left it.
        for at, (job, pool, gpus) in sorted(enumerate(self.granted), key=lambda one: one[1][0] in seconds):
            now = running.get(job)
            if now and job in splits:
                own = [(pool, Counter(ledger.nodes[name].group for name in now.nodes))]
                now = now if splits[job] == own else None
            if now and now.pool == pool and len(now.nodes) == gpus and ledger.grant(now.nodes):
                self.placements[job] = now
                self._staying.append(at)
            else:
                self.movers.append(at)
        self.movers.sort()
        self._staying.sort()

    def asks(self, at: int) -> NodeRequest:
        """Request of the gang for its nodes."""
        return self._question.asks_of(self.granted[at][0])

    def place(self, at: int) -> bool:
        """Give the gang what is free; whether it finds its nodes."""
        job, pool, gpus = self.granted[at]
        chosen = self._packed(at, by_group=self.asks(at).required is None)
        if chosen is None:
            every = self._question.asks.values()
            in_pods = any(asks.per_pod > 1 or asks.topology is not None for asks in every)
            assert in_pods, f"{job} was granted {gpus} GPUs that pool {pool} has not"
            return False
        self._give(at, chosen)
        return True

    def make_room(self, at: int) -> bool:
        """Give the gang nodes of less urgent ones that stay, as few as possible; these have to move."""
        less = [other for other in self._staying if other > at and self.pools(at) & self.pools(other)]

        def fits(count: int) -> bool:
            own = [name for other in less[len(less) - count :] for name in self._nodes(other)]
            self._ledger.undo(own)
            found = self._packed(at)
            self._ledger.take(own)
            return found is not None

        if not fits(len(less)):
            return False
        count = bisect.bisect_left(range(len(less)), True, key=fits)
        leaving = less[len(less) - count :]
        for other in leaving:
            self._ledger.undo(self._nodes(other))
        chosen = self._packed(at)
        assert chosen is not None
        self._give(at, chosen)
        for other in leaving:
            if not self._ledger.grant(self._nodes(other)):
                del self.placements[self.granted[other][0]]
                self._staying.remove(other)
                bisect.insort(self.movers, other)
        return True

    def keep(self, at: int, pinned: Collection[str]) -> list[str]:
        """Keep for the gang what is free of the nodes that it would get without those that stay.

        Those of more urgent gangs that may be disturbed are theirs.
        """
        others = [
            name
            for other in self._staying
            if (other > at or self.granted[other][0] in pinned) and self.pools(at) & self.pools(other)
            for name in self._nodes(other)
        ]
        self._ledger.undo(others)
        wanted = Counter(self._packed(at) or ())
        self._ledger.take(others)
        kept = [name for name, gpus in wanted.items() for _ in range(min(gpus, self._ledger.left[name]))]
        self._ledger.take(kept)
        return kept

    def pools(self, at: int) -> set[str]:
        """Pools of the gang."""
        job, pool, _ = self.granted[at]
        if job in self.placements:
            return {*self.placements[job].nodes_by_pool}
        return {part[0] for part in self._splits.get(job, ())} or {pool}

    def _nodes(self, at: int) -> Sequence[str]:
        return self.placements[self.granted[at][0]].nodes

    def _packed(self, at: int, *, by_group: bool = False) -> tuple[str, ...] | None:
        """Nodes for the gang; ``by_group``: in the groups of its split, where it has one."""
        job, pool, gpus = self.granted[at]
        split = self._splits.get(job)
        asks = self.asks(at)
        if split is not None and len(split) > 1:
            asks = NodeRequest(self._question.mixed[job].barred, asks.per_pod)
        chosen: list[str] = []
        for there, groups in split if split is not None else [(pool, {"": gpus})]:
            counts: list[tuple[str | None, int]] = [(None, sum(groups.values()))]
            if split is not None and by_group:
                counts = [*groups.items()]
            for group, count in counts:
                members: Sequence[Node] = self._ledger.pools[there]
                if group is not None:
                    members = [node for node in members if node.group == group]
                elif self._tells_nodes_apart:
                    members = asks.open(members)
                found = pack(count, members, self._ledger.left, asks.per_pod, asks.topology)
                if found is None:
                    self._ledger.undo(chosen)
                    return None
                self._ledger.take(found)
                chosen += found
        self._ledger.undo(chosen)
        return tuple(chosen)

    def _give(self, at: int, nodes: tuple[str, ...]) -> None:
        job, pool, _ = self.granted[at]
        self._ledger.take(nodes)
        parts = tuple(
            PoolPart(pool=there, gpu_type=self._type(there), gpus=sum(groups.values()))
            for there, groups in self._splits.get(job, ())
        )
        self.placements[job] = Placement(
            gpu_type=self._type(pool), pool=pool, nodes=nodes, parts=parts if len(parts) > 1 else ()
        )

    def _type(self, pool: str) -> str:
        return self._ledger.pools[pool][0].gpu_type


def _reasons(
    question: Question,
    pools: Pools,
    received_fraction: Mapping[tuple[str, str], float],
    placements: Mapping[str, Placement],
    kept_for: Mapping[str, str],
    pinned: Mapping[str, str] = MappingProxyType({}),
    second: Collection[str] = (),
) -> dict[str, Reason]:
    """Reason for each job of the question; ``second``: running jobs that were second on their GPU.

    ``received_fraction``: (job, column) -> fraction of the time that it has run there.
    """
    ran = question.state.running
    column_of = dict(zip(pools.names, pools.columns, strict=True))
    explained = Explained(question, placements, kept_for)
    reasons = {}
    for job in question.jobs:
        name, at, gang = job.name, placements.get(job.name), question.mixed.get(job.name)
        if at is None:
            reasons[name] = explained.waiting(job)
        elif name in second and ran[name] == at:
            reasons[name] = Reason(f"stays on {at}, now as its first job")
        elif name in pinned:
            reasons[name] = Reason(f"it {pinned[name]}", "keeps ")
        elif gang is not None and at.parts and ran.get(name) != at:
            why = "" if gang.fits_one_pool else ": no single pool holds it"
            reasons[name] = Reason(f"{at}{why}; {gang.speed_at(at):.3g} steps/s are predicted")
        else:
            columns = dict.fromkeys(column_of[part.pool] for part in at.by_pool)
            share = question.shares.get(name, {})
            reasons[name] = explain_placement(
                share=sum(share.get(column, 0.0) for column in columns),
                received_fraction=sum(received_fraction.get((name, column), 0.0) for column in columns),
                extended=ran.get(name) == at,
            )
    return reasons
