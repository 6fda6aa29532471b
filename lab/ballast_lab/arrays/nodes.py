"""Nodes of gangs, and what it costs gangs to be spread: placement, where the table has it.

Gavel measured gangs twice: consolidated on as few nodes as possible, and not (``_unconsolidated`` in its
tables).  A gang that is larger than a node cannot be consolidated, wherever it is put: policies see its
other speed.  One that would fit a node and is spread over several, because its grant began when no node
had as much room, runs at the other speed until it is moved.  Nodes are handed out, and spread gangs brought
together, by the operator's code.
"""

from collections.abc import Callable

import numpy as np
from ballast_policies.rounds.decide import consolidate
from ballast_policies.rounds.draft import Draft
from ballast_policies.rounds.gangs import SpreadGang
from ballast_policies.rounds.grants import assign_nodes
from ballast_policies.rounds.ledger import Ledger as GpuLedger
from ballast_policies.rounds.memory import moves_left
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Placement, RoundSettings, RoundState
from ballast_policies.simulator.engine import nodes_of
from ballast_policies.simulator.ledger import Ledger

from ballast_lab.arrays.by_shares import EMPTY_GRANT, Grant
from ballast_lab.arrays.rules import ArraySettings
from ballast_lab.arrays.solving import ShareSolver


class Nodes:
    """The nodes of a cluster, and who is on which."""

    def __init__(self, ledger: Ledger, clock: Callable[[], float] = lambda: 0.0) -> None:
        self._ledger = ledger
        self._clock = clock
        self._since: dict[str, float] = {}
        self._nodes = list(nodes_of(ledger))
        self._placed: dict[str, Placement] = {}
        self._last = EMPTY_GRANT
        self._spread = np.zeros(0, dtype=bool)

    def spread(self, grant: Grant) -> np.ndarray:
        """(G,) which of the granted are on several nodes although one would hold them.

        Those that ran on the same GPU type before keep their nodes; the others are packed.
        """
        if _same(grant, self._last):
            return self._spread
        ledger, types = self._ledger, self._ledger.gpu_types
        names = [str(job) for job in grant.job.tolist()]
        for name, partner in zip(names, grant.partner.tolist(), strict=True):
            if name not in self._placed and str(partner) in self._placed:
                self._placed[name] = self._placed[str(partner)]
        wanted = [
            (name, types[column], gpus)
            for name, column, gpus in zip(
                names, grant.column.tolist(), ledger.gpus[grant.job].tolist(), strict=True
            )
        ]
        nothing_asked = Question(now=self._clock(), shares={}, jobs=(), nodes=self._nodes)
        placed = assign_nodes(wanted, GpuLedger(self._nodes), self._placed, {}, nothing_asked)
        self._last = grant
        now = self._clock()
        self._since = {
            name: self._since.get(name, now) if at == self._placed.get(name) else now
            for name, at in placed.items()
        }
        self._spread = self._are_spread(wanted, placed)
        # Who loses its partner stays where the two were.
        partners = {
            str(partner): placed[name]
            for name, partner in zip(names, grant.partner.tolist(), strict=True)
            if partner >= 0
        }
        self._placed = {**placed, **partners}
        return self._spread

    def bring_together(self, grant: Grant, settings: ArraySettings) -> list[int]:
        """Move spread gangs to one node at the end of a round, where that pays; those moved, as rows.

        Args:
            grant: of the round that begins.
            settings: of the simulation.
        """
        ran = {str(job) for job in self._last.job.tolist()}
        before = {name: at for name, at in self._placed.items() if name in ran}
        since = dict(self._since)
        if not self.spread(grant).any():
            return []
        ledger = self._ledger
        names = [str(job) for job in grant.job.tolist()]
        placements = {name: self._placed[name] for name in names}
        alone = grant.partner < 0
        spread = {
            names[i]: SpreadGang(
                at=placements[names[i]],
                fewest=1,
                speed=float(ledger.spread_rate[grant.job[i], grant.column[i]]),
                packed_speed=float(ledger.rate[grant.job[i], grant.column[i]]),
                restart_seconds=settings.stop_seconds + settings.launch_seconds,
            )
            for i in np.flatnonzero(self._spread & alone).tolist()
        }
        question = Question(
            now=self._clock(),
            shares={},
            jobs=(),
            nodes=self._nodes,
            state=RoundState(running=before, running_since=since),
            settings=RoundSettings(
                round_seconds=settings.round_seconds,
                min_run_seconds=settings.min_run_seconds,
                max_moves_per_hour=settings.max_moves_per_hour,
            ),
            spread=spread,
        )
        # The moves of this round are among those of the hour.
        granted = Draft(question=question, placements=placements, reasons={})
        decided = consolidate(granted, moves_left(question))
        moved = [name for name, at in decided.placements.items() if placements[name] != at]
        self._placed |= decided.placements
        self._since |= dict.fromkeys(moved, self._clock())
        self._spread &= ~np.isin(names, moved)
        return [int(name) for name in moved]

    def _are_spread(self, wanted: list[tuple[str, str, int]], placed: dict[str, Placement]) -> np.ndarray:
        per_node = self._ledger.gpus_per_node
        return np.array(
            [
                gpus <= per_node.get(gpu_type, gpus) and len(set(placed[name].nodes)) > 1
                for name, gpu_type, gpus in wanted
            ],
            dtype=bool,
        )

    def slowdown(self, grant: Grant) -> np.ndarray:
        """(G,) speed of the granted where they are, over that on as few nodes as possible."""
        ledger, spread = self._ledger, self.spread(grant)
        best = ledger.rate[grant.job, grant.column]
        found: np.ndarray = np.where(spread, ledger.spread_rate[grant.job, grant.column] / best, 1.0)
        return found


def _same(one: Grant, other: Grant) -> bool:
    return (
        np.array_equal(one.job, other.job)
        and np.array_equal(one.column, other.column)
        and np.array_equal(one.partner, other.partner)
    )


def running_jobs(
    grant: Grant, ledger: Ledger, solver: ShareSolver, nodes: Nodes | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns, steps/s, and part of the price, of all jobs that run, the partners last."""
    paired = grant.partner >= 0
    rates = ledger.rate[grant.job, grant.column]
    slowdown = np.ones(len(rates)) if nodes is None else nodes.slowdown(grant)
    rates = rates * slowdown
    if not paired.any():
        return grant.job, grant.column, rates, np.ones(len(rates))
    shared = np.array(
        [
            solver.shared_rates(first, second, column)
            for first, second, column in zip(
                grant.job[paired].tolist(),
                grant.partner[paired].tolist(),
                grant.column[paired].tolist(),
                strict=True,
            )
        ]
    )
    shared *= slowdown[paired][:, None]
    rates[paired] = shared[:, 0]
    part = np.where(paired, 0.5, 1.0)
    return (
        np.concatenate([grant.job, grant.partner[paired]]),
        np.concatenate([grant.column, grant.column[paired]]),
        np.concatenate([rates, shared[:, 1]]),
        np.concatenate([part, np.full(len(shared), 0.5)]),
    )
