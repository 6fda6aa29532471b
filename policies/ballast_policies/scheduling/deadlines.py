"""Deadlines beside spot machines: where each gang with a deadline runs in a round, by the replay's rule.

Shares that keep a deadline at the least cost spread a job's time evenly until then. Where machines are taken
away that is dear: time on spot machines that is not used does not come back, and while there are none the
even pace is kept on demand. So the policy's shares say which deadlines are kept, and each of these jobs, the
most urgent first, chooses by :func:`~ballast_policies.prices.choice.choose` among the pools that have room
for it: it runs on spot machines while there are any, waits for them while its deadline is safe, and runs on
demand from the last moment on from which that is sure. Gangs that need several pools are left to the shares.

An elastic gang whose least size misses its deadline is shown to the policy with more GPUs. In the choice it
counts in each pool with the GPUs that it could have there, up to a size that is enough: twice as fast as its
deadline needs, so that half of the time may pass without machines. Fewer GPUs count as dear as they are slow:
what they cost less a step, they take of the slack.
"""

import dataclasses
from collections.abc import Mapping

import numpy as np

from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Allocation, Job, Problem
from ballast_policies.allocation.registry import find_policy
from ballast_policies.prices.choice import WAIT, Choice, Preferences, Situation, choose
from ballast_policies.prices.hazard import Hazard, RestartCosts
from ballast_policies.prices.options import Options, useful_parts
from ballast_policies.rounds.gangs import ElasticGang
from ballast_policies.rounds.memory import HOUR
from ballast_policies.rounds.values import ANY_NODES, NodeRequest, Round, gpus_by
from ballast_policies.scheduling.state import ClusterJob, ClusterState

AS_FAST = 2.0
"""Speed of an elastic gang that is enough, over what its deadline needs: the replays of the probed H100
(lab/benchmarks/prices/deadlines.py) end 1.2 to 2 times the gang's own time from now."""

WAITS = "it waits for spot machines: its deadline leaves time to run on demand, which is dearer, later"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineChoices:
    """Decisions for gangs with a deadline in a round.

    Attributes:
        shares: job -> pool -> 1; of a job that waits for spot machines nothing.
        not_tolerated: job -> groups of nodes on which it is not started besides those of the state.
        waits: job -> why it waits, as text.
        sizes: elastic gang that runs -> GPUs that it is to have, where its pool has them.
    """

    shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    not_tolerated: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    waits: Mapping[str, str] = dataclasses.field(default_factory=dict)
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def sized(self, elastic: Mapping[str, ElasticGang]) -> Mapping[str, ElasticGang]:
        """``elastic`` with these sizes wanted, each in the pool that was chosen."""
        wanted = {
            job: dataclasses.replace(elastic[job], wanted=size, may_move=False)
            for job, size in self.sizes.items()
        }
        return {**elastic, **wanted} if wanted else elastic

    def applied(self, allocation: Allocation, columns: Mapping[str, str]) -> Allocation:
        """``allocation`` with these shares; ``columns``: pool -> column."""
        if not self.shares:
            return allocation
        rows = {
            job: {columns[pool]: share for pool, share in row.items()} for job, row in self.shares.items()
        }
        return dataclasses.replace(allocation, allocation={**allocation.allocation, **rows})

    def barred(self, asks: Mapping[str, NodeRequest]) -> Mapping[str, NodeRequest]:
        """Requests of jobs for their nodes, with these barred as well."""
        found = dict(asks)
        for job, own in self.not_tolerated.items():
            known = asks.get(job, ANY_NODES)
            found[job] = dataclasses.replace(known, barred=known.barred | own)
        return found

    def explain(self, decided: Round) -> Round:
        """``decided`` with why jobs wait that are to."""
        told = {job: why for job, why in self.waits.items() if job not in decided.placements}
        return dataclasses.replace(decided, reasons={**decided.reasons, **told}) if told else decided


def sized_for_deadlines(state: ClusterState, objective: str, problem: Problem) -> Problem:
    """``problem`` with each elastic gang whose least size misses its deadline as one of :func:`_in_time`."""
    if not find_policy(objective).names_unmet_deadlines:
        return problem
    jobs = list(problem.jobs)
    for at, job in enumerate(state.jobs):
        size = _in_time(job, jobs[at], problem.prices)
        if size is not None and job.elastic is not None:
            speeds = {gpu_type: by.get(size, 0.0) for gpu_type, by in job.elastic.speeds.items()}
            jobs[at] = dataclasses.replace(jobs[at], gpus=size, throughput=speeds)
    return dataclasses.replace(problem, jobs=tuple(jobs))


def _in_time(job: ClusterJob, posed: Job, prices: Mapping[str, float]) -> int | None:
    """Size of an elastic gang whose steps cost least of those that keep its deadline.

    None: its least does, or none.
    """
    steps, left = posed.steps_remaining or 0.0, posed.deadline or 0.0
    if job.elastic is None or left <= 0 or not job.may_be_in_one_pool:
        return None
    if steps <= left * max(posed.throughput.values(), default=0.0):
        return None
    enough = {
        (prices.get(gpu_type, 1.0) * size / speed, size)
        for gpu_type, by_size in job.elastic.speeds.items()
        for size, speed in by_size.items()
        if steps <= left * speed
    }
    return min(enough, default=(0.0, None))[1]


def deadline_choices(
    state: ClusterState,
    objective: str,
    problem: Problem,
    allocation: Allocation,
    *,
    round_seconds: float,
    now: float,
) -> DeadlineChoices:
    """The choices for a round; none where the policy does not read prices and deadlines.

    ``problem``: by GPU type, completed; ``round_seconds``: until the next choice; ``now``: epoch seconds.
    """
    reads = find_policy(objective).reads
    spot = state.spot.pools
    if not {Reads.PRICES, Reads.DEADLINES} <= reads or not spot or allocation.policy != objective:
        return DeadlineChoices()
    late = set(allocation.unmet_deadlines)
    posed = {job.name: job for job in problem.jobs}
    room = gpus_by(state.capacity.nodes, lambda node: node.pool)
    shares: dict[str, dict[str, float]] = {}
    barred, waits, sizes = dict[str, frozenset[str]](), dict[str, str](), dict[str, int]()
    with_deadline = [
        job
        for job in state.jobs
        if job.job.deadline is not None and job.name not in late and job.may_be_in_one_pool
    ]
    for job in sorted(with_deadline, key=lambda job: (job.job.deadline or 0.0, job.name)):
        pools = _pools(state, job, posed[job.name], problem.prices)
        kinds = {pool.pool in spot for pool in pools}
        if kinds != {True, False}:
            continue
        there = [_gang_in(state, job, posed[job.name], pool, room[pool.pool]) for pool in pools]
        choice = _choice(state, job, posed[job.name], pools, there, round_seconds=round_seconds, now=now)
        if choice.option == WAIT:
            shares[job.name] = {}
            waits[job.name] = WAITS
        else:
            pool = pools[choice.option]
            shares[job.name] = {pool.pool: 1.0}
            room[pool.pool] -= there[choice.option].gpus
            if job.elastic is not None:
                sizes[job.name] = there[choice.option].enough
        if choice.option == WAIT or pools[choice.option].pool in spot:
            barred[job.name] = _groups_of_others(state)
    return DeadlineChoices(shares=shares, not_tolerated=barred, waits=waits, sizes=sizes)


def _groups_of_others(state: ClusterState) -> frozenset[str]:
    """Groups of nodes that are not spot, as far as no spot node is of the same group."""
    spot = {node.group for node in state.capacity.nodes if node.pool in state.spot.pools}
    return frozenset(node.group for node in state.capacity.nodes) - spot


def _pools(state: ClusterState, job: ClusterJob, posed: Job, prices: Mapping[str, float]) -> list[PricedPool]:
    """The pools that the job may use, with their prices."""
    return [
        dataclasses.replace(pool, price=pool.price or prices.get(pool.gpu_type, 0.0))
        for pool in state.usable_pools
        if posed.throughput.get(pool.gpu_type, 0.0) > 0 and pool.pool not in job.closed_pools
    ]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _GangThere:
    """A gang in a pool.

    Attributes:
        gpus: that it would have; where there is no room for it, ``enough``.
        enough: number of GPUs that is enough for its deadline.
        nodes: that these take; None: no room.
        speed: steps/s.
        part: of the speed with ``enough`` GPUs.
    """

    gpus: int
    enough: int
    nodes: int | None
    speed: float
    part: float = 1.0


def _gang_in(state: ClusterState, job: ClusterJob, posed: Job, pool: PricedPool, room: int) -> _GangThere:
    def nodes(gpus: int) -> int | None:
        asks = job.asks
        found = state.capacity.node_sizes.in_pool(pool.pool, gpus, per_pod=asks.per_pod, barred=asks.barred)
        if job.placement is not None and (job.placement.pool, len(job.placement.nodes)) == (pool.pool, gpus):
            found = len(set(job.placement.nodes))
        return found if room >= gpus else None

    alone, by_size = posed.throughput[pool.gpu_type], {}
    if job.elastic is not None:
        by_size = {
            gpus: speed
            for gpus, speed in sorted(job.elastic.speeds.get(pool.gpu_type, {}).items())
            if speed > 0
        }
    if not by_size:
        return _GangThere(gpus=job.job.gpus, enough=job.job.gpus, nodes=nodes(job.job.gpus), speed=alone)
    needed = AS_FAST * (posed.steps_remaining or 1.0) / max(posed.deadline or 0.0, 1e-9)
    enough = next(
        (gpus for gpus, speed in by_size.items() if speed >= needed), max(by_size, key=by_size.__getitem__)
    )
    for gpus in (size for size in reversed(by_size) if size <= enough):
        if (has := nodes(gpus)) is not None:
            speed = by_size[gpus]
            return _GangThere(gpus=gpus, enough=enough, nodes=has, speed=speed, part=speed / by_size[enough])
    return _GangThere(gpus=enough, enough=enough, nodes=None, speed=by_size[enough])


def _choice(
    state: ClusterState,
    job: ClusterJob,
    posed: Job,
    pools: list[PricedPool],
    gangs: list[_GangThere],
    *,
    round_seconds: float,
    now: float,
) -> Choice:
    at, steps = WAIT, max(1.0, posed.steps_remaining or 1.0)
    moves = np.array([job.usd_to_move.get(pool.pool, 0.0) for pool in pools])
    of_class: dict[str, Hazard] = {}
    for pool in state.usable_pools:
        if pool.pool in state.spot.pools:
            seen = state.preempted.get(pool.pool, Hazard())
            of_class[pool.gpu_type] = of_class.get(pool.gpu_type, Hazard()).plus(seen)
    speed, usd, listed, hazard = [], [], [], []
    for number, (pool, gang) in enumerate(zip(pools, gangs, strict=True)):
        if job.placement is not None and job.placement.pool == pool.pool:
            at = number
        read = max(0.0, job.usd_per_step.get(pool.pool, 0.0) - moves[number] / steps)
        speed.append(gang.speed)
        listed.append(pool.price * gang.enough * gang.part + read * gang.speed * HOUR)
        usd.append(listed[-1] if gang.nodes is not None else np.nan)
        seen = state.preempted.get(pool.pool, Hazard())
        expected = seen.per_hour_in_class(of_class.get(pool.gpu_type, Hazard()))
        hazard.append(expected * (gang.nodes or 1) if pool.pool in state.spot.pools else 0.0)
    start = max([state.start_seconds.get(pool.pool, 0.0) for pool in pools], default=0.0)
    preferences = Preferences(
        restart=RestartCosts(startup_seconds=start) if start else RestartCosts(),
        review_seconds=round_seconds,
    )
    options = Options(
        speed=np.array(speed),
        usd_per_hour=np.array(usd),
        hazard_per_hour=np.array(hazard),
        spot=np.array([pool.pool in state.spot.pools for pool in pools]),
        listed_usd_per_hour=np.array(listed),
    )
    situation = Situation(
        steps=steps,
        seconds_to_deadline=posed.deadline,
        at=at,
        starting_seconds=0.0 if at == WAIT else max(0.0, start - (now - job.running_since)),
        move_usd=moves,
    )
    return choose(situation, options, preferences, useful_parts(options, preferences.restart))
