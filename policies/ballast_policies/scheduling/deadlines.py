"""Deadlines beside spot machines: where each gang with a deadline runs in a round, by the replay's rule.

Shares that keep a deadline at the least cost spread a job's time evenly until then. Where machines are taken
away that is dear: time on spot machines that is not used does not come back, and while there are none the
even pace is kept on demand. So the policy's shares say which deadlines are kept, and each of these jobs, the
most urgent first, chooses by :func:`~ballast_policies.prices.choice.choose` among the pools that have room
for it: it runs on spot machines while there are any, waits for them while its deadline is safe, and runs on
demand from the last moment on from which that is sure. Elastic gangs and gangs in several pools are left to
the shares.
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
from ballast_policies.rounds.values import ANY_NODES, NodeRequest, Round, gpus_by
from ballast_policies.scheduling.state import ClusterJob, ClusterState

HOUR = 3600.0

WAITS = "it waits for spot machines: its deadline leaves time to run on demand, which is dearer, later"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeadlineChoices:
    """Decisions for gangs with a deadline in a round.

    Attributes:
        shares: job -> pool -> 1; of a job that waits for spot machines nothing.
        not_tolerated: job -> groups of nodes on which it is not started besides those of the state.
        waits: job -> why it waits, as text.
    """

    shares: Mapping[str, Mapping[str, float]] = dataclasses.field(default_factory=dict)
    not_tolerated: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    waits: Mapping[str, str] = dataclasses.field(default_factory=dict)

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
    barred, waits = dict[str, frozenset[str]](), dict[str, str]()
    with_deadline = [
        job
        for job in state.jobs
        if job.job.deadline is not None and job.name not in late and job.elastic is None and job.mixed is None
    ]
    for job in sorted(with_deadline, key=lambda job: (job.job.deadline or 0.0, job.name)):
        pools = _pools(state, job, posed[job.name], problem.prices)
        kinds = {pool.pool in spot for pool in pools}
        if kinds != {True, False}:
            continue
        choice = _choice(state, job, posed[job.name], pools, room, round_seconds=round_seconds, now=now)
        if choice.option == WAIT:
            shares[job.name] = {}
            waits[job.name] = WAITS
        else:
            pool = pools[choice.option]
            shares[job.name] = {pool.pool: 1.0}
            room[pool.pool] -= job.job.gpus
        if choice.option == WAIT or pools[choice.option].pool in spot:
            barred[job.name] = _groups_of_others(state)
    return DeadlineChoices(shares=shares, not_tolerated=barred, waits=waits)


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


def _choice(
    state: ClusterState,
    job: ClusterJob,
    posed: Job,
    pools: list[PricedPool],
    room: Mapping[str, int],
    *,
    round_seconds: float,
    now: float,
) -> Choice:
    gpus, at, steps = job.job.gpus, WAIT, max(1.0, posed.steps_remaining or 1.0)
    moves = np.array([job.usd_to_move.get(pool.pool, 0.0) for pool in pools])
    of_class: dict[str, Hazard] = {}
    for pool in state.usable_pools:
        if pool.pool in state.spot.pools:
            seen = state.preempted.get(pool.pool, Hazard())
            of_class[pool.gpu_type] = of_class.get(pool.gpu_type, Hazard()).plus(seen)
    speed, usd, listed, hazard = [], [], [], []
    for number, pool in enumerate(pools):
        runs_here = job.placement is not None and job.placement.pool == pool.pool
        if runs_here:
            at = number
        nodes = state.capacity.node_sizes.in_pool(
            pool.pool, gpus, per_pod=job.asks.per_pod, barred=job.asks.barred
        )
        if runs_here and job.placement is not None:
            nodes = len(set(job.placement.nodes))
        there = nodes is not None and room[pool.pool] >= gpus
        rate = posed.throughput[pool.gpu_type]
        read = max(0.0, job.usd_per_step.get(pool.pool, 0.0) - moves[number] / steps)
        speed.append(rate)
        listed.append(pool.price * gpus + read * rate * HOUR)
        usd.append(listed[-1] if there else np.nan)
        seen = state.preempted.get(pool.pool, Hazard())
        expected = seen.per_hour_in_class(of_class.get(pool.gpu_type, Hazard()))
        hazard.append(expected * (nodes or 1) if pool.pool in state.spot.pools else 0.0)
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
