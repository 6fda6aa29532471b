"""The state of every job so far, as arrays: row = job in order of arrival, column = GPU type."""

import numpy as np

from ballast_policies.accounting import cost, isolated_share, jobs_alike
from ballast_policies.contract.limits import MOST_SECONDS
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import TraceJob, WorkloadError
from ballast_policies.throughput.table import JobType, ThroughputTable

REFERENCE_TYPE = "v100"
"""Deadlines are multiples of the duration alone on this type; without a speed there, on the fastest one."""


class Ledger:
    """Jobs that have arrived.

    Attributes (N jobs, K GPU types, in the order of ``gpu_types``):
        rate: (N, K) steps/s alone on as few nodes as possible, 0 where a job cannot run.
        spread_rate: (N, K) steps/s alone on more nodes, where that was measured; else ``rate``.
        gpus, weight, arrival, steps, deadline: (N,) as given; deadline in s of the clock, inf: none.
        left: (N,) steps still to do.
        done: (N,) bool.
        first_run, finish: (N,) s of the clock, nan: not yet.
        seconds_on: (N, K) s run on each type in all.
        cost: (N,) USD.
        extensions: (N,) rounds in which the grant was extended.
        isolated_steps: (N,) steps that the job would have done on its isolated share of the cluster.
        isolated_finish: (N,) s after arrival at which it would have been done there, nan: not yet.
        isolated_elapsed: (N,) s that its own progress would have taken there.
    """

    def __init__(self, cluster: SimulatedCluster, table: ThroughputTable) -> None:
        self.gpu_types = tuple(cluster.gpus)
        self.capacity = np.array([cluster.gpus[t] for t in self.gpu_types], dtype=np.int64)
        self.prices = np.array([cluster.prices.get(t, 0.0) for t in self.gpu_types], dtype=float)
        self.table = table
        self.jobs: list[TraceJob] = []
        self.count = 0
        self._rates: dict[JobType, tuple[np.ndarray, np.ndarray, float]] = {}
        self.gpus_per_node = dict(cluster.gpus_per_node)
        wide = (0, len(self.gpu_types))
        self.rate, self.spread_rate, self.seconds_on = (np.zeros(wide) for _ in range(3))
        self.gpus, self.extensions = np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        self.weight, self.arrival, self.steps, self.left, self.deadline = (np.zeros(0) for _ in range(5))
        self.done = np.zeros(0, dtype=bool)
        self.first_run, self.finish, self.isolated_finish = (np.zeros(0) for _ in range(3))
        self.cost, self.isolated_steps, self.isolated_elapsed, self._equal = (np.zeros(0) for _ in range(4))

    def add(self, job: TraceJob) -> int:
        """Enter a job that has arrived; returns its row.

        Raises:
            WorkloadError: no GPU type of the cluster can ever run it, or come to its end; or it comes too
                late for a clock of seconds.
            ThroughputError: the table does not know its type.
        """
        if self.count == len(self.gpus):
            self._grow()
        row, m, table = self.count, job.type, self.table
        if m not in self._rates:
            rates = np.array([self.table.alone(m, gpu_type) for gpu_type in self.gpu_types])
            rates[self.capacity < m.gpus] = 0.0
            spread = rates.copy()
            for k, gpu_type in enumerate(self.gpu_types) if self.gpus_per_node and m.gpus > 1 else ():
                measured = table.spread(m, gpu_type) if rates[k] > 0 else None
                if measured is not None:
                    spread[k] = measured
                    if m.gpus > self.gpus_per_node.get(gpu_type, m.gpus):
                        rates[k] = spread[k]
            known = REFERENCE_TYPE in table.gpu_types
            reference = table.alone(m, REFERENCE_TYPE) if known else 0.0
            self._rates[m] = rates, spread, reference or float(rates.max())
        rates, spread, reference = self._rates[m]
        if not rates.any():
            raise WorkloadError(
                f"job {row} ({m.name}, {m.gpus} GPUs) fits on no GPU type of this cluster "
                f"({', '.join(f'{t}={c}' for t, c in zip(self.gpu_types, self.capacity, strict=True))})"
            )
        if job.steps / rates.max() > MOST_SECONDS:
            raise WorkloadError(
                f"job {row} ({m.name}): {job.steps:g} steps take {job.steps / rates.max():g} s alone on its "
                f"fastest GPU type. To fix: fewer steps, {MOST_SECONDS:g} s at most"
            )
        if job.arrival > MOST_SECONDS:
            raise WorkloadError(
                f"job {row} ({m.name}) arrives at {job.arrival:g} s. To fix: {MOST_SECONDS:g} s at most"
            )
        self.jobs.append(job)
        self.count += 1
        self.rate[row], self.gpus[row], self.weight[row] = rates, m.gpus, job.weight
        self.spread_rate[row] = spread
        self.arrival[row], self.steps[row], self.left[row] = job.arrival, job.steps, job.steps
        if job.deadline_factor is not None:
            self.deadline[row] = job.arrival + job.deadline_factor * job.steps / reference
        self._equal[row] = rates @ self.capacity
        return row

    def _grow(self) -> None:
        """Make room for twice as many jobs; times that have not come are nan, no deadline is inf."""
        more = max(64, len(self.done))
        empty = {"deadline": np.inf, "first_run": np.nan, "finish": np.nan, "isolated_finish": np.nan}
        for name, old in list(vars(self).items()):
            if isinstance(old, np.ndarray) and name not in ("capacity", "prices"):
                fresh = np.full((more, *old.shape[1:]), empty.get(name, 0), dtype=old.dtype)
                setattr(self, name, np.concatenate([old, fresh]))

    def measured(self, window: tuple[int, int] | None) -> tuple[int, int]:
        """(done, all) of the jobs of a window: first, one past the last; None: of all that have arrived."""
        first, end = window or (0, self.count)
        return int(self.done[first : min(end, self.count)].sum()), end - first

    def isolated_rate(self, rows: np.ndarray, present: np.ndarray) -> np.ndarray:
        """Steps/s of ``rows`` if each job ``present`` had its part of all GPUs (Gavel's X_isolated)."""
        share = isolated_share(
            self.gpus[rows].astype(float),
            jobs=jobs_alike(self.weight[rows], self.weight[present]),
            total_gpus=float(self.capacity.sum()),
        )
        rate: np.ndarray = self._equal[rows] * share
        return rate

    def book(
        self,
        rows: np.ndarray,
        columns: np.ndarray,
        steps: np.ndarray,
        seconds: np.ndarray,
        *,
        now: float,
        part: np.ndarray,
    ) -> np.ndarray:
        """Record that ``rows`` ran on ``columns`` from ``now`` for ``seconds``; returns which are done.

        ``part``: how much of the GPUs' price each pays; 0.5 for the two of a pair.
        """
        first = np.isnan(self.first_run[rows])
        self.first_run[rows[first]] = now
        self.seconds_on[rows, columns] += seconds
        self.cost[rows] += cost(self.gpus[rows] * part * seconds, self.prices[columns])
        self.left[rows] -= steps
        finished: np.ndarray = self.left[rows] <= 0
        ended = rows[finished]
        self.done[ended] = True
        self.finish[ended] = now + seconds[finished]
        return finished

    def compare_with_isolation(self, rows: np.ndarray, seconds: float, *, now: float) -> None:
        """Let ``rows`` progress for ``seconds`` on their isolated shares."""
        rate = self.isolated_rate(rows, rows)
        before = self.isolated_steps[rows]
        self.isolated_steps[rows] = before + rate * seconds
        crossed = np.isnan(self.isolated_finish[rows]) & (self.isolated_steps[rows] >= self.steps[rows])
        if crossed.any():
            at = rows[crossed]
            within = (self.steps[at] - before[crossed]) / rate[crossed]
            self.isolated_finish[at] = now + within - self.arrival[at]

    def close_isolation(self, ended: np.ndarray, present: np.ndarray) -> None:
        """Jobs that are done before they would be in isolation: how long the rest would have taken there."""
        rows = ended[np.isnan(self.isolated_finish[ended])]
        missing = np.maximum(0.0, self.steps[rows] - self.isolated_steps[rows])
        took = self.finish[rows] - self.arrival[rows]
        self.isolated_finish[rows] = took + missing / self.isolated_rate(rows, present)
