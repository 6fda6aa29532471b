"""The simulation loop: jobs arrive, shares are solved, rounds grant GPUs, jobs train.

An iteration admits the jobs that have arrived, makes a new allocation if one is due, grants GPUs, and
lets the granted jobs run until the next time at which something changes.
"""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np
from ballast_policies.accounting import cost, isolated_seconds
from ballast_policies.simulator.clock import OnProgress, SimulationProgress
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.result import Counters, Result, summarise
from ballast_policies.simulator.settings import SettingsError, SimulatedCluster, refuse_window
from ballast_policies.simulator.workloads import TraceJob, Workload
from ballast_policies.throughput.table import ThroughputTable

from ballast_lab.arrays.by_shares import EMPTY_GRANT, Grant, SimulatedRounds
from ballast_lab.arrays.nodes import Nodes, running_jobs
from ballast_lab.arrays.rules import ArraySettings
from ballast_lab.arrays.share_accounts import positions
from ballast_lab.arrays.solving import Shares, ShareSolver


def simulate(
    workload: Workload,
    cluster: SimulatedCluster,
    table: ThroughputTable,
    settings: ArraySettings,
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
    found = summarise(run.ledger, run.counters, workload, settings, begin=run.begin, end=run.now)
    return dataclasses.replace(
        found,
        rules=settings.rules.name,
        space_sharing=settings.space_sharing,
        ideal=settings.ideal,
    )


class _Run:
    """The state of a running simulation."""

    def __init__(self, workload: Workload, ledger: Ledger, settings: ArraySettings) -> None:
        self.workload, self.ledger, self.settings = workload, ledger, settings
        self.counters = Counters()
        self._solver = ShareSolver(ledger, settings)
        self._rounds = SimulatedRounds(ledger, settings)
        self._nodes = Nodes(ledger, lambda: self.now) if ledger.gpus_per_node else None
        costly = max(settings.launch_seconds, settings.stop_seconds, settings.notice_seconds) > 0
        self._starts = (
            _LaunchDelays(ledger, launch_seconds=settings.launch_seconds, stop_seconds=settings.stop_seconds)
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
        """True if all measured jobs are done."""
        ledger, window = self.ledger, self.settings.measure
        done, total = ledger.measured(window)
        finished = done == total and (window is not None or self._next is None)
        if window and not finished and self._next is None and not len(self._active) and ledger.count:
            raise refuse_window(window, self.workload, ledger.count)
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
        """Step to the next change: within a round only free GPUs are handed out, at its end all are."""
        before, moved = self._running, list[int]()
        if self.now >= self._round_ends:
            grant = self._rounds.grant(self._active, self._running, self.ledger.capacity)
            if self._nodes is not None:
                moved = self._nodes.bring_together(grant, self.settings)
            self._count_leases(grant, moved)
            self._running = grant
            # On the grid, as the operator's: also after an idle time rounds end where they would have.
            length = self.settings.round_seconds
            self._round_ends += length * (1 + (self.now - self._round_ends) // length)
        else:
            self._running = self._rounds.fill(self._active, self._running)
        if not len(self._running.job):
            self._skip_idle_time()
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
        until, busy = _run_fluid(
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
        ledger.isolated_elapsed[rows] += isolated_seconds(steps, ledger.isolated_rate(rows, self._active))
        ledger.book(rows, columns, steps, seconds, now=self.now, part=part)
        together = seconds[: len(grant.job)].copy()
        paired = np.flatnonzero(grant.partner >= 0)
        together[paired] = np.maximum(together[paired], seconds[len(grant.job) :])
        busy = ledger.gpus[grant.job] * together
        self.counters.busy_gpu_seconds += float(busy.sum())
        if self._nodes is not None:
            self.counters.spread_gpu_seconds += float(busy @ self._nodes.spread(grant))
        if self.settings.record_timeline:
            self.counters.note(rows, columns, ledger.gpus[rows], self.now, self.now + seconds)
        self._rounds.pass_time(grant, together, until - self.now)
        self._pass_time(rows, until)

    def _pass_time(self, rows: np.ndarray, until: float) -> None:
        """Advance the clock to ``until``; ``rows``: jobs that may be done by then."""
        ledger = self.ledger
        ledger.compare_with_isolation(self._active, until - self.now, now=self.now)
        ended = rows[ledger.done[rows]]
        if len(ended):
            ledger.close_isolation(ended, self._active)
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


class _LaunchDelays:
    """First step of each running gang's launch: until then it holds GPUs that do nothing.

    A launch takes time (decide, create pods, load a checkpoint), and so does the exit of the gang whose GPUs
    it gets (save, exit). They matter where they are not small against a round.
    """

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
        """``rows`` that had done a step of their last launch when the newest starts were recorded."""
        began: np.ndarray = self._began[rows]
        return began

    def left(self, rows: np.ndarray, now: float) -> np.ndarray:
        """Seconds from ``now`` until each of ``rows`` does a step."""
        seconds: np.ndarray = np.maximum(0.0, self._first_step[rows] - now)
        return seconds


def _run_fluid(
    ledger: Ledger,
    solver: ShareSolver,
    shares: Shares,
    active: np.ndarray,
    now: float,
    next_arrival: float | None,
) -> tuple[float, float]:
    """Every job runs on every GPU type for exactly its share of the time.

    Books the stretch from ``now`` to the next completion or arrival: (its end in s, busy GPU seconds).
    """
    rate = np.zeros(ledger.count)
    alone = shares.partner < 0
    np.add.at(rate, shares.job[alone], (ledger.rate[shares.job[alone]] * shares.share[alone]).sum(axis=1))
    for entry in np.flatnonzero(~alone).tolist():
        first, second = int(shares.job[entry]), int(shares.partner[entry])
        for column in np.flatnonzero(shares.share[entry]).tolist():
            of_first, of_second = solver.shared_rates(first, second, column)
            rate[first] += shares.share[entry, column] * of_first
            rate[second] += shares.share[entry, column] * of_second
    moving = active[rate[active] > 0]
    ends = [] if next_arrival is None else [next_arrival]
    if len(moving):
        ends.append(now + float((ledger.left[moving] / rate[moving]).min()))
    until = min(ends)
    span = until - now
    steps = rate[active] * span
    done = ledger.left[active] - steps <= 1e-9 * ledger.steps[active]
    ledger.left[active] = np.where(done, 0.0, ledger.left[active] - steps)
    ledger.finish[active[done]] = until
    ledger.done[active[done]] = True
    isolated = ledger.isolated_rate(active, active)
    ledger.isolated_elapsed[active] += isolated_seconds(steps, isolated)
    for entry in range(len(shares.job)):
        pair = (
            [shares.job[entry]] if shares.partner[entry] < 0 else [shares.job[entry], shares.partner[entry]]
        )
        for row in pair:
            ledger.seconds_on[row] += shares.share[entry] * span
            price = float(ledger.prices @ shares.share[entry])
            ledger.cost[row] += cost(float(ledger.gpus[row]) * span / len(pair), price)
    first_time = active[np.isnan(ledger.first_run[active]) & (rate[active] > 0)]
    ledger.first_run[first_time] = now
    return until, float(ledger.gpus[shares.job] @ shares.share.sum(axis=1)) * span
