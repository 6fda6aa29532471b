"""Way from the ledger to the allocation problem, and back to arrays of shares."""

import dataclasses
import time

import numpy as np
from ballast_policies.allocation.instance import from_arrays
from ballast_policies.allocation.policy import SpaceSharing
from ballast_policies.allocation.problem import Allocation, Job, Pair, Problem
from ballast_policies.allocation.registry import allocate, find_policy, solve
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.throughput.table import JobType

from ballast_lab.arrays.rules import ArraySettings


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Shares:
    """An allocation as arrays: entries are jobs alone, then pairs.

    Attributes:
        job: (E,) row of the (first) job.
        partner: (E,) row of the second job of a pair, -1: alone.
        share: (E, K) fraction of time on each GPU type.
        solve_seconds: wall time of the solve.
        status: the solver's.
    """

    job: np.ndarray
    partner: np.ndarray
    share: np.ndarray
    solve_seconds: float
    status: str


class ShareSolver:
    """Solves the policy for the jobs of a ledger, as the operator does."""

    def __init__(self, ledger: Ledger, settings: ArraySettings) -> None:
        self._ledger = ledger
        self._settings = settings
        self._capacity = {t: int(c) for t, c in zip(ledger.gpu_types, ledger.capacity, strict=True)}
        self._prices = {t: float(p) for t, p in zip(ledger.gpu_types, ledger.prices, strict=True)}
        always = find_policy(settings.policy).space_sharing is SpaceSharing.ALWAYS
        self._shares_gpus = settings.space_sharing or always
        self._pair_rates: dict[tuple[JobType, JobType], dict[str, tuple[float, float]]] = {}
        make = settings.rules.own_policies
        self._own = None if make is None else make(ledger, settings, self.shared_rates)

    def solve(self, rows: np.ndarray, now: float) -> Shares:
        """Shares for the jobs ``rows`` (in order of arrival)."""
        if self._own is not None and self._own.answers(rows):
            (job, partner, share), seconds = self._own.solve(rows, lambda: self.problem(rows, now))
            status = self._own.status
            return Shares(job=job, partner=partner, share=share, solve_seconds=seconds, status=status)
        if not self._shares_gpus:
            return self._solve_alone(rows, now)
        problem = self.problem(rows, now)
        allocation = allocate(
            self._settings.policy,
            problem,
            agnostic=self._settings.agnostic,
            space_sharing=self._settings.space_sharing,
        )
        return self._as_shares(rows, allocation)

    def _solve_alone(self, rows: np.ndarray, now: float) -> Shares:
        """Without pairs: from the ledger's arrays to arrays, for thousands of jobs at a time."""
        ledger, started = self._ledger, time.perf_counter()
        deadline = ledger.deadline[rows] - now
        posed = dataclasses.replace(
            from_arrays(
                gpu_types=ledger.gpu_types,
                capacity=ledger.capacity,
                throughput=ledger.rate[rows],
                gpus=ledger.gpus[rows],
            ),
            weights=ledger.weight[rows],
            steps_remaining=ledger.left[rows],
            elapsed=np.maximum(0.0, now - ledger.arrival[rows]),
            isolated_elapsed=ledger.isolated_elapsed[rows],
            deadlines=np.where(np.isfinite(deadline), deadline, np.nan),
            usd_per_hour=self._prices,
        )
        answer = solve(self._settings.policy, posed, agnostic=self._settings.agnostic)
        return Shares(
            job=rows,
            partner=np.full(len(rows), -1),
            share=posed.alone(answer.x),
            solve_seconds=time.perf_counter() - started,
            status=answer.status,
        )

    def problem(self, rows: np.ndarray, now: float) -> Problem:
        """The allocation problem of the jobs ``rows`` at ``now``."""
        ledger = self._ledger
        jobs = []
        for row in rows.tolist():
            rates = dict(zip(ledger.gpu_types, ledger.rate[row].tolist(), strict=True))
            deadline = float(ledger.deadline[row])
            jobs.append(
                Job(
                    name=name_of(row),
                    throughput=rates,
                    gpus=int(ledger.gpus[row]),
                    weight=float(ledger.weight[row]),
                    steps_remaining=float(ledger.left[row]),
                    elapsed=max(0.0, now - float(ledger.arrival[row])),
                    isolated_elapsed=float(ledger.isolated_elapsed[row]),
                    deadline=deadline - now if np.isfinite(deadline) else None,
                )
            )
        return Problem(
            gpu_types=ledger.gpu_types,
            capacity=self._capacity,
            jobs=tuple(jobs),
            prices=self._prices,
            pairs=self._pairs(rows) if self._shares_gpus else (),
        )

    def shared_rates(self, first: int, second: int, column: int) -> tuple[float, float]:
        """Steps/s of two jobs on the same GPUs of the type of ``column``."""
        ledger = self._ledger
        return ledger.table.shared(
            ledger.jobs[first].type, ledger.jobs[second].type, ledger.gpu_types[column]
        )

    def _pairs(self, rows: np.ndarray) -> tuple[Pair, ...]:
        """Pairs of gangs of one size that gain on some GPU type from running together."""
        ledger, pairs = self._ledger, []
        listed = [(row, ledger.jobs[row].type) for row in rows.tolist()]
        for i, (first, a) in enumerate(listed):
            for second, b in listed[i + 1 :]:
                if a.gpus != b.gpus:
                    continue
                rates = self._pair_rates.get((a, b))
                if rates is None:
                    rates = self._pair_rates[a, b] = self._useful(a, b)
                if rates:
                    pairs.append(Pair(jobs=(name_of(first), name_of(second)), throughput=rates))
        return tuple(pairs)

    def _useful(self, a: JobType, b: JobType) -> dict[str, tuple[float, float]]:
        """Rates of a pair on the types where it does more than taking turns would."""
        table, found = self._ledger.table, {}
        for gpu_type in self._ledger.gpu_types:
            alone = table.alone(a, gpu_type), table.alone(b, gpu_type)
            shared = table.shared(a, b, gpu_type)
            if min(alone) > 0 and min(shared) > 0 and shared[0] / alone[0] + shared[1] / alone[1] > 1.0:
                found[gpu_type] = shared
        return found

    def _as_shares(self, rows: np.ndarray, allocation: Allocation) -> Shares:
        types = self._ledger.gpu_types
        alone = [[allocation.allocation[name_of(row)].get(t, 0.0) for t in types] for row in rows.tolist()]
        job, partner, shares = rows.tolist(), [-1] * len(rows), list(alone)
        for names, row_of_types in allocation.pair_allocation.items():
            shared = [row_of_types.get(t, 0.0) for t in types]
            if any(x > 0 for x in shared):
                first, second = names.split("+")
                job.append(row_of(first))
                partner.append(row_of(second))
                shares.append(shared)
        return Shares(
            job=np.array(job, dtype=np.int64),
            partner=np.array(partner, dtype=np.int64),
            share=np.array(shares, dtype=float).reshape(len(job), len(types)),
            solve_seconds=allocation.solve_seconds,
            status=allocation.status,
        )


def name_of(row: int) -> str:
    """Name of the job in ``row``; names sort in order of arrival."""
    return f"job-{row:07d}"


def row_of(name: str) -> int:
    """Row of the job of this name."""
    return int(name.removeprefix("job-"))
