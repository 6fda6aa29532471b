"""Rounds with hysteresis, decided by the operator's own ``decide_round``.

With ``min_run_seconds`` or ``max_moves_per_hour`` every round is decided by the function that the operator
calls, on values made from the ledger. A GPU type is one pool with one node; nodes are assigned
afterwards (``nodes``).
"""

from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds import Node, Placement, Question, RoundSettings, RoundState, decide_round
from ballast_policies.rounds.hysteresis import recent_moves
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.rounds.by_shares import Grant, SimulatedRounds
from ballast_policies.simulator.settings import SimulationSettings
from ballast_policies.simulator.solving import name_of, row_of


class HysteresisRounds(SimulatedRounds):
    """As :class:`SimulatedRounds`, with hysteresis; no pairs, as in the operator."""

    def __init__(self, ledger: Ledger, settings: SimulationSettings, clock: Callable[[], float]) -> None:
        super().__init__(ledger, settings)
        self._clock = clock
        self._began: dict[int, tuple[int, float]] = {}
        self._moves: tuple[float, ...] = ()

    def fill(self, active: np.ndarray, running: Grant) -> Grant:
        """Within a round: running gangs continue, and others start on free GPUs that are not reserved."""
        return self._decide(active, running, within_round=True)

    def grant(self, active: np.ndarray, running: Grant, room: np.ndarray) -> Grant:
        """The gangs that run in the round that begins now."""
        del room  # All of the cluster: running gangs take part.
        return self._decide(active, running, within_round=False)

    @property
    def moves(self) -> tuple[float, ...]:
        """When running gangs were moved or stopped within the last hour."""
        return self._moves

    def brought_together(self, rows: list[int]) -> None:
        """Take note of gangs that have moved to fewer nodes: they begin anew, and each is a move."""
        now = self._clock()
        self._began |= {row: (self._began[row][0], now) for row in rows}
        self._moves = (*self._moves, *[now] * len(rows))

    def _decide(self, active: np.ndarray, running: Grant, *, within_round: bool) -> Grant:
        ledger, settings, now = self._ledger, self._settings, self._clock()
        types = ledger.gpu_types
        where = dict(zip(running.job.tolist(), running.column.tolist(), strict=True))
        self._began = {
            row: self._began[row] if self._began.get(row, (-1, 0.0))[0] == column else (column, now)
            for row, column in where.items()
        }
        rows = active.tolist()
        entries = self._accounts.entries(active, np.full(len(active), -1))
        empty = np.zeros(len(types))

        def by_type(values: np.ndarray) -> dict[str, dict[str, float]]:
            return {
                name_of(row): dict(zip(types, (values[entry] if entry >= 0 else empty).tolist(), strict=True))
                for row, entry in zip(rows, entries.tolist(), strict=True)
            }

        self._moves = recent_moves(self._moves, now)
        decided = decide_round(
            Question(
                now=now,
                shares=by_type(self._shares.share),
                jobs=[
                    Job(
                        name=name_of(row),
                        gpus=int(ledger.gpus[row]),
                        throughput=dict(zip(types, ledger.rate[row].tolist(), strict=True)),
                    )
                    for row in rows
                ],
                nodes=[
                    Node(name=t, pool=t, gpu_type=t, gpus=int(count))
                    for t, count in zip(types, ledger.capacity, strict=True)
                    if count
                ],
                state=RoundState(
                    received=by_type(self._accounts.received),
                    promised=by_type(self._accounts.promised),
                    running={
                        name_of(row): Placement(
                            gpu_type=types[column],
                            pool=types[column],
                            nodes=(types[column],) * int(ledger.gpus[row]),
                        )
                        for row, column in where.items()
                    },
                    running_since={name_of(row): since for row, (_, since) in self._began.items()},
                    moves=self._moves,
                ),
                settings=RoundSettings(
                    round_seconds=settings.round_seconds,
                    min_run_seconds=settings.min_run_seconds,
                    max_moves_per_hour=settings.max_moves_per_hour,
                    within_round=within_round,
                ),
            )
        )
        self._moves = (*self._moves, *([now] * (len(decided.moved) + len(decided.stopped))))
        found = {row_of(name): types.index(at.gpu_type) for name, at in decided.placements.items()}
        for row, column in found.items():
            if where.get(row) != column:
                self._began[row] = (column, now)
        # Running gangs come first, in the order in which they were granted.
        order = sorted(found, key=lambda row: (row not in where, row))
        return Grant(
            job=np.array(order, dtype=np.int64),
            partner=np.full(len(order), -1, dtype=np.int64),
            column=np.array([found[row] for row in order], dtype=np.int64),
        )
