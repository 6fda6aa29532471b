"""A twin of the cluster: what an operator saw and decided, played again by its own decisions.

Speeds, and what starts took, are those that were seen; who runs when and where is decided anew, so that what
the twin does otherwise than the cluster is the error of a simulation. Times in epoch seconds, costs in USD.
"""

import dataclasses
import functools
import math
import operator
import statistics
from collections.abc import Iterator, Mapping
from typing import Any

from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.rounds.question import SpotLimits
from ballast_policies.rounds.values import Node
from ballast_policies.scheduling.decision import SchedulingPolicy
from ballast_policies.scheduling.state import Capacity, ClusterJob, ClusterState
from ballast_policies.simulator.clock import Clock
from ballast_policies.simulator.decisions import ClusterGang, OperatorDecisions

WITHIN = 0.1
"""A twin agrees whose sums of completion times and of costs are off by at most this part."""

WINDOWS = 3.0
"""A replay ends at the latest after so many times the recorded time."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedCluster:
    """Pools and policy from ``at`` on.

    Attributes:
        spot: what may be started in spot pools.
        round_ends: when some round ends; the others end on the grid around it. None: not known.
    """

    at: float
    nodes: tuple[Node, ...]
    pools: tuple[PricedPool, ...]
    policy: SchedulingPolicy
    spot: SpotLimits = dataclasses.field(default_factory=SpotLimits)
    round_ends: float | None = None

    @property
    def capacity(self) -> Capacity:
        """The pools as decisions see them."""
        types = tuple(sorted({pool.gpu_type for pool in self.pools}))
        return Capacity(gpu_types=types, nodes=self.nodes, pools=self.pools)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RecordedJob:
    """A job from its arrival, or the begin of the recording, on.

    Attributes:
        one: as decisions saw it, with the steps that were left, and the GPUs that it held, at ``arrival``.
        live: it changes its size without a restart.
        arrival: when it came, or the begin of the recording.
        gone: when it had done its steps, or left without that; None: neither.
        done: it had done its steps.
        suspended: from when to when it was to hold no GPUs; infinite: until it had gone.
        cost: what it paid from ``arrival`` on.
        start_seconds: of each start, as seen; None: none was.
        stop_seconds: of each stop, until its GPUs were free; None: none was seen.
        end_seconds: from its last step until its GPUs were free.
        growth_seconds: from the decision that it grows until it trains on more GPUs.
    """

    one: ClusterJob
    arrival: float
    live: bool = False
    gone: float | None = None
    done: bool = False
    suspended: tuple[tuple[float, float], ...] = ()
    cost: float = 0.0
    start_seconds: float | None = None
    stop_seconds: float | None = None
    end_seconds: float = 0.0
    growth_seconds: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Recording of clusters and jobs from ``since`` to ``until``.

    Attributes:
        clusters: oldest first; the first holds from ``since`` on.
        jobs: by arrival.
        left_out: jobs that cannot be played again, with why.
    """

    since: float
    until: float
    clusters: tuple[RecordedCluster, ...]
    jobs: tuple[RecordedJob, ...]
    left_out: Mapping[str, str] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedJob:
    """A job that had done its steps, as recorded and in the replay; no seconds: not done there."""

    job: str
    recorded_seconds: float
    seconds: float | None
    recorded_cost: float
    cost: float
    starts: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Replay:
    """Outcome of a replay, for the jobs that had done their steps.

    Attributes:
        policy: by which was decided.
        running: jobs that had not ended; they are played, and not compared.
    """

    policy: str
    since: float
    until: float
    jobs: tuple[ReplayedJob, ...]
    running: int
    left_out: Mapping[str, str]

    @property
    def unfinished(self) -> tuple[str, ...]:
        """Jobs that are not done in the replay."""
        return tuple(job.job for job in self.jobs if job.seconds is None)

    @property
    def time_error(self) -> float | None:
        """Sum of completion times over the recorded sum, minus 1; None: nothing to compare."""
        done = [job for job in self.jobs if job.seconds is not None]
        return _error(sum(job.seconds or 0.0 for job in done), sum(job.recorded_seconds for job in done))

    @property
    def typical_time_error(self) -> float | None:
        """Mean over jobs of the absolute relative error of the completion time."""
        errors = [
            abs(error)
            for job in self.jobs
            if job.seconds is not None
            if (error := _error(job.seconds, job.recorded_seconds)) is not None
        ]
        return statistics.fmean(errors) if errors else None

    @property
    def cost_error(self) -> float | None:
        """Error of the sum of costs; None: nothing was paid."""
        return _error(sum(job.cost for job in self.jobs), sum(job.recorded_cost for job in self.jobs))

    def agrees(self) -> bool | None:
        """True if all jobs end, and both sums are off by at most WITHIN; None: no job to compare."""
        errors = [error for error in (self.time_error, self.cost_error) if error is not None]
        if not self.jobs:
            return None
        return not self.unfinished and all(abs(error) <= WITHIN for error in errors)

    def to_json(self) -> dict[str, Any]:
        """The form of ``ballast twin --output json``."""
        return {
            **dataclasses.asdict(self),
            "jobs": [
                {
                    **dataclasses.asdict(job),
                    "time_error": None if job.seconds is None else _error(job.seconds, job.recorded_seconds),
                    "cost_error": _error(job.cost, job.recorded_cost),
                }
                for job in self.jobs
            ],
            "unfinished": list(self.unfinished),
            "time_error": self.time_error,
            "typical_time_error": self.typical_time_error,
            "cost_error": self.cost_error,
        }


def _error(played: float, recorded: float) -> float | None:
    return played / recorded - 1.0 if recorded > 0 else None


def replay(recording: Recording, *, objective: str = "") -> Replay:
    """Decide on the recorded jobs again, until those are done that had done their steps.

    ``objective``: name of another policy; empty: the recorded ones.

    Raises:
        ProblemError: the policy is unknown, or cannot be used on what is there at some moment.
    """
    if not recording.clusters or not recording.jobs:
        name = objective or (recording.clusters[0].policy.objective if recording.clusters else "")
        return _result(recording, name, {}, {})
    first, began = recording.clusters[0], recording.since
    prices, compared = first.capacity.pool_prices, {job.one.name for job in recording.jobs if job.done}
    gangs = {job.one.name: _gang(job, prices, began) for job in recording.jobs}
    stops = [job.stop_seconds for job in recording.jobs if job.stop_seconds is not None]
    decisions = OperatorDecisions[ClusterGang](
        ClusterState(capacity=first.capacity, jobs=(), spot=first.spot),
        _under(first.policy, objective),
        began=began,
        first_round_ends=_first_round(first, began),
        stop_seconds=statistics.fmean(stops) if stops else 0.0,
    )
    ended: dict[str, float] = {}
    clock: Clock[ClusterGang]

    def end(gang: ClusterGang, at: float) -> None:
        ended[gang.name] = at
        compared.discard(gang.name)
        clock.over = not compared

    def leave(name: str) -> None:
        gang = clock.present.pop(name, None)
        if gang is not None:
            gang.leave()

    def change(to: RecordedCluster) -> None:
        prices.clear()
        prices.update(to.capacity.pool_prices)
        decisions.change(to.capacity, _under(to.policy, objective), to.spot)
        there = {node.name for node in to.nodes}
        for gang in clock.present.values():
            if gang.placement is not None and not there.issuperset(gang.placement.nodes):
                gang.leave()

    happens = [(to.at, functools.partial(change, to)) for to in recording.clusters[1:]]
    for job in recording.jobs:
        stops_at = [begin for begin, _ in job.suspended]
        stops_at += [] if job.gone is None or job.done else [job.gone]
        happens += [(at, functools.partial(leave, job.one.name)) for at in stops_at]
    clock = Clock(
        arrivals=_arrivals(recording, gangs),
        decide=decisions,
        ended=end,
        events=sorted(((at - began, what) for at, what in happens), key=operator.itemgetter(0)),
    )
    clock.over = not compared
    clock.run(WINDOWS * max(0.0, recording.until - began))
    return _result(recording, objective or first.policy.objective, gangs, ended)


def _arrivals(recording: Recording, gangs: Mapping[str, ClusterGang]) -> Iterator[tuple[float, ClusterGang]]:
    """Arrivals of the jobs, and their returns after a suspension."""
    comes = [
        (at, number)
        for number, job in enumerate(recording.jobs)
        for at in (job.arrival, *(end for _, end in job.suspended))
        if not any(begin <= at < end for begin, end in job.suspended) and at < math.inf
    ]
    for at, number in sorted(comes):
        yield max(0.0, at - recording.since), gangs[recording.jobs[number].one.name]


def _gang(job: RecordedJob, prices: Mapping[str, float], began: float) -> ClusterGang:
    one = job.one
    gang = ClusterGang.of(one, prices, began, live=job.live, arrived=max(0.0, job.arrival - began))
    restart = gang.restart_seconds if job.start_seconds is None else job.start_seconds
    return dataclasses.replace(
        gang, restart_seconds=restart, growth_seconds=job.growth_seconds, ending=job.end_seconds
    )


def _under(policy: SchedulingPolicy, objective: str) -> SchedulingPolicy:
    """The policy in force, or another in its place."""
    if objective and objective != policy.objective:
        policy = dataclasses.replace(policy, objective=objective, heterogeneity_agnostic=False)
    return dataclasses.replace(policy, dry_run=False)


def _first_round(cluster: RecordedCluster, began: float) -> float | None:
    if cluster.round_ends is None:
        return None
    return math.fmod(cluster.round_ends - began, cluster.policy.round_seconds) % cluster.policy.round_seconds


def _result(
    recording: Recording, policy: str, gangs: Mapping[str, ClusterGang], ended: Mapping[str, float]
) -> Replay:
    found = []
    for job in recording.jobs:
        gang, at = gangs.get(job.one.name), ended.get(job.one.name)
        if job.done and job.gone is not None and gang is not None:
            found.append(
                ReplayedJob(
                    job=gang.name,
                    recorded_seconds=job.gone - job.arrival,
                    seconds=None if at is None else at - gang.arrived,
                    recorded_cost=job.cost,
                    cost=gang.cost,
                    starts=gang.starts,
                )
            )
    return Replay(
        policy=policy,
        since=recording.since,
        until=recording.until,
        jobs=tuple(found),
        running=sum(job.gone is None for job in recording.jobs),
        left_out=recording.left_out,
    )
