"""The claims of a round: every job on every pool that it can use, in order of urgency."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.priority import by_urgency, priorities
from ballast_policies.rounds.selection import Claims
from ballast_policies.rounds.values import Node, Placement, RoundSettings, RoundState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pools:
    """The pools of a round, sorted by name; parallel sequences.

    Attributes:
        names: names of the pools.
        gpu_types: GPU type of each pool.
        columns: column of the allocation for each pool: its GPU type, unless that has several.
        capacity: (P,) GPUs of each pool.
        largest_node: GPUs of each pool's largest node.
    """

    names: tuple[str, ...]
    gpu_types: tuple[str, ...]
    columns: tuple[str, ...]
    capacity: np.ndarray
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
            capacity=np.array([sum(n.gpus for n in members[name]) for name in names], dtype=np.int64),
            largest_node=tuple(max(n.gpus for n in members[name]) for name in names),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderedClaims:
    """All claims, the most urgent first; ``stays`` and ``share`` are parallel to ``claims``.

    Attributes:
        claims: job indices and pool indices as given.
        stays: whether the job runs in that pool now.
        received_fraction: (job, column) -> fraction of the time that it has run there.
    """

    claims: Claims
    stays: np.ndarray
    received_fraction: Mapping[tuple[str, str], float]


def ordered_claims(
    jobs: Sequence[Job],
    pools: Pools,
    shares: Mapping[str, Mapping[str, float]],
    *,
    now: float,
    valid: Mapping[str, Placement],
    state: RoundState,
    settings: RoundSettings,
) -> OrderedClaims:
    """The claims of ``jobs`` on ``pools`` by priority (dissertation section 5.5).

    Ties go to the larger share, the job that has run least, the faster type, the earlier job, the pool it
    runs in, and the pool where one node holds the whole gang.

    Args:
        jobs: in order of arrival.
        pools: of the cluster.
        shares: job -> column -> fraction of time.
        now: seconds, on the clock of the state's times.
        valid: job -> placement, of running jobs that could continue where they are.
        state: time promised and received so far.
        settings: of the rounds.
    """
    elapsed = _elapsed(now, state, settings)
    rows = []
    received_fraction = {}
    for index, job in enumerate(jobs):
        received, promised = state.received.get(job.name, {}), (state.promised or {}).get(job.name, {})
        total, fastest = sum(received.values()), max(job.throughput.values(), default=0.0)
        for index_of_pool, pool in enumerate(pools.names):
            rate, column = (
                job.throughput.get(pools.gpu_types[index_of_pool], 0.0),
                pools.columns[index_of_pool],
            )
            if rate <= 0:
                continue
            received_fraction[job.name, column] = min(1.0, received.get(column, 0.0) / elapsed)
            share = shares.get(job.name, {}).get(column, 0.0)
            rows.append(
                (
                    index,
                    index_of_pool,
                    job.gpus,
                    job.name in valid and valid[job.name].pool == pool,
                    share,
                    share * elapsed if state.promised is None else promised.get(column, 0.0),
                    received.get(column, 0.0),
                    total,
                    rate / fastest,
                    pools.largest_node[index_of_pool] < job.gpus,
                )
            )
    table = np.array(rows, dtype=float).reshape(-1, 10)
    index_, column_, gpus, stays, share_, promised_, here, total_, speed, spread = table.T
    priority = priorities(share_, promised_, here, round_seconds=settings.round_seconds)
    order = by_urgency(priority, -share_, total_, -speed, index_, -stays, spread, column_)
    claims = Claims(
        job=index_.astype(np.int64),
        partner=np.full(len(table), -1, dtype=np.int64),
        column=column_.astype(np.int64),
        gpus=gpus.astype(np.int64),
    )
    return OrderedClaims(
        claims=claims.take(order), stays=stays[order] > 0, received_fraction=received_fraction
    )


def _elapsed(now: float, state: RoundState, settings: RoundSettings) -> float:
    """Seconds that the longest-running job can look back on; at least a round."""
    received = (sum(row.values()) for row in state.received.values())
    running = (now - since for since in state.running_since.values())
    return max([settings.round_seconds, *received, *running])
