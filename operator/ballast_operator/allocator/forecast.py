"""When each job of a snapshot would start and end: the operator's own decisions, round after round.

Speeds are those of the snapshot and no job arrives, so it holds for the jobs that are there now.
A start or a move takes a gang the restart time that was measured for it, a change of its size a pause.
"""

import dataclasses
from collections.abc import Collection, Mapping

from ballast_policies.accounting import price_part
from ballast_policies.allocation.problem import ProblemError
from ballast_policies.rounds import Round
from ballast_policies.scheduling import isolated_speeds
from ballast_policies.scheduling.data_costs import at_placement
from ballast_policies.simulator.clock import LEAST_STEP, ActiveJob, Answer, Clock
from ballast_policies.simulator.decisions import OperatorDecisions, SimulatedGang

from ballast_operator.allocator.decider import scheduling_policy
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.allocator.problem.snapshot_job import SnapshotJob
from ballast_operator.allocator.size_changes import DEFAULT_PAUSE_SECONDS, DEFAULT_RESTART_SECONDS
from ballast_operator.api.cluster_policy import ClusterPolicy

HOUR = 3600.0


@dataclasses.dataclass(slots=True, kw_only=True)
class JobForecast:
    """What becomes of one job; seconds from now, USD.

    Attributes:
        job: its name.
        begins: when it first has GPUs; 0 where it has them now; None: not within the time.
        ends: when it has done its steps; None: not within the time.
        starts: how often it is started or moved.
        gpu_hours, cost: of the GPUs that it holds from now on.
        first: the GPUs on which it begins, as people read them; empty: it has them now, or gets none.
    """

    job: str
    begins: float | None = None
    ends: float | None = None
    starts: int = 0
    gpu_hours: float = 0.0
    cost: float = 0.0
    first: str = ""


@dataclasses.dataclass(slots=True, kw_only=True)
class _ForecastJob(SimulatedGang):
    """A job of the snapshot.

    Attributes:
        one: as it was in the snapshot.
        now: when that was taken, epoch seconds.
        live: it changes its size without a restart.
        prices: pool -> USD a GPU hour.
        of_price: the part of its GPUs' price that it pays.
        isolated: as ``Job`` has it.
        isolated_rate: by how much a second of training raises it.
        begins, gpu_hours, cost, first: as its forecast has them.
    """

    one: SnapshotJob
    now: float
    live: bool
    prices: Mapping[str, float]
    isolated: float
    isolated_rate: float = 0.0
    of_price: float = 1.0
    begins: float | None = None
    gpu_hours: float = 0.0
    cost: float = 0.0
    first: str = ""

    def advance(self, seconds: float) -> float:
        at, speed = self.placement, self.speed
        trained = ActiveJob.advance(self, seconds)
        if at is None:
            return trained
        self.isolated += trained * self.isolated_rate
        self.gpu_hours += seconds * len(at.nodes) / HOUR * self.of_price
        for part in at.by_pool:
            price = self.prices.get(part.pool, 0.0)
            self.cost += seconds * part.gpus / HOUR * price * self.of_price
        self.cost += trained * speed * at_placement(self.one.usd_per_step, at)
        return trained

    def follow(self, decided: Round, now: float) -> None:
        ActiveJob.follow(self, decided, now)
        self.of_price = price_part(shared=self.name in decided.beside)
        if self.placement is not None and self.begins is None:
            self.begins, self.first = now, str(self.placement)

    def as_cluster_job(self, now: float) -> SnapshotJob:
        one, job, gang = self.one, self.one.job, self.one.elastic
        if gang is not None:
            free = self.live and self.trains
            gang = dataclasses.replace(
                gang, may_shrink=free, may_grow=free and now >= self.settled - LEAST_STEP
            )
        job = dataclasses.replace(
            job,
            steps_remaining=max(self.remaining, LEAST_STEP),
            elapsed=job.elapsed + now,
            isolated_elapsed=self.isolated,
            deadline=None if job.deadline is None else job.deadline - now,
            budget=None if job.budget is None else max(0.0, job.budget - self.cost),
        )
        return dataclasses.replace(
            one,
            job=job,
            elastic=gang,
            placement=self.placement,
            running_since=self.now + self.since,
            launches=one.launches + self.starts,
            beside_speed=self.beside_speed,
        )

    def as_forecast(self, ends: float | None) -> JobForecast:
        return JobForecast(
            job=self.name,
            begins=self.begins,
            ends=ends,
            starts=self.starts,
            gpu_hours=self.gpu_hours,
            cost=self.cost,
            first=self.first,
        )


def forecast(
    snapshot: Snapshot,
    policy: ClusterPolicy,
    *,
    now: float,
    seconds: float,
    live: Collection[str] = (),
    agnostic: bool = False,
) -> tuple[JobForecast, ...]:
    """The forecast of every job of ``snapshot`` under ``policy``, in the order of the snapshot.

    Args:
        snapshot: the cluster. A round begins now.
        policy: in force.
        now: epoch seconds.
        seconds: how far to look ahead.
        live: names of the jobs that change their size without a restart.
        agnostic: the policy takes all GPU types for equally fast.

    Raises:
        ProblemError: the policy cannot be used on what is there at some moment.
    """
    jobs = _active_jobs(snapshot, now, live)
    ends = dict[str, float]()
    Clock(
        arrivals=[(0.0, job) for job in jobs],
        decide=_decisions(snapshot, policy, now, agnostic=agnostic),
        ended=lambda job, at: ends.update({job.name: at}),
    ).run(seconds)
    return tuple(job.as_forecast(ends.get(job.name)) for job in jobs)


def next_round(snapshot: Snapshot, policy: ClusterPolicy, *, now: float, live: Collection[str] = ()) -> Round:
    """The round that the operator would begin at once; arguments and errors as of :func:`forecast`."""
    jobs = {job.name: job for job in _active_jobs(snapshot, now, live)}
    agnostic = policy.spec.objective.heterogeneity_agnostic
    return _decisions(snapshot, policy, now, agnostic=agnostic)(jobs, 0.0).round


def _decisions(snapshot: Snapshot, policy: ClusterPolicy, now: float, *, agnostic: bool) -> "_Decisions":
    by = dataclasses.replace(scheduling_policy(policy), heterogeneity_agnostic=agnostic)
    return _Decisions(snapshot, by, began=now, first_round_ends=0.0)


def _active_jobs(snapshot: Snapshot, now: float, live: Collection[str]) -> list[_ForecastJob]:
    prices = {
        pool.pool: pool.price or snapshot.capacity.prices.get(pool.gpu_type, 0.0)
        for pool in snapshot.capacity.pools
    }
    return [_active(one, prices, now, live=one.name in live) for one in snapshot.jobs]


def _active(one: SnapshotJob, prices: Mapping[str, float], now: float, *, live: bool) -> _ForecastJob:
    gang, alone = one.elastic, dataclasses.replace(one, beside_speed=1.0)
    return _ForecastJob(
        name=one.name,
        remaining=one.job.steps_remaining or 1.0,
        speed_at=alone.speed,
        restart_seconds=DEFAULT_RESTART_SECONDS if gang is None else gang.restart_seconds,
        pause_seconds=DEFAULT_PAUSE_SECONDS if gang is None else gang.pause_seconds,
        placement=one.placement,
        trains_on=one.placement,
        since=one.running_since - now,
        beside_speed=one.beside_speed,
        one=one,
        now=now,
        live=live,
        prices=prices,
        isolated=one.job.isolated_elapsed,
        begins=None if one.placement is None else 0.0,
    )


class _Decisions(OperatorDecisions[_ForecastJob]):
    """The operator's, which also say how much faster than on its isolated share each job is."""

    def __call__(self, present: Mapping[str, _ForecastJob], now: float) -> Answer:
        try:
            answer = super().__call__(present, now)
        except ProblemError as error:
            raise ProblemError(f"{now / HOUR:.2f} h from now: {error}") from error
        assert self.last is not None
        ratios = isolated_speeds(self.state, self.last.inputs.problem, answer.round.placements)
        for name, job in present.items():
            ratio = ratios.get(name, 0.0)
            job.isolated_rate = 1.0 / ratio if ratio > 0 else 0.0
        return answer
