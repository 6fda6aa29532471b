"""The simulation loop: jobs arrive, shares are solved, rounds grant GPUs, jobs train.

An iteration admits the jobs that have arrived, makes a new allocation if one is due, grants GPUs, and
lets the granted jobs run until the next time at which something changes.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from ballast_policies.accounting import isolated_seconds
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.progress import OnProgress, SimulationProgress
from ballast_policies.simulator.result import Counters, Result, summarise
from ballast_policies.simulator.rounds.by_shares import EMPTY_GRANT, Grant, SimulatedRounds
from ballast_policies.simulator.rounds.fluid import run_fluid
from ballast_policies.simulator.rounds.hysteresis import HysteresisRounds
from ballast_policies.simulator.rounds.launch_delays import LaunchDelays
from ballast_policies.simulator.rounds.nodes import Nodes
from ballast_policies.simulator.rounds.running_jobs import running_jobs
from ballast_policies.simulator.rounds.share_accounts import positions
from ballast_policies.simulator.settings import SettingsError, SimulatedCluster, SimulationSettings
from ballast_policies.simulator.solving import Shares, ShareSolver
from ballast_policies.simulator.workloads.workload import TraceJob, Workload
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
    if workload.endless and settings.measure is None:
        raise SettingsError(
            "measure: the workload is endless. To fix: choose which jobs to measure, as 4000:5000"
        )
    run = _Run(workload, Ledger(cluster, table), settings)
    while not run.finished(progress):
        run.admit()
        run.solve_if_due()
        if settings.ideal:
            run.step_fluid()
        elif settings.rules.end_with_last_job:
            run.step_round()
        else:
            run.step_event()
    return summarise(run.ledger, run.counters, workload, settings, begin=run.begin, end=run.now)


class _Run:
    """The state of a running simulation."""

    def __init__(self, workload: Workload, ledger: Ledger, settings: SimulationSettings) -> None:
        self.workload, self.ledger, self.settings = workload, ledger, settings
        self.counters = Counters()
        self._solver = ShareSolver(ledger, settings)
        self._rounds = (
            HysteresisRounds(ledger, settings, lambda: self.now)
            if settings.uses_hysteresis
            else SimulatedRounds(ledger, settings)
        )
        self._nodes = Nodes(ledger, lambda: self.now) if ledger.gpus_per_node else None
        costly = max(settings.launch_seconds, settings.stop_seconds, settings.notice_seconds) > 0
        self._starts = (
            LaunchDelays(ledger, launch_seconds=settings.launch_seconds, stop_seconds=settings.stop_seconds)
            if costly
            else None
        )
        self._arrivals: Iterator[TraceJob] = iter(workload.jobs)
        self._next = next(self._arrivals, None)
        self.begin = self.now = 0.0 if self._next is None else self._next.arrival
        self._active = np.zeros(0, dtype=np.int64)
        self._running = EMPTY_GRANT
        self._shares: Shares | None = None
        self._changed = False
        self._solved_at: float | None = None
        self._round_ends = self.now

    def finished(self, progress: OnProgress | None) -> bool:
        """Whether all measured jobs are done."""
        ledger, window = self.ledger, self.settings.measure
        first, end = window or (0, ledger.count)
        total, done = end - first, int(ledger.done[first : min(end, ledger.count)].sum())
        finished = done == total and (window is not None or self._next is None)
        if window and not finished and self._next is None and not len(self._active) and ledger.count:
            raise SettingsError(
                f"measure: {first}:{end} goes beyond the {ledger.count} jobs of {self.workload.name}"
            )
        if progress is not None:
            here, waiting = len(self._active), self._waiting()
            progress(
                SimulationProgress(seconds=self.now, done=done, total=total, present=here, waiting=waiting)
            )
        return finished

    def _waiting(self) -> int:
        if self.settings.ideal:
            return int(np.isnan(self.ledger.first_run[self._active]).sum())
        return len(self._active) - len(self._running.job) - int((self._running.partner >= 0).sum())

    def admit(self) -> None:
        """Enter the jobs that have arrived."""
        rows = []
        while self._next is not None and self._next.arrival <= self.now:
            rows.append(self.ledger.add(self._next))
            self._next = next(self._arrivals, None)
        if rows:
            self._active = np.concatenate([self._active, rows])
            self._changed = True

    def solve_if_due(self) -> None:
        """Make a new allocation if jobs have come or gone, and the last one is old enough."""
        if not self._changed or not len(self._active):
            return
        least = self.settings.rules.least_seconds_between_solves
        # As in Gavel, the allocation made at time 0 does not delay the next one.
        if self._solved_at and self.now < self._solved_at + least and not self.settings.ideal:
            return
        self._shares = self._solver.solve(self._active, self.now)
        self._rounds.reset(self._shares)
        self.counters.solves.append(self._shares.solve_seconds)
        self._changed, self._solved_at = False, self.now

    def step_round(self) -> None:
        """Gavel's round: decided once; GPUs that come free within it idle; ends with its last job."""
        grant = self._rounds.grant(self._active, self._running, self.ledger.capacity)
        self._count_leases(grant)
        self._running = grant
        if not len(grant.job):
            self._skip_idle_time()
            return
        rows, columns, rates, part = running_jobs(grant, self.ledger, self._solver, self._nodes)
        steps = rates * self.settings.round_seconds
        if self.settings.rules.whole_steps:
            # A job slower than a step a round would otherwise never progress.
            steps = np.where(steps >= 1.0, np.floor(steps), steps)
        steps = np.minimum(steps, self.ledger.left[rows])
        seconds = steps / rates
        self._book(grant, rows, columns, steps, seconds, part, until=self.now + float(seconds.max()))

    def step_event(self) -> None:
        """To the next change: within a round only free GPUs are handed out, at its end all are."""
        before, moved = self._running, list[int]()
        if self.now >= self._round_ends:
            grant = self._rounds.grant(self._active, self._running, self.ledger.capacity)
            moved = self._brought_together(grant)
            self._count_leases(grant, moved)
            self._running = grant
            self._round_ends = self.now + self.settings.round_seconds
        else:
            self._running = self._rounds.fill(self._active, self._running)
        if not len(self._running.job):
            self._skip_idle_time()
            self._round_ends = self.now
            return
        rows, columns, rates, part = running_jobs(self._running, self.ledger, self._solver, self._nodes)
        waits: np.ndarray | float = 0.0
        if self._starts is not None:
            self._starts.note(before, self._running, self.now)
            self._starts.restart(moved, self.now)
            if self._train_on(before):
                return
            waits = self._starts.left(rows, self.now)
        to_do = waits + self.ledger.left[rows] / rates
        until = min(self._round_ends, self.now + float(to_do.min()))
        if self._next is not None:
            until = min(until, self._next.arrival)
        # Compared as absolute times, so that a job that ends at ``until`` ends, however the last bit rounds.
        ending = self.now + to_do <= until
        seconds = np.where(ending, to_do, until - self.now)
        steps = np.where(ending, self.ledger.left[rows], rates * np.maximum(0.0, seconds - waits))
        self._book(self._running, rows, columns, steps, seconds, part, until=until)

    def _brought_together(self, grant: Grant) -> list[int]:
        """Rows of gangs that the round moves to fewer nodes."""
        if self._nodes is None:
            return []
        moved = self._nodes.bring_together(grant, self.settings, self._rounds.moves)
        self._rounds.brought_together(moved)
        return moved

    def _train_on(self, before: Grant) -> bool:
        """Let gangs that were just stopped or moved train for the notice; whether one finished by that."""
        notice, ledger = self.settings.notice_seconds, self.ledger
        was, column = before.job[before.partner < 0], before.column[before.partner < 0]
        now_on = np.full(ledger.count, -1)
        now_on[self._running.job] = self._running.column
        leaving = (now_on[was] != column) & ~ledger.done[was]
        rows, columns = was[leaving], column[leaving]
        if not notice or not len(rows):
            return False
        rates = ledger.rate[rows, columns]
        # A gang that has not reached its first step does none.
        assert self._starts is not None
        ran = np.where(self._starts.had_begun(rows), notice, 0.0)
        left = ledger.left[rows]
        steps = np.minimum(left, rates * ran)
        finished = ledger.book(rows, columns, steps, steps / rates, now=self.now, part=np.ones(len(rows)))
        self._pass_time(rows, self.now)
        return bool(finished.any())

    def step_fluid(self) -> None:
        """Every job gets exactly its shares until the next arrival or completion."""
        assert self._shares is not None
        until, busy = run_fluid(
            self.ledger,
            self._solver,
            self._shares,
            self._active,
            self.now,
            None if self._next is None else self._next.arrival,
        )
        self.counters.busy_gpu_seconds += busy
        self._pass_time(self._active, until)

    def _book(
        self,
        grant: Grant,
        rows: np.ndarray,
        columns: np.ndarray,
        steps: np.ndarray,
        seconds: np.ndarray,
        part: np.ndarray,
        *,
        until: float,
    ) -> None:
        ledger = self.ledger
        ledger.isolated_elapsed[rows] += isolated_seconds(
            steps, ledger.isolated_rate(rows, len(self._active))
        )
        ledger.book(rows, columns, steps, seconds, now=self.now, part=part)
        together = seconds[: len(grant.job)].copy()
        paired = np.flatnonzero(grant.partner >= 0)
        together[paired] = np.maximum(together[paired], seconds[len(grant.job) :])
        busy = ledger.gpus[grant.job] * together
        self.counters.busy_gpu_seconds += float(busy.sum())
        if self._nodes is not None:
            self.counters.spread_gpu_seconds += float(busy @ self._nodes.spread(grant))
        if self.settings.record_timeline:
            self.counters.note(rows, columns, self.now, self.now + seconds)
        self._rounds.pass_time(grant, together, until - self.now)
        self._pass_time(rows, until)

    def _pass_time(self, rows: np.ndarray, until: float) -> None:
        """Advance the clock to ``until``; ``rows``: jobs that may be done by then."""
        ledger = self.ledger
        ledger.compare_with_isolation(self._active, until - self.now, now=self.now)
        ended = rows[ledger.done[rows]]
        if len(ended):
            ledger.close_isolation(ended, len(self._active))
            self._active = self._active[~ledger.done[self._active]]
            self._changed = True
            self._running = self._running.without(ledger.done)
        self.now = until

    def _skip_idle_time(self) -> None:
        """No job can run: advance to the next arrival, or to when a new allocation may be made."""
        moments = [] if self._next is None else [self._next.arrival]
        if self._changed and len(self._active) and self._solved_at:
            moments.append(self._solved_at + self.settings.rules.least_seconds_between_solves)
        if not moments or min(moments) <= self.now:
            waiting = [self.ledger.jobs[row].type.name for row in self._active[:3].tolist()]
            raise SettingsError(
                f"policy: {self.settings.policy} gives none of {len(self._active)} waiting jobs a GPU "
                f"although all are idle (the first: {', '.join(waiting)})"
            )
        self._pass_time(EMPTY_GRANT.job, min(moments))

    def _count_leases(self, grant: Grant, moved: Sequence[int] = ()) -> None:
        before, after = self._running, grant
        order = np.argsort(before.job)
        at = positions(before.job[order], after.job)
        extended = at >= 0
        extended[extended] = before.column[order][at[extended]] == after.column[extended]
        extended &= ~np.isin(after.job, moved)
        self.ledger.extensions[after.job[extended]] += 1
        self.counters.lease_extensions += int(extended.sum())
        self.counters.lease_opportunities += len(before.job)
        self.counters.rounds += 1
