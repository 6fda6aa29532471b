"""The result of a simulation: averages over the measured jobs, and a row for each job."""

import dataclasses
from typing import Any

import numpy as np

from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.settings import SimulationSettings
from ballast_policies.simulator.workloads import Workload

HOUR = 3600.0
PERCENTILES = (50, 75, 90, 95, 99)

ROUNDING = 1e-9
"""Relative error of a time: a policy that is just in time is in time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """Job ``row`` ran on ``gpus`` GPUs of type ``column`` from ``start`` to ``end`` (s)."""

    row: int
    column: int
    gpus: int
    start: float
    end: float


@dataclasses.dataclass(slots=True, kw_only=True)
class Counters:
    """Counters of a running simulation."""

    busy_gpu_seconds: float = 0.0
    spread_gpu_seconds: float = 0.0
    lease_extensions: int = 0
    lease_opportunities: int = 0
    rounds: int = 0
    solves: list[float] = dataclasses.field(default_factory=list)
    timeline: list[Segment] = dataclasses.field(default_factory=list)
    _open: dict[int, int] = dataclasses.field(default_factory=dict)

    def note(
        self, rows: np.ndarray, columns: np.ndarray, gpus: np.ndarray, start: float, ends: np.ndarray
    ) -> None:
        """Enter who ran where; a stretch that continues the job's last one lengthens it."""
        parts = (rows.tolist(), columns.tolist(), gpus.tolist(), ends.tolist())
        for row, column, size, end in zip(*parts, strict=True):
            last = self._open.get(row)
            if last is not None:
                before = self.timeline[last]
                if before.column == column and start - before.end < 1.0:
                    self.timeline[last] = dataclasses.replace(before, end=end)
                    continue
            self._open[row] = len(self.timeline)
            self.timeline.append(Segment(row=row, column=column, gpus=size, start=start, end=end))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobResult:
    """Result of a job; times in seconds of the simulation's clock, ``None`` for what did not happen.

    Attributes:
        rho: completion time over what it would have been on its isolated share of the cluster.
        seconds_on: GPU type -> seconds that it ran there.
    """

    name: str
    type: str
    gpus: int
    weight: float
    steps: float
    arrival: float
    first_run: float | None
    finish: float | None
    completion_time: float | None
    rho: float | None
    deadline: float | None
    cost: float
    lease_extensions: int
    seconds_on: dict[str, float]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """A simulation's outcome; averages are over the measured jobs, the rest over the whole run.

    Attributes:
        jobs_measured: how many jobs the averages are over.
        average_completion_time: s, arrival to finish.
        completion_time_percentiles: percentile -> s.
        makespan: s from the first arrival of a measured job to the last finish of one.
        utilisation: busy GPU seconds over GPUs x duration.
        spread_fraction: part of the busy GPU seconds in gangs spread over nodes although one would hold them;
            0 where nodes are left out.
        finish_time_fairness: mean of rho.
        finish_time_fairness_max: largest rho.
        cost: USD of the measured jobs.
        deadline_violations: measured jobs done after their deadline; ``deadlines``: that had one.
        lease_extensions, lease_opportunities: rounds in which a running gang kept its GPUs, of all.
        rounds, solves: how many.
        solve_seconds: wall time of all solves.
        duration: simulated s.
        average_completion_time_by_weight: weight -> s.
    """

    workload: str
    policy: str
    agnostic: bool
    space_sharing: bool = False
    ideal: bool = False
    rules: str = "ballast"
    round_seconds: float
    cluster: dict[str, int]
    jobs_measured: int
    average_completion_time: float
    completion_time_percentiles: dict[int, float]
    average_completion_time_by_weight: dict[float, float]
    makespan: float
    utilisation: float
    spread_fraction: float
    finish_time_fairness: float
    finish_time_fairness_max: float
    cost: float
    deadlines: int
    deadline_violations: int
    lease_extensions: int
    lease_opportunities: int
    rounds: int
    solves: int
    solve_seconds: float
    duration: float
    jobs: tuple[JobResult, ...]
    timeline: tuple[Segment, ...] = ()

    def to_json(self, *, per_job: bool = False) -> dict[str, Any]:
        """The form of ``ballast simulate --output json``: hours where people think in hours."""
        return {
            "workload": self.workload,
            "policy": self.policy,
            "agnostic": self.agnostic,
            "space_sharing": self.space_sharing,
            "ideal": self.ideal,
            "rules": self.rules,
            "round_seconds": self.round_seconds,
            "cluster": self.cluster,
            "jobs_measured": self.jobs_measured,
            "average_jct_hours": self.average_completion_time / HOUR,
            "jct_percentiles_hours": {
                str(percent): seconds / HOUR for percent, seconds in self.completion_time_percentiles.items()
            },
            "average_jct_hours_by_weight": {
                f"{weight:g}": seconds / HOUR
                for weight, seconds in self.average_completion_time_by_weight.items()
            },
            "makespan_hours": self.makespan / HOUR,
            "utilisation": self.utilisation,
            "spread_fraction": self.spread_fraction,
            "finish_time_fairness": {
                "mean": self.finish_time_fairness,
                "max": self.finish_time_fairness_max,
                "per_job": {job.name: job.rho for job in self.jobs},
            },
            "cost_usd": self.cost,
            "slos": self.deadlines,
            "slo_violations": self.deadline_violations,
            "lease_extensions": self.lease_extensions,
            "lease_extension_fraction": self.lease_extensions / max(1, self.lease_opportunities),
            "rounds": self.rounds,
            "solves": self.solves,
            "solve_seconds": self.solve_seconds,
            "duration_hours": self.duration / HOUR,
            **({"jobs": [dataclasses.asdict(job) for job in self.jobs]} if per_job else {}),
            **({"timeline": self._segments()} if per_job and self.timeline else {}),
        }

    def _segments(self) -> list[dict[str, Any]]:
        kinds = tuple(self.cluster)
        return [
            {"job": f"job-{each.row}", "gpu_type": kinds[each.column], "start": each.start, "end": each.end}
            for each in self.timeline
        ]


def summarise(
    ledger: Ledger,
    counters: Counters,
    workload: Workload,
    settings: SimulationSettings,
    *,
    begin: float,
    end: float,
) -> Result:
    """The result of a simulation under the operator's rules that has run from ``begin`` to ``end`` (s)."""
    rows = np.arange(*(settings.measure or (0, ledger.count)))
    took = ledger.finish[rows] - ledger.arrival[rows]
    rho = took / ledger.isolated_finish[rows]
    with_deadline = np.isfinite(ledger.deadline[rows])
    late = ledger.finish[rows] > ledger.deadline[rows] * (1 + ROUNDING)
    weights = ledger.weight[rows]
    duration = end - begin
    return Result(
        workload=workload.name,
        policy=settings.policy,
        agnostic=settings.agnostic,
        round_seconds=settings.round_seconds,
        cluster={t: int(c) for t, c in zip(ledger.gpu_types, ledger.capacity, strict=True)},
        jobs_measured=len(rows),
        average_completion_time=float(took.mean()),
        completion_time_percentiles={p: float(np.percentile(took, p)) for p in PERCENTILES},
        average_completion_time_by_weight={
            float(weight): float(took[weights == weight].mean()) for weight in np.unique(weights)
        },
        makespan=float(ledger.finish[rows].max() - ledger.arrival[rows].min()),
        utilisation=counters.busy_gpu_seconds / (float(ledger.capacity.sum()) * max(duration, 1e-9)),
        spread_fraction=counters.spread_gpu_seconds / max(counters.busy_gpu_seconds, 1e-9),
        finish_time_fairness=float(rho.mean()),
        finish_time_fairness_max=float(rho.max()),
        cost=float(ledger.cost[rows].sum()),
        deadlines=int(with_deadline.sum()),
        deadline_violations=int(late[with_deadline].sum()),
        lease_extensions=counters.lease_extensions,
        lease_opportunities=counters.lease_opportunities,
        rounds=counters.rounds,
        solves=len(counters.solves),
        solve_seconds=float(sum(counters.solves)),
        duration=duration,
        jobs=tuple(_job_result(ledger, row) for row in rows.tolist()) if settings.record_jobs else (),
        timeline=tuple(counters.timeline),
    )


def _job_result(ledger: Ledger, row: int) -> JobResult:
    job, finish = ledger.jobs[row], float(ledger.finish[row])
    return JobResult(
        name=f"job-{row}",
        type=job.type.name,
        gpus=job.type.gpus,
        weight=job.weight,
        steps=job.steps,
        arrival=job.arrival,
        first_run=_known(float(ledger.first_run[row])),
        finish=_known(finish),
        completion_time=_known(finish - job.arrival),
        rho=_known((finish - job.arrival) / float(ledger.isolated_finish[row])),
        deadline=_known(float(ledger.deadline[row])),
        cost=float(ledger.cost[row]),
        lease_extensions=int(ledger.extensions[row]),
        seconds_on={
            t: float(s) for t, s in zip(ledger.gpu_types, ledger.seconds_on[row], strict=True) if s > 0
        },
    )


def _known(value: float) -> float | None:
    return value if np.isfinite(value) else None
