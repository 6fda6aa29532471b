"""Starts and ends of a snapshot's jobs as forecast: the operator's own decisions, round after round.

Speeds are those of the snapshot and no job arrives, so it holds for the jobs that are there now.
A start or a move takes a gang the restart time that was measured for it, a change of its size a pause.
A budget, a deadline or the longest time with GPUs ends a job where its spec says so; the jobs of a team that
has spent its budget hold no GPUs until there is budget again.
"""

import dataclasses
import datetime
import math
from collections.abc import Collection, Mapping

from ballast_policies.allocation.problem import ProblemError
from ballast_policies.rounds.values import Round
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.simulator.clock import LEAST_STEP, Answer, Clock, OnProgress, SimulationProgress
from ballast_policies.simulator.decisions import HOUR, ClusterGang, OperatorDecisions

from ballast_operator.allocator.costs.bill import BudgetLeft
from ballast_operator.allocator.decider import scheduling_policy
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.views.job import limits_left

MOST_WORK = 2_000_000
"""Jobs that are decided on, summed over all decisions, after which a forecast ends: a few minutes."""

DECISION_WORK = 10
"""Jobs whose part of a decision takes as long as the rest of it."""


@dataclasses.dataclass(slots=True, kw_only=True)
class TeamAccount:
    """A team's budget while time passes.

    Attributes:
        budget: what is left of it.
        again: when it begins again, epoch seconds.
        jobs: of the team that have not ended.
    """

    budget: BudgetLeft
    again: float
    jobs: "dict[str, ForecastJob]" = dataclasses.field(default_factory=dict)

    def look(self, now: float) -> None:
        """Begin it again where it is time; ``now``: epoch seconds."""
        if now >= self.again - LEAST_STEP:
            whole = dataclasses.replace(self.budget, left=self.budget.budget.amount)
            self.budget = whole
            self.again = whole.begins_again(datetime.datetime.fromtimestamp(now + 1.0, datetime.UTC))

    def pay(self, amount: float) -> None:
        """Take from what is left."""
        self.budget = dataclasses.replace(self.budget, left=self.budget.left - amount)

    def changes_in(self, now: float) -> float:
        """Seconds until it is spent or begins again; ``now``: epoch seconds."""
        per_second = 0.0 if self.budget.spent else sum(job.pays() for job in self.jobs.values())
        return min(self.again - now, self.budget.left / per_second if per_second > 0 else math.inf)


@dataclasses.dataclass(slots=True, kw_only=True)
class ForecastJob(ClusterGang):
    """A job that also stops where its spec says so, and while its team's budget is spent.

    Attributes:
        limits: as ``limits_left`` has them.
        team: with a budget at which it stops; None: there is none.
        stops: when one of them has stopped it, on the clock; None: not yet, or it has GPUs again.
        stopped_by: which: a field of its spec, or ``budgets.TEAM`` of the ClusterPolicy.
    """

    limits: Mapping[str, float] = dataclasses.field(default_factory=dict)
    team: TeamAccount | None = None
    stops: float | None = None
    stopped_by: str = ""

    def advance(self, seconds: float) -> float:
        """Also use up its limits."""
        uses = self._uses()
        self.limits = {field: left - seconds * uses[field] for field, left in self.limits.items()}
        if self.team is not None:
            self.team.pay(seconds * uses["budget"])
        return ClusterGang.advance(self, seconds)

    def changes_in(self, now: float) -> float:
        """Also until its team's budget changes, which one job of the team tells."""
        found = ClusterGang.changes_in(self, now)
        if self.team is None or next(iter(self.team.jobs.values())) is not self:
            return found
        return min(found, self.team.changes_in(self.began + now))

    def may_run(self, now: float) -> bool:
        """False while its team's budget is spent, which is noted."""
        if self.team is None:
            return True
        self.team.look(self.began + now)
        if self.team.budget.spent and self.stops is None:
            self.stops, self.stopped_by = now, f"budgets.{self.team.budget.team}"
        return not self.team.budget.spent

    def follow(self, decided: Round, now: float) -> None:
        """Also forget that it has stopped."""
        ClusterGang.follow(self, decided, now)
        if self.placement is not None:
            self.stops, self.stopped_by = None, ""

    @property
    def stopped_for_good(self) -> bool:
        """True if its team's budget is spent, and does not begin again."""
        return self.stops is not None and self.team is not None and math.isinf(self.team.again)

    def pays(self) -> float:
        """Cost of a second, with its data."""
        return self._uses()["budget"]

    def ends_in(self) -> float:
        """Also at its limits."""
        return min([ClusterGang.ends_in(self), *self._stops_in().values()])

    def end(self, at: float) -> None:
        """Note whether it was done."""
        if self.team is not None:
            del self.team.jobs[self.name]
        stops = self._stops_in()
        if stops and ClusterGang.ends_in(self) > LEAST_STEP:
            self.stops, self.stopped_by = at, min(stops, key=stops.__getitem__)
        else:
            self.ends = at

    def _stops_in(self) -> dict[str, float]:
        """Field of each limit -> seconds until then, if nothing changes before."""
        uses = self._uses()
        return {field: max(0.0, left) / uses[field] for field, left in self.limits.items() if uses[field] > 0}

    def _uses(self) -> dict[str, float]:
        """Field of a limit -> what a second takes of it."""
        at = self.placement
        if at is None:
            return {"deadline": 1.0, "activeDeadlineSeconds": 0.0, "budget": 0.0}
        data = 0.0 if self.waits else self.speed * at.mean(self.one.usd_per_step)
        return {"deadline": 1.0, "activeDeadlineSeconds": 1.0, "budget": self.usd_per_second(at) + data}


def forecast(
    snapshot: Snapshot,
    policy: ClusterPolicy,
    *,
    now: float,
    seconds: float,
    live: Collection[str] = (),
    of: Collection[str] = (),
    progress: OnProgress | None = None,
) -> tuple[tuple[ForecastJob, ...], float]:
    """(forecasts of the jobs of ``snapshot`` under ``policy``, in its order; seconds that they look ahead).

    A round begins ``now`` (epoch seconds). ``seconds``: how far to look ahead; less where that is more than
    MOST_WORK. ``live``: names of the jobs that change their size without a restart. ``of``: nothing is
    decided after these jobs have ended, or stopped for good; empty: all.

    Raises:
        ProblemError: the policy cannot be used on what is there at some moment.
    """
    jobs = _active_jobs(snapshot, now, live)
    awaited = {job.name: job for job in jobs if not of or job.name in of}
    work, reach = 0, seconds

    def ended(job: ForecastJob, at: float) -> None:
        job.end(at)
        awaited.pop(job.name, None)
        clock.over = not awaited

    def passed(moment: SimulationProgress) -> None:
        nonlocal work, reach
        work += moment.present + DECISION_WORK
        if work > MOST_WORK and not clock.over:
            clock.over, reach = True, moment.seconds
        clock.over = clock.over or all(job.stopped_for_good for job in awaited.values())
        if progress is not None:
            progress(moment)

    clock = Clock(
        arrivals=[(0.0, job) for job in jobs],
        decide=_decisions(snapshot, policy, now),
        ended=ended,
        total=len(jobs),
        progress=passed,
        over=not awaited,
    )
    clock.run(seconds)
    return tuple(jobs), reach


def next_round(snapshot: Snapshot, policy: ClusterPolicy, *, now: float, live: Collection[str] = ()) -> Round:
    """The round that the operator would begin at once; arguments and errors as of :func:`forecast`."""
    jobs = {job.name: job for job in _active_jobs(snapshot, now, live)}
    return _decisions(snapshot, policy, now)(jobs, 0.0).round


def _decisions(snapshot: Snapshot, policy: ClusterPolicy, now: float) -> "_Decisions":
    return _Decisions(snapshot, scheduling_policy(policy), began=now, first_round_ends=0.0)


def _active_jobs(snapshot: Snapshot, now: float, live: Collection[str]) -> list[ForecastJob]:
    prices = snapshot.capacity.pool_prices
    jobs = [ForecastJob.of(one, prices, now, live=one.name in live) for one in snapshot.jobs]
    at = datetime.datetime.fromtimestamp(now, datetime.UTC)
    views = {job_id(one.key): one.view for one in snapshot.admitted}
    budgets = {name: budget for name, budget in snapshot.budgets.items() if budget.suspends}
    teams = {
        name: TeamAccount(budget=budget, again=budget.begins_again(at)) for name, budget in budgets.items()
    }
    for job in jobs:
        if job.name in views and (spec := views[job.name].spec) is not None:
            job.limits = limits_left(spec.asked, views[job.name].status, at)
            if (team := teams.get(spec.asked.entity or "")) is not None:
                job.team, team.jobs[job.name] = team, job
    return jobs


class _Decisions(OperatorDecisions[ForecastJob]):
    """The operator's, on the jobs that may run."""

    def __call__(self, present: Mapping[str, ForecastJob], now: float) -> Answer:
        present = {name: job for name, job in present.items() if job.may_run(now)}
        try:
            return super().__call__(present, now)
        except ProblemError as error:
            raise ProblemError(f"{now / HOUR:.2f} h from now: {error}") from error
