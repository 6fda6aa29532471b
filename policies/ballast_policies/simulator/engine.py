"""Jobs of a trace under the operator's rules: its decisions, on a cluster of values.

Each job has one number of GPUs. When a job arrives or ends, free GPUs are handed out at once; at the ends of
rounds gangs may also be stopped, moved, or brought together on fewer nodes.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.gangs import SpreadGang
from ballast_policies.rounds.values import Node, Placement
from ballast_policies.scheduling.decision import SchedulingPolicy
from ballast_policies.scheduling.state import ClusterJob
from ballast_policies.simulator.clock import Answer, Clock, OnProgress, SimulationError, SimulationProgress
from ballast_policies.simulator.decisions import OperatorDecisions, SimulatedGang, cluster_of
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.result import Counters, Result, summarise
from ballast_policies.simulator.settings import (
    SettingsError,
    SimulatedCluster,
    SimulationSettings,
    refuse_window,
)
from ballast_policies.simulator.workloads import Workload
from ballast_policies.throughput.table import ThroughputTable


def simulate(
    workload: Workload,
    cluster: SimulatedCluster,
    table: ThroughputTable,
    settings: SimulationSettings,
    *,
    progress: OnProgress | None = None,
) -> Result:
    """Run ``workload`` on ``cluster`` until its measured jobs are done.

    Raises:
        SettingsError: an endless workload without ``measure``, or a window beyond the last job.
        ThroughputError: a job type is not in the table.
        WorkloadError: a job fits on no GPU type.
        ProblemError: the policy is unknown or cannot do what is asked.
    """
    settings.check_workload(workload)
    run = _Run(workload, Ledger(cluster, table), settings, progress)
    try:
        run.clock.run()
    except SimulationError as error:
        raise SettingsError(f"policy: {settings.policy}: {error}") from error
    if settings.measure is not None and not run.clock.over:
        raise refuse_window(settings.measure, workload, run.ledger.count)
    return summarise(run.ledger, run.counters, workload, settings, begin=run.begin, end=run.clock.now)


@dataclasses.dataclass(slots=True, kw_only=True)
class _TraceGang(SimulatedGang):
    """A job of the ledger.

    Attributes:
        row: of the ledger.
        asked: the job as policies see it, but for its progress.
        move_seconds: what a move to fewer nodes takes.
    """

    row: int
    ledger: Ledger
    asked: Job
    move_seconds: float

    def changes_in(self, now: float) -> float:
        """Infinite: nothing is decided on its first step."""
        del now
        return math.inf

    def as_cluster_job(self, now: float) -> ClusterJob:
        ledger, row = self.ledger, self.row
        deadline = float(ledger.deadline[row])
        job = dataclasses.replace(
            self.asked,
            steps_remaining=max(self.remaining, 1e-9),
            elapsed=max(0.0, now - float(ledger.arrival[row])),
            isolated_elapsed=self.isolated_elapsed,
            deadline=deadline - now if math.isfinite(deadline) else None,
        )
        return ClusterJob(
            job=job,
            launches=self.starts,
            placement=self.placement,
            running_since=self.since,
            trains_from=self.trains_from,
            spread=self._as_spread(),
            beside_speed=self.beside_speed,
        )

    @property
    def is_spread(self) -> bool:
        """True if it is on several nodes although one would hold it."""
        at, per_node = self.placement, self.ledger.gpus_per_node
        return at is not None and len(at.nodes) <= per_node.get(at.gpu_type, 0) and len(set(at.nodes)) > 1

    def _as_spread(self) -> SpreadGang | None:
        if self.placement is None or not self.is_spread:
            return None
        return SpreadGang(
            at=self.placement,
            fewest=1,
            speed=self.speed_at(self.placement),
            packed_speed=self.asked.throughput[self.placement.gpu_type],
            restart_seconds=self.move_seconds,
        )


class _Run:
    """A simulation, and what is counted of it."""

    def __init__(
        self, workload: Workload, ledger: Ledger, settings: SimulationSettings, progress: OnProgress | None
    ) -> None:
        self.ledger, self.settings, self._progress = ledger, settings, progress
        self.counters = Counters()
        self._present_before_ends = np.zeros(0, dtype=np.intp)
        self._column = {gpu_type: k for k, gpu_type in enumerate(ledger.gpu_types)}
        self._decisions = OperatorDecisions[_TraceGang](
            cluster_of(nodes_of(ledger), dict(zip(ledger.gpu_types, ledger.prices.tolist(), strict=True))),
            SchedulingPolicy(
                objective=settings.policy,
                heterogeneity_agnostic=settings.agnostic,
                round_seconds=settings.round_seconds,
                min_run_seconds=settings.min_run_seconds,
                max_moves_per_hour=settings.max_moves_per_hour,
            ),
            stop_seconds=settings.stop_seconds,
        )
        self.clock = Clock(
            arrivals=self._arrivals(workload),
            decide=self._decide,
            passed=self._book,
            ended=self._end,
            progress=None if progress is None else self._report,
        )

    def _arrivals(self, workload: Workload) -> Iterator[tuple[float, "_TraceGang"]]:
        for trace_job in workload.jobs:
            yield trace_job.arrival, self._gang(self.ledger.add(trace_job))

    def _gang(self, row: int) -> "_TraceGang":
        ledger, gpus = self.ledger, int(self.ledger.gpus[row])
        packed: dict[str, float] = dict(zip(ledger.gpu_types, ledger.rate[row].tolist(), strict=True))
        spread: dict[str, float] = dict(zip(ledger.gpu_types, ledger.spread_rate[row].tolist(), strict=True))

        def speed_at(at: Placement) -> float:
            on_one_node = len(set(at.nodes)) == 1 or not ledger.gpus_per_node
            return packed[at.gpu_type] if on_one_node else spread[at.gpu_type]

        name = f"job-{row:07d}"
        return _TraceGang(
            name=name,
            remaining=float(ledger.left[row]),
            speed_at=speed_at,
            restart_seconds=self.settings.launch_seconds,
            pause_seconds=0.0,
            row=row,
            ledger=ledger,
            asked=Job(name=name, throughput=packed, gpus=gpus, weight=float(ledger.weight[row])),
            move_seconds=self.settings.launch_seconds + self.settings.stop_seconds,
        )

    @property
    def begin(self) -> float:
        """The first arrival, seconds of the clock."""
        return float(self.ledger.arrival[0]) if self.ledger.count else 0.0

    def _decide(self, present: Mapping[str, "_TraceGang"], now: float) -> Answer:
        answer, last = self._decisions(present, now), self._decisions.last
        decided, counters = answer.round, self.counters
        counters.solves = self._decisions.solve_seconds
        if last is not None and (not last.within_round or last.memory.decisions == 1):
            counters.rounds += 1
            counters.lease_opportunities += sum(one.placement is not None for one in present.values())
            counters.lease_extensions += len(decided.extended)
            self.ledger.extensions[[present[name].row for name in decided.extended]] += 1
        for one in present.values():
            self._train_on(one, decided.placements.get(one.name), now)
        return answer

    def _train_on(self, one: "_TraceGang", after: Placement | None, now: float) -> None:
        """A gang that has to leave a GPU type trains until it has read that, if it has begun to."""
        before, notice = one.placement, self.settings.notice_seconds
        leaves = before is not None and (after is None or after.gpu_type != before.gpu_type)
        if before is None or not leaves or not notice or one.waits > 0:
            return
        trained = one.train(notice)
        self._enter([one], np.array([self._column[before.gpu_type]]), np.array([trained]), now)

    def _enter(
        self, jobs: Sequence["_TraceGang"], columns: np.ndarray, seconds: np.ndarray, now: float
    ) -> np.ndarray:
        """Book what the jobs have done since the last time; their rows."""
        rows = np.array([one.row for one in jobs])
        steps = self.ledger.left[rows] - [one.remaining for one in jobs]
        self.ledger.book(rows, columns, steps, seconds, now=now, part=np.ones(len(rows)))
        return rows

    def _book(self, began: float, now: float) -> None:
        """Enter what happened from ``began`` to ``now``."""
        present, ledger, counters = self.clock.present.values(), self.ledger, self.counters
        every = np.array([one.row for one in present], dtype=np.intp)
        placed = [(one, one.placement) for one in present if one.placement is not None]
        if placed and now > began:
            columns = np.array([self._column[at.gpu_type] for _, at in placed])
            seconds = np.full(len(placed), now - began)
            rows = self._enter([one for one, _ in placed], columns, seconds, began)
            busy = ledger.gpus[rows] * seconds
            counters.busy_gpu_seconds += float(busy.sum())
            counters.spread_gpu_seconds += float(busy @ [one.is_spread for one, _ in placed])
            if self.settings.record_timeline:
                counters.note(rows, columns, ledger.gpus[rows], began, began + seconds)
        if present:
            ledger.compare_with_isolation(every, now - began, now=began)
        self._present_before_ends = every

    def _end(self, one: "_TraceGang", now: float) -> None:
        ledger, row = self.ledger, one.row
        if not ledger.done[row]:
            ledger.left[row], ledger.done[row], ledger.finish[row] = 0.0, True, now
        ledger.close_isolation(np.array([row]), self._present_before_ends)
        done, wanted = ledger.measured(self.settings.measure)
        if self.settings.measure is not None and done == wanted:
            self.clock.over = True

    def _report(self, moment: SimulationProgress) -> None:
        assert self._progress is not None
        done, total = self.ledger.measured(self.settings.measure)
        self._progress(dataclasses.replace(moment, done=done, total=total))


def nodes_of(ledger: Ledger) -> Iterator[Node]:
    """The cluster's nodes; where placement has no influence, one for each GPU type."""
    for gpu_type, count in zip(ledger.gpu_types, ledger.capacity.tolist(), strict=True):
        for i, gpus in enumerate(node_sizes(count, ledger.gpus_per_node.get(gpu_type, count))):
            yield Node(name=f"{gpu_type}-{i:05d}", pool=gpu_type, gpu_type=gpu_type, gpus=gpus)


def node_sizes(gpus: int, per_node: int) -> list[int]:
    """GPUs of each node; the last has what is left."""
    whole, rest = divmod(gpus, max(1, per_node))
    return [per_node] * whole + ([rest] if rest else [])
