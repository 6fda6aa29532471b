"""When each job of a snapshot would start and end: the operator's own decisions, round after round.

Speeds are those of the snapshot and no job arrives, so it holds for the jobs that are there now.
A start or a move takes a gang the restart time that was measured for it, a change of its size a pause.
"""

import dataclasses
import math
from collections.abc import Collection, Mapping

from ballast_policies.accounting import price_part
from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PriceClasses
from ballast_policies.allocation.problem import Allocation, ProblemError
from ballast_policies.allocation.registry import allocate, find_policy
from ballast_policies.rounds import Placement, Round
from ballast_policies.rounds.mixed import with_mixtures

from ballast_operator.allocator.assignments import isolated_speeds
from ballast_operator.allocator.costs.data_prices import at_placement
from ballast_operator.allocator.decider import team_parts
from ballast_operator.allocator.problem.inputs import CompletedProblem, complete, data_costs, price_classes
from ballast_operator.allocator.problem.jobs.snapshot_job import SnapshotJob
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.allocator.rounds import Rounds
from ballast_operator.allocator.size_changes import DEFAULT_PAUSE_SECONDS, DEFAULT_RESTART_SECONDS
from ballast_operator.api.cluster_policy import ClusterPolicy

HOUR = 3600.0
LEAST_STEP = 1e-3
"""Seconds; nearer events are one."""

CONSTANT = {Reads.PRICES, Reads.TEAMS, Reads.ARRIVAL_ORDER}
"""Inputs that stay as they are while jobs train: the shares of the last solve hold until a job ends."""


@dataclasses.dataclass(slots=True, kw_only=True)
class Course:
    """What becomes of one job; seconds from now, USD.

    Attributes:
        job: its name.
        begins: when it first has GPUs; 0 where it has them now; None: not within the time.
        ends: when it has done its steps; None: not within the time.
        starts: how often it is started or moved.
        gpu_hours, cost: of the GPUs that it holds from now on.
    """

    job: str
    begins: float | None = None
    ends: float | None = None
    starts: int = 0
    gpu_hours: float = 0.0
    cost: float = 0.0


@dataclasses.dataclass(slots=True, kw_only=True)
class _Live:
    """A job that has not ended.

    ``waits``: seconds until its next step; ``isolated``: as ``Job`` has it; ``of_price``: the part of its
    GPUs' price that it pays.
    """

    one: SnapshotJob
    course: Course
    remaining: float
    isolated: float
    waits: float = 0.0
    of_price: float = 1.0

    @property
    def speed(self) -> float:
        """Steps/s where it is."""
        return 0.0 if self.one.placement is None else self.one.speed(self.one.placement)

    @property
    def seconds_left(self) -> float:
        """Until it ends, where it stays as it is."""
        return self.waits + self.remaining / self.speed if self.speed > 0 else math.inf


def forecast(
    snapshot: Snapshot,
    policy: ClusterPolicy,
    *,
    now: float,
    seconds: float,
    live: Collection[str] = (),
    agnostic: bool = False,
) -> tuple[Course, ...]:
    """The course of every job of ``snapshot`` under ``policy``, in the order of the snapshot.

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
    return _Forecast(snapshot, policy, now=now, live=live, agnostic=agnostic).run(seconds)


class _Forecast:
    def __init__(
        self, snapshot: Snapshot, policy: ClusterPolicy, *, now: float, live: Collection[str], agnostic: bool
    ) -> None:
        self._snapshot, self._policy, self._began, self._live = snapshot, policy, now, live
        self._agnostic = agnostic
        self._rounds = Rounds()
        self._rounds.next_at = now
        capacity = snapshot.capacity
        self._prices = {
            pool.pool: pool.price or capacity.prices.get(pool.gpu_type, 0.0) for pool in capacity.pools
        }
        self._isolated: dict[str, float] = {}
        self._solved: tuple[frozenset[str], Allocation] | None = None
        self._present = {
            one.name: _Live(
                one=one,
                course=Course(job=one.name, begins=None if one.placement is None else 0.0),
                remaining=one.job.steps_remaining or 1.0,
                isolated=one.job.isolated_elapsed,
            )
            for one in snapshot.jobs
        }

    def run(self, seconds: float) -> tuple[Course, ...]:
        courses = tuple(one.course for one in self._present.values())
        at = 0.0
        while self._present and at < seconds - LEAST_STEP:
            try:
                self._decide(at)
            except ProblemError as error:
                raise ProblemError(f"{at / HOUR:.2f} h from now: {error}") from error
            assert self._rounds.next_at is not None
            ends = {name: at + one.seconds_left for name, one in self._present.items()}
            until = min(self._rounds.next_at - self._began, seconds, *ends.values())
            until = max(until, at + LEAST_STEP)
            for one in self._present.values():
                self._advance(one, until - at)
            at = until
            for name in [name for name, end in ends.items() if end <= at + LEAST_STEP]:
                self._present.pop(name).course.ends = at
        return courses

    def _decide(self, at: float) -> None:
        snapshot = dataclasses.replace(
            self._snapshot, jobs=tuple(self._as_seen(one, at) for one in self._present.values())
        )
        objective = self._policy.spec.objective
        inputs = complete(objective, snapshot.problem, snapshot.unmeasured)
        closed = snapshot.closed_pools
        besides, prices = data_costs(objective.policy, snapshot), inputs.problem.prices
        classes = price_classes(objective.policy, snapshot.capacity, prices, closed, by_region=bool(besides))
        decided = self._rounds.decide(
            self._policy,
            snapshot,
            self._shares(inputs, classes, closed, besides),
            classes=classes,
            parts=team_parts(objective.policy, inputs.problem),
            moment=self._began + at,
        )
        self._carry_out(decided, at)
        for name, live in self._present.items():
            beside = decided.beside.get(name)
            live.one = dataclasses.replace(live.one, beside_speed=1.0 if beside is None else beside.speed)
            live.of_price = price_part(shared=beside is not None)
        ratios = isolated_speeds(snapshot, inputs.problem, self._running())
        self._isolated = {name: 1.0 / ratio for name, ratio in ratios.items() if ratio > 0}

    def _shares(
        self,
        inputs: CompletedProblem,
        classes: PriceClasses,
        closed: Mapping[str, frozenset[str]],
        besides: Mapping[str, Mapping[str, float]],
    ) -> Allocation:
        name, jobs = self._policy.spec.objective.policy, frozenset(self._present)
        constant = find_policy(name).reads <= CONSTANT
        if self._solved is None or self._solved[0] != jobs or not constant:
            posed = with_mixtures(inputs.problem, self._snapshot.mixed, name, agnostic=self._agnostic)
            found = allocate(name, classes.split(posed, closed, besides), agnostic=self._agnostic)
            self._solved = jobs, found
        return self._solved[1]

    def _as_seen(self, live: _Live, at: float) -> SnapshotJob:
        """The job as a snapshot of that moment has it."""
        one, job, gang = live.one, live.one.job, live.one.elastic
        if gang is not None:
            free = one.name in self._live and one.placement is not None and live.waits <= 0
            gang = dataclasses.replace(gang, may_shrink=free, may_grow=free)
        job = dataclasses.replace(
            job,
            steps_remaining=max(live.remaining, LEAST_STEP),
            elapsed=job.elapsed + at,
            isolated_elapsed=live.isolated,
            deadline=None if job.deadline is None else job.deadline - at,
            budget=None if job.budget is None else max(0.0, job.budget - live.course.cost),
        )
        return dataclasses.replace(one, job=job, elastic=gang)

    def _running(self) -> dict[str, Placement]:
        found = {name: live.one.placement for name, live in self._present.items()}
        return {name: placement for name, placement in found.items() if placement is not None}

    def _carry_out(self, decided: Round, at: float) -> None:
        for name, live in self._present.items():
            before, after = live.one.placement, decided.placements.get(name)
            if after == before:
                continue
            gang = live.one.elastic
            if after is None:
                live.one, live.waits = dataclasses.replace(live.one, placement=None), 0.0
            elif name in decided.resized:
                live.one = dataclasses.replace(live.one, placement=after)
                live.waits += DEFAULT_PAUSE_SECONDS if gang is None else gang.pause_seconds
            else:
                live.one = dataclasses.replace(
                    live.one,
                    placement=after,
                    running_since=self._began + at,
                    launches=live.one.launches + 1,
                )
                live.waits = DEFAULT_RESTART_SECONDS if gang is None else gang.restart_seconds
                live.course.starts += 1
            if after is not None and live.course.begins is None:
                live.course.begins = at

    def _advance(self, live: _Live, seconds: float) -> None:
        at = live.one.placement
        if at is None:
            return
        trained = max(0.0, seconds - live.waits)
        live.waits = max(0.0, live.waits - seconds)
        live.remaining -= trained * live.speed
        live.isolated += trained * self._isolated.get(live.one.name, 0.0)
        hours = seconds * len(at.nodes) / HOUR * live.of_price
        live.course.gpu_hours += hours
        for part in at.by_pool:
            price = self._prices.get(part.pool, 0.0)
            live.course.cost += seconds * part.gpus / HOUR * price * live.of_price
        live.course.cost += trained * live.speed * at_placement(live.one.usd_per_step, at)
