"""Claims of jobs on pools: their order of urgency, and which of them are granted (dissertation section 5.5).

priority[m, j] = X[m, j] / f[m, j]: the fraction of time that job m should run on type j over the fraction
that it has run there. Shares change whenever jobs come and go, so both are kept as seconds, in an account:
promised[m, j] is the integral of X[m, j] over time, and priority = (promised + X r/2) / (received + r/2). For
constant shares this orders as X / f does. Half a round r is added so that a job that has had nothing has a
finite priority, in the order of its share. Above 1 a job is behind, below 1 ahead. Where X is 0 the priority
is 0: such a job runs only where GPUs would idle.

A claim is a job on a column: a pool. Claims come in order of urgency; each is granted if its column still has
room for its whole gang and its job has not been granted another (algorithm 2).

A gang that no pool holds, or that runs in several, has one claim on all columns together. It keeps its nodes
where more urgent ones leave them; else it is granted its fastest mix of what they leave, with its least size:
of GPUs that no running gang holds if it can, and unless it runs, of those of nodes to come.

Where a pool's nodes are not alike to every job, claims are granted by the GPUs left in each group of nodes
that are (``Node.group``): a job that does not tolerate a node's taints is not started there, and no job on a
closed node; gangs that run there stay.
"""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Self

import numpy as np

from ballast_policies.rounds.divisions import best_parts
from ballast_policies.rounds.gangs import MixedGang
from ballast_policies.rounds.ledger import Ledger
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement

SHARE_EPSILON = 1e-6
"""A smaller fraction is a solver's rounding error."""

SEVERAL = -1
"""The column of a claim on several pools."""

MOST_MIXES = 64
"""Waiting gangs for which a mix of pools is looked for in one pass, the most urgent first."""


def priorities(
    shares: np.ndarray, promised: np.ndarray, received: np.ndarray, *, round_seconds: float
) -> np.ndarray:
    """priority[m, j], without unit.

    Args:
        shares: X[m, j], fractions of time, as they are now.
        promised: seconds that job m should have run on type j, by its shares so far.
        received: seconds that it has run there, over the same time.
        round_seconds: length r of a round.
    """
    half = 0.5 * round_seconds
    priority: np.ndarray = np.where(
        shares > SHARE_EPSILON, (promised + shares * half) / (received + half), 0.0
    )
    return priority


def by_urgency(priority: np.ndarray, *ties: np.ndarray) -> np.ndarray:
    """Positions of flat ``priority`` from high to low; equal ones by each of ``ties`` from low to high.

    Priorities are compared in single precision, so that sums that differ in their last bits are ties.
    """
    order: np.ndarray = np.lexsort((*reversed(ties), -priority.astype(np.float32)))
    return order


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Claims:
    """Parallel arrays, the most urgent claim first.

    Attributes:
        job, column: indices as given.
        stays: whether the job runs in that pool now.
    """

    job: np.ndarray
    column: np.ndarray
    gpus: np.ndarray
    stays: np.ndarray

    def __len__(self) -> int:
        """Number of claims."""
        return len(self.job)

    def take(self, positions: np.ndarray) -> "Claims":
        """The claims at ``positions`` (indices or a mask), in their order."""
        return Claims(
            job=self.job[positions],
            column=self.column[positions],
            gpus=self.gpus[positions],
            stays=self.stays[positions],
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools of a round, sorted by name; parallel sequences.

    Attributes:
        gpu_types: GPU type of each pool.
        columns: column of the allocation for each pool: its GPU type, unless that has several.
        largest_node: GPUs of each pool's largest node.
    """

    names: tuple[str, ...]
    gpu_types: tuple[str, ...]
    columns: tuple[str, ...]
    largest_node: tuple[int, ...]

    @classmethod
    def of(cls, nodes: Sequence[Node], columns: Mapping[str, str]) -> "Pools":
        """The pools that ``nodes`` make up; ``columns``: pool -> column where it is not the GPU type."""
        members: dict[str, list[Node]] = {}
        for node in nodes:
            members.setdefault(node.pool, []).append(node)
        names = tuple(sorted(members))
        return cls(
            names=names,
            gpu_types=tuple(members[name][0].gpu_type for name in names),
            columns=tuple(columns.get(name, members[name][0].gpu_type) for name in names),
            largest_node=tuple(max(n.gpus for n in members[name]) for name in names),
        )


def ordered_claims(
    question: Question, pools: Pools, valid: Mapping[str, Placement]
) -> tuple[Claims, dict[tuple[str, str], float]]:
    """The claims of the jobs on ``pools`` by priority (dissertation section 5.5).

    Ties go to the larger share, the job that has run least, the faster type, the earlier job, the pool it
    runs in, and the pool where one node holds the whole gang.

    ``valid``: job -> placement, of running jobs that could continue where they are.

    Returns:
        these, and (job, column) -> fraction of the time that it has run there.
    """
    jobs, shares, state, settings = question.jobs, question.shares, question.state, question.settings
    elapsed = longest_run(question)
    each_pool = list(zip(pools.names, pools.gpu_types, pools.columns, pools.largest_node, strict=True))
    rows = []
    received_fraction = dict[tuple[str, str], float]()
    for index, job in enumerate(jobs):
        received, promised = state.received.get(job.name, {}), promised_to(question, job.name, elapsed)
        total, fastest = sum(received.values()), max(job.throughput.values(), default=0.0)
        several = question.in_several_pools(job.name)
        if several or (job.name in question.mixed and job.name not in state.running):
            # One that some pool holds has a share there; several are for it where no share wants their GPUs.
            share = sum(shares.get(job.name, {}).values()) if several else 0.0
            owed = sum(promised.values())
            rows.append((index, SEVERAL, job.gpus, job.name in valid, share, owed, total, total, 1.0, True))
        received_fraction |= {
            (job.name, column): min(1.0, seconds / elapsed) for column, seconds in received.items()
        }
        if several:
            continue
        for at, (pool, gpu_type, column, largest_node) in enumerate(each_pool):
            rate = job.throughput.get(gpu_type, 0.0)
            if rate <= 0:
                continue
            share = shares.get(job.name, {}).get(column, 0.0)
            rows.append(
                (
                    index,
                    at,
                    job.gpus,
                    job.name in valid and valid[job.name].pool == pool,
                    share,
                    promised.get(column, 0.0),
                    received.get(column, 0.0),
                    total,
                    rate / fastest,
                    largest_node < job.gpus,
                )
            )
    table = np.array(rows, dtype=float).reshape(-1, 10)
    index_, column_, gpus, stays, share_, promised_, here, total_, speed, spread = table.T
    priority = priorities(share_, promised_, here, round_seconds=settings.round_seconds)
    order = by_urgency(priority, -share_, total_, -speed, index_, -stays, spread, column_)
    claims = Claims(
        job=index_.astype(np.int64),
        column=column_.astype(np.int64),
        gpus=gpus.astype(np.int64),
        stays=stays > 0,
    )
    return claims.take(order), received_fraction


def promised_to(question: Question, job: str, elapsed: float) -> Mapping[str, float]:
    """Column -> seconds that a job should have run there: by its shares now, where no account is kept.

    ``elapsed``: as of :func:`longest_run`.
    """
    if question.state.promised is not None:
        return question.state.promised.get(job, {})
    return {column: share * elapsed for column, share in question.shares.get(job, {}).items()}


def longest_run(question: Question) -> float:
    """Seconds that the longest-running job can look back on; at least a round."""
    received = (sum(row.values()) for row in question.state.received.values())
    running = (question.now - since for since in question.state.running_since.values())
    return max([question.settings.round_seconds, *received, *running])


Split = Mapping[str, int]
"""Group of nodes -> GPUs of a gang in it."""

Parts = Sequence[tuple[int, Split]]
"""Parts of a gang in the order of its ranks: pool index, and its GPUs there."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Groups:
    """The groups of nodes of all pools.

    Attributes:
        pools: in order of their indices.
        room: for each pool: group -> GPUs.
        spare: the same, of GPUs that no running gang holds: with these, nobody need make way.
        provisionable: the same, of nodes that do not exist yet.
        barred: job index -> groups on which the job must not be started.
        held: job index -> its parts, of running jobs that could continue where they are.
        second_in: job index -> group of the node on which the job is second.
        per_pod: job index -> GPUs of each of its pods.
        order: all groups, those that fewest jobs may use first: they are of least use to the others.
        mixed: job index -> gang with its least size, of those that may claim several pools.
        apart: some nodes are barred to some job, or claims are on several pools; else a pool is one group.
    """

    pools: Pools
    apart: bool
    room: Sequence[Mapping[str, int]]
    spare: Sequence[Mapping[str, int]]
    provisionable: Sequence[Mapping[str, int]]
    barred: Mapping[int, frozenset[str]]
    held: Mapping[int, Parts]
    second_in: Mapping[int, str]
    order: tuple[str, ...]
    per_pod: Sequence[int]
    mixed: Mapping[int, MixedGang]

    @classmethod
    def of(
        cls,
        question: Question,
        pools: Pools,
        valid: Mapping[str, Placement],
        held: Mapping[str, Placement],
    ) -> Self:
        """The groups.

        ``valid``: of running jobs that could continue where they are; ``held``: running job -> all of it.
        """
        jobs, nodes, seconds = question.jobs, question.nodes, question.second_jobs
        there = {node.group for node in nodes if node.gpus > 0}
        closed = frozenset(node.group for node in nodes if node.gpus > 0 and node.closed)
        barred = {
            index: texts
            for index, job in enumerate(jobs)
            if (texts := (question.asks_of(job.name).barred & there) | closed)
        }
        apart = bool(barred or question.mixed) or any(at.parts for at in valid.values())
        group = {node.name: node.group if apart else "" for node in nodes}
        present = {group[node.name] for node in nodes if node.gpus > 0}
        column = {name: at for at, name in enumerate(pools.names)}
        room: list[Counter[str]] = [Counter() for _ in pools.names]
        provisionable: list[Counter[str]] = [Counter() for _ in pools.names]
        for node in nodes:
            room[column[node.pool]][group[node.name]] += node.gpus
            if node.provisionable:
                provisionable[column[node.pool]][group[node.name]] += node.gpus
        spare, nodes_left = [Counter[str]() for _ in pools.names], Ledger(nodes)
        for at in held.values():
            nodes_left.take(at.nodes)
        for node in nodes:
            spare[column[node.pool]][group[node.name]] += max(0, nodes_left.left[node.name])
        parts = {
            index: [
                (column[pool], Counter(group[name] for name in names))
                for pool, names in valid[job.name].nodes_by_pool.items()
            ]
            for index, job in enumerate(jobs)
            if job.name in valid
        }
        refusals = Counter(text for texts in barred.values() for text in texts)
        return cls(
            pools=pools,
            apart=apart,
            room=room,
            spare=spare,
            provisionable=provisionable,
            barred=barred,
            held=parts,
            second_in={
                index: group[name]
                for index, job in enumerate(jobs)
                if job.name in seconds and (name := question.state.running[job.name].nodes[0]) in group
            },
            order=tuple(sorted(present, key=lambda text: (-refusals[text], text))),
            per_pod=[question.asks_of(job.name).per_pod for job in jobs],
            mixed={
                index: dataclasses.replace(gang.smallest, barred=gang.barred | closed)
                for index, job in enumerate(jobs)
                if (gang := question.mixed.get(job.name)) is not None
            },
        )

    def select(
        self, claims: Claims, pinned: Iterable[int], shut: Mapping[int, frozenset[int]] | None = None
    ) -> tuple[np.ndarray, dict[int, Parts]]:
        """Positions of the granted claims, in their order; also the parts of each job that starts or moves.

        Args:
            claims: the most urgent first.
            pinned: jobs, by index, that keep their nodes before any claim is granted.
            shut: job with a claim on several pools -> pools in which it may not be started.
        """
        left = [Counter(groups) for groups in self.room]
        spare = [Counter(groups) for groups in self.spare]
        for job in pinned:
            _take(self.held[job], left)
        taken: set[int] = set()
        granted: list[int] = []
        found: dict[int, Parts] = {}
        mixes = 0
        rows = zip(claims.job.tolist(), claims.column.tolist(), claims.gpus.tolist(), strict=True)
        for position, (job, column, gpus) in enumerate(rows):
            if job in taken:
                continue
            held = self.held.get(job, ())
            if held and column in (SEVERAL, held[0][0]) and _fits(held, left):
                parts: Parts | None = held
            elif column != SEVERAL:
                split = self._split(job, gpus, left[column], self.barred.get(job, frozenset()))
                parts = None if split is None else [(column, split)]
            else:
                mixes += not held
                rooms = (spare, left) if held or mixes <= MOST_MIXES else ()
                parts = self._mix(job, rooms, (shut or {}).get(job, frozenset()))
            if parts is None:
                continue
            if parts is not held:
                found[job] = parts
                _take(parts, spare)
            _take(parts, left)
            taken.add(job)
            granted.append(position)
        return np.array(granted, dtype=np.int64), found

    def _split(
        self, job: int, gpus: int, left: Mapping[str, int], barred: frozenset[str] = frozenset()
    ) -> Split | None:
        """GPUs for a gang that starts, from groups that are not barred; None: too few are left."""
        split, missing = {}, gpus
        per_pod = self.per_pod[job]
        own = (self.second_in[job],) if job in self.second_in else ()
        for text in (*own, *self.order):
            here = min(missing, left.get(text, 0)) // per_pod * per_pod if text not in barred else 0
            if here > 0:
                split[text] = here
                missing -= here
        return split if missing == 0 else None

    def _mix(self, job: int, rooms: Iterable[Sequence[Counter[str]]], shut: frozenset[int]) -> Parts | None:
        """The parts of the fastest mix in the first of ``rooms`` that has one; None: there is none."""
        gang, tried = self.mixed.get(job), list[object]()
        if gang is None:
            return None
        for room in rooms:
            for provisionable in (False, True) if job not in self.held else (False,):
                left = {
                    at: {
                        text: max(0, has - (0 if provisionable else self.provisionable[at][text]))
                        for text, has in groups.items()
                        if text not in gang.barred
                    }
                    for at, groups in enumerate(room)
                    if at not in shut
                }
                if left in tried:
                    continue
                tried.append(left)
                gpus = {
                    self.pools.names[at]: (
                        self.pools.gpu_types[at],
                        sum(has // gang.per_pod * gang.per_pod for has in groups.values()),
                    )
                    for at, groups in left.items()
                }
                parts: list[tuple[int, Split]] = []
                for part in best_parts(gang, gpus):
                    at = self.pools.names.index(part.pool)
                    split = self._split(job, part.gpus, left[at])
                    if split is None:
                        break
                    left[at] = {text: has - split.get(text, 0) for text, has in left[at].items()}
                    parts.append((at, split))
                else:
                    if parts:
                        return parts
        return None


def _take(parts: Parts, room: Sequence[Counter[str]]) -> None:
    for at, split in parts:
        room[at].subtract(split)


def _fits(parts: Parts, room: Sequence[Counter[str]]) -> bool:
    return all(room[at][text] >= count for at, split in parts for text, count in split.items())
