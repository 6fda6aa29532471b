"""One round: which gangs run where until the next (dissertation section 5.5).

1. Gangs that must not be disturbed keep their nodes (too young to stop).
2. The others are granted pools by priority; what no job with a share needs goes to whoever can use it.
3. If more running gangs would be stopped or moved than the hour allows, the newest of them stay.
4. Where a gang waits for gangs that must not be disturbed, what comes free is kept for it.
5. Nodes: a gang that stays in its pool keeps its own, the others are packed, the largest first.
"""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.allocation.problem import Allocation
from ballast_policies.rounds.explanations import chosen_words, pinned_words, waiting_words
from ballast_policies.rounds.hysteresis import (
    keep_free,
    moves_left,
    spared,
    too_young,
    valid_placements,
)
from ballast_policies.rounds.packing import assign_nodes
from ballast_policies.rounds.priority import by_urgency, priorities
from ballast_policies.rounds.selection import Claims, select
from ballast_policies.rounds.values import (
    Gang,
    Node,
    Placement,
    Round,
    RoundSettings,
    RoundState,
)


def decide_round(
    *,
    now: float,
    allocation: Allocation,
    gangs: Sequence[Gang],
    nodes: Sequence[Node],
    state: RoundState,
    settings: RoundSettings,
) -> Round:
    """Decide the round that begins at ``now`` (seconds, on the clock of the state's times).

    A gang runs whole or not at all, on one pool; no node is given more GPUs than it has; a running
    gang whose lease is extended keeps exactly its nodes. The same input gives the same round.
    """
    board = _Board.of(now, allocation, gangs, nodes, state, settings)
    pinned = too_young(now, board.valid, state, settings)
    limit = moves_left(now, state, settings)
    while True:
        placements, kept_for = _grant(board, pinned, keep=settings.keep_free)
        disturbed = {job: at for job, at in board.valid.items() if placements.get(job) != at}
        if limit is None or len(disturbed) <= limit:
            break
        words = f"would be stopped or moved, but only {settings.max_moves_per_hour} an hour may be"
        pinned = {**pinned, **spared(disturbed, state, limit, words)}
    return _as_round(board, placements, pinned, kept_for, state)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Board:
    """The question as arrays: gangs by rows, pools by columns, and all claims in order of urgency."""

    gangs: Mapping[str, Gang]
    names: tuple[str, ...]
    nodes: Sequence[Node]
    pools: tuple[str, ...]
    capacity: np.ndarray
    claims: Claims
    stays: np.ndarray
    share: np.ndarray
    fraction: Mapping[tuple[str, str], float]
    shares: Mapping[str, Mapping[str, float]]
    valid: Mapping[str, Placement]

    @classmethod
    def of(
        cls,
        now: float,
        allocation: Allocation,
        gangs: Sequence[Gang],
        nodes: Sequence[Node],
        state: RoundState,
        settings: RoundSettings,
    ) -> "_Board":
        by_name = {gang.job: gang for gang in gangs}
        valid = valid_placements(by_name, {node.name: node.gpus for node in nodes}, state)
        kinds = {node.pool: node.gpu_type for node in nodes}
        # A pool whose largest node holds a gang whole is better than one where it must spread.
        largest = {pool: max(node.gpus for node in nodes if node.pool == pool) for pool in kinds}
        pools = tuple(sorted(kinds))
        capacity = np.array([sum(n.gpus for n in nodes if n.pool == pool) for pool in pools], dtype=np.int64)
        elapsed = max(
            [settings.round_seconds]
            + [sum(row.values()) for row in state.received.values()]
            + [now - since for since in state.running_since.values()]
        )
        rows, fraction = [], {}
        for m, gang in enumerate(gangs):
            received = state.received.get(gang.job, {})
            had = sum(received.values())
            owed = (state.promised or {}).get(gang.job, {})
            best = max(gang.throughput.values(), default=0.0)
            for j, pool in enumerate(pools):
                kind = kinds[pool]
                rate = gang.throughput.get(kind, 0.0)
                if rate <= 0:
                    continue
                fraction[gang.job, kind] = min(1.0, received.get(kind, 0.0) / elapsed)
                share = allocation.allocation.get(gang.job, {}).get(kind, 0.0)
                stays = gang.job in valid and valid[gang.job].pool == pool
                rows.append(
                    (
                        m,
                        j,
                        gang.gpus,
                        stays,
                        share,
                        share * elapsed if state.promised is None else owed.get(kind, 0.0),
                        received.get(kind, 0.0),
                        had,
                        rate / best,
                        largest[pool] < gang.gpus,
                    )
                )
        table = np.array(rows, dtype=float).reshape(-1, 10)
        row, column, size, staying, share_, promised, here, everywhere, speed, spread = table.T
        priority = priorities(share_, promised, here, round_seconds=settings.round_seconds)
        order = by_urgency(priority, -share_, everywhere, -speed, row, -staying, spread, column)
        claims = Claims(
            job=row.astype(np.int64),
            partner=np.full(len(table), -1, dtype=np.int64),
            column=column.astype(np.int64),
            gpus=size.astype(np.int64),
        )
        return cls(
            gangs=by_name,
            names=tuple(gang.job for gang in gangs),
            nodes=nodes,
            pools=pools,
            capacity=capacity,
            claims=claims.take(order),
            stays=staying[order] > 0,
            share=share_[order],
            fraction=fraction,
            shares=allocation.allocation,
            valid=valid,
        )


def _grant(
    board: _Board, pinned: Mapping[str, str], *, keep: bool
) -> tuple[dict[str, Placement], dict[str, str]]:
    """(job -> where it runs, pool -> job for which its free GPUs are kept)."""
    index = {name: m for m, name in enumerate(board.names)}
    room = board.capacity.copy()
    for job in pinned:
        room[board.pools.index(board.valid[job].pool)] -= board.gangs[job].gpus
    claims, position = board.claims, np.arange(len(board.claims))
    open_ = ~np.isin(claims.job, [index[job] for job in pinned])
    granted = position[open_][select(claims.take(open_), room)]
    kept_for = {}
    if pinned and keep:
        closed = keep_free(
            claims, np.flatnonzero(~open_ | np.isin(position, granted)), select(claims, board.capacity)
        )
        ahead = position < np.array([closed.get(column, len(claims)) for column in claims.column.tolist()])
        open_ &= board.stays | ahead
        granted = position[open_][select(claims.take(open_), room)]
        kept_for = {board.pools[column]: board.names[claims.job[at]] for column, at in closed.items()}
    wanted = [(job, board.valid[job].pool, board.gangs[job].gpus) for job in sorted(pinned)]
    wanted += [
        (board.names[claims.job[k]], board.pools[claims.column[k]], int(claims.gpus[k])) for k in granted
    ]
    return assign_nodes(wanted, board.nodes, board.valid), kept_for


def _as_round(
    board: _Board,
    placements: Mapping[str, Placement],
    pinned: Mapping[str, str],
    kept_for: Mapping[str, str],
    state: RoundState,
) -> Round:
    free = {node.name: node.gpus for node in board.nodes}
    for placement in placements.values():
        for name in placement.nodes:
            free[name] -= 1
    ran, names = state.running, board.names
    extended = tuple(job for job in names if job in ran and placements.get(job) == ran[job])
    reasons = {}
    for job, gang in board.gangs.items():
        at = placements.get(job)
        if at is None:
            reasons[job] = waiting_words(gang, board.nodes, free, kept_for)
        elif job in pinned:
            reasons[job] = pinned_words(at, pinned[job])
        else:
            reasons[job] = chosen_words(
                at,
                share=board.shares.get(job, {}).get(at.gpu_type, 0.0),
                received_fraction=board.fraction[job, at.gpu_type],
                extended=job in extended,
            )
    return Round(
        placements=dict(placements),
        extended=extended,
        started=tuple(job for job in names if job not in ran and job in placements),
        moved=tuple(job for job in names if job in ran and job in placements and job not in extended),
        stopped=tuple(sorted(job for job in ran if job not in placements)),
        waiting=tuple(job for job in names if job not in ran and job not in placements),
        reasons=reasons,
    )
