"""Launch delays: until its first step a gang holds GPUs that do nothing.

A launch takes time (decide, create pods, load a checkpoint), and so does the exit of the gang whose GPUs it
gets (save, exit). Gavel's simulator has neither; they matter where they are not small against a round.
"""

import numpy as np

from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.rounds.by_shares import Grant


class LaunchDelays:
    """When each running gang does, or did, its first step."""

    def __init__(self, ledger: Ledger, *, launch_seconds: float, stop_seconds: float) -> None:
        self._ledger = ledger
        self._launch_seconds = launch_seconds
        self._stop_seconds = stop_seconds
        self._first_step = np.zeros(0)
        self._began = np.zeros(0, dtype=bool)

    def note(self, before: Grant, after: Grant, now: float) -> None:
        """Record the gangs that run on a GPU type only from ``now`` on: they have yet to start.

        A gang waits for others to leave if it finds too few idle GPUs, or if it comes from another type.
        """
        ledger = self._ledger
        if len(self._first_step) < ledger.count:
            self._first_step = np.concatenate([self._first_step, np.zeros(ledger.count)])
        self._began = self._first_step <= now
        was = np.full(ledger.count, -1)
        for jobs in (before.job, before.partner):
            was[jobs[jobs >= 0]] = before.column[jobs >= 0]
        used = np.bincount(before.column, ledger.gpus[before.job], minlength=len(ledger.capacity))
        idle = ledger.capacity - used
        for job, partner, column in zip(
            after.job.tolist(), after.partner.tolist(), after.column.tolist(), strict=True
        ):
            starting = [row for row in (job, partner) if row >= 0 and was[row] != column]
            if not starting:
                continue
            finds_room = idle[column] >= ledger.gpus[job]
            idle[column] -= ledger.gpus[job] if finds_room else 0
            for row in starting:
                waits = 0.0 if finds_room and was[row] < 0 else self._stop_seconds
                self._first_step[row] = now + waits + self._launch_seconds

    def restart(self, rows: list[int], now: float) -> None:
        """Record gangs that save, leave, and start again on other nodes of their GPU type."""
        self._first_step[rows] = now + self._stop_seconds + self._launch_seconds

    def had_begun(self, rows: np.ndarray) -> np.ndarray:
        """Which of ``rows`` had done a step of their last launch when the newest starts were recorded."""
        began: np.ndarray = self._began[rows]
        return began

    def left(self, rows: np.ndarray, now: float) -> np.ndarray:
        """Seconds from ``now`` until each of ``rows`` does a step."""
        seconds: np.ndarray = np.maximum(0.0, self._first_step[rows] - now)
        return seconds
