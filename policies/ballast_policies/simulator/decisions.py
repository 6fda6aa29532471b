"""The operator's decisions, one after the other, on a cluster that is simulated."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, Self, TypeVar

from ballast_policies.accounting import price_part
from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Allocation
from ballast_policies.allocation.registry import allocate, find_policy
from ballast_policies.rounds.gangs import PAUSE_SECONDS, RESTART_SECONDS
from ballast_policies.rounds.question import SpotLimits
from ballast_policies.rounds.values import Node, Placement, Round, gpus_by
from ballast_policies.scheduling.decision import (
    Decision,
    Memory,
    SchedulingPolicy,
    SolveRequest,
    decide,
    isolated_speeds,
)
from ballast_policies.scheduling.state import Capacity, ClusterJob, ClusterState
from ballast_policies.simulator.clock import LEAST_STEP, ActiveJob, Answer, SimulationError

HOUR = 3600.0

CONSTANT = {Reads.WEIGHTS, Reads.PRICES, Reads.TEAMS, Reads.ARRIVAL_ORDER}
"""Inputs that stay as they are while jobs train: the last shares hold until jobs or GPUs come or go."""


@dataclasses.dataclass(slots=True, kw_only=True)
class SimulatedGang(ActiveJob):
    """A job of a simulation, as decisions see it.

    Attributes:
        isolated_elapsed: as ``Job`` has it; it stands still where the policy does not read it.
        isolated_rate: by how much a second of training raises it.
    """

    isolated_elapsed: float = 0.0
    isolated_rate: float = 0.0

    def advance(self, seconds: float) -> float:
        """Also compare what it has done with its isolated share."""
        trained = ActiveJob.advance(self, seconds)
        self.isolated_elapsed += trained * self.isolated_rate
        return trained

    def as_cluster_job(self, now: float) -> ClusterJob:
        """The job at ``now``, on the clock."""
        raise NotImplementedError


@dataclasses.dataclass(slots=True, kw_only=True)
class ClusterGang(SimulatedGang):
    """A job as an operator's decisions have seen it.

    Attributes:
        one: as it was when it arrived on the clock.
        arrived: when that was, on the clock.
        began: when the clock began, epoch seconds.
        live: it changes its size without a restart.
        prices: pool -> USD a GPU hour.
        of_price: the part of its GPUs' price that it pays.
        begins: when it first had GPUs, on the clock; None: not yet.
        ends: when it had done its steps, on the clock; None: not yet.
        first: the GPUs on which it began, as people read them; empty: it had them when it arrived.
        gpu_hours, cost: of the GPUs that it has held, and of its data.
    """

    one: ClusterJob
    began: float
    live: bool
    prices: Mapping[str, float]
    arrived: float = 0.0
    of_price: float = 1.0
    begins: float | None = None
    ends: float | None = None
    gpu_hours: float = 0.0
    cost: float = 0.0
    first: str = ""

    @classmethod
    def of(
        cls, one: ClusterJob, prices: Mapping[str, float], began: float, *, live: bool, arrived: float = 0.0
    ) -> Self:
        """The job as it arrives."""
        gang, alone = one.elastic, dataclasses.replace(one, beside_speed=1.0)
        restart = RESTART_SECONDS if gang is None else gang.restart_seconds
        starts = one.placement is not None and one.trains_from > began
        waits = max(0.0, min(one.trains_from, one.running_since + restart) - began) if starts else 0.0
        return cls(
            name=one.name,
            remaining=one.job.steps_remaining or 1.0,
            speed_at=alone.speed,
            restart_seconds=restart,
            pause_seconds=PAUSE_SECONDS if gang is None else gang.pause_seconds,
            placement=one.placement,
            trains_on=one.placement,
            since=one.running_since - began,
            trains_from=waits if starts else one.trains_from - began,
            waits=waits,
            beside_speed=one.beside_speed,
            one=one,
            began=began,
            live=live,
            prices=prices,
            isolated_elapsed=one.job.isolated_elapsed,
            arrived=arrived,
            begins=None if one.placement is None else 0.0,
        )

    def advance(self, seconds: float) -> float:
        """Also sum up what it holds and pays."""
        at, speed = self.placement, self.speed
        trained = SimulatedGang.advance(self, seconds)
        if at is None:
            return trained
        self.gpu_hours += seconds * len(at.nodes) / HOUR * self.of_price
        self.cost += seconds * self.usd_per_second(at)
        self.cost += trained * speed * at.mean(self.one.usd_per_step)
        return trained

    def usd_per_second(self, at: Placement) -> float:
        """The price of its GPUs, without its data."""
        usd_per_hour = sum(part.gpus * self.prices.get(part.pool, 0.0) for part in at.by_pool)
        return usd_per_hour / HOUR * self.of_price

    def follow(self, decided: Round, now: float) -> None:
        """Also note where it began."""
        ActiveJob.follow(self, decided, now)
        self.of_price = price_part(shared=self.name in decided.colocations)
        if self.placement is not None and self.begins is None:
            self.begins, self.first = now, str(self.placement)

    def as_cluster_job(self, now: float) -> ClusterJob:
        """The job at ``now``, on the clock."""
        one, job, gang, age = self.one, self.one.job, self.one.elastic, now - self.arrived
        if gang is not None:
            free = self.live and self.trains
            gang = dataclasses.replace(
                gang,
                may_shrink=free,
                may_grow=free and now >= self.settled - LEAST_STEP,
                may_move=free if self.live else gang.may_move,
            )
        job = dataclasses.replace(
            job,
            steps_remaining=max(self.remaining, LEAST_STEP),
            elapsed=job.elapsed + age,
            isolated_elapsed=self.isolated_elapsed,
            deadline=None if job.deadline is None else job.deadline - age,
            budget=None if job.budget is None else max(0.0, job.budget - self.cost),
        )
        return dataclasses.replace(
            one,
            job=job,
            elastic=gang,
            placement=self.placement,
            running_since=self.began + self.since,
            trains_from=self.began + self.trains_from,
            launches=one.launches + self.starts,
            beside_speed=self.beside_speed,
        )


Gang = TypeVar("Gang", bound=SimulatedGang)


class OperatorDecisions(Generic[Gang]):
    """Asks for whole decisions, as the operator does, and remembers them.

    A policy is solved again when jobs or GPUs have come or gone, and at the ends of rounds where it reads
    what changes while jobs train.

    Args:
        state: the cluster; its jobs are those of the clock.
        policy: by which is decided.
        began: when the clock began, epoch seconds.
        first_round_ends: seconds of the clock; the others end on the grid from there on. None: a round after
            the first decision.
        stop_seconds: until a gang that is stopped or moved has saved and left its GPUs.

    Attributes:
        state: the cluster from the next decision on.
        solve_seconds: wall time of each solve.
        last: the last decision.
    """

    def __init__(
        self,
        state: ClusterState,
        policy: SchedulingPolicy,
        *,
        began: float = 0.0,
        first_round_ends: float | None = None,
        stop_seconds: float = 0.0,
    ) -> None:
        self.state, self._policy, self._began, self._stop_seconds = state, policy, began, stop_seconds
        self._memory = Memory(next_at=None if first_round_ends is None else began + first_round_ends)
        self._reads = find_policy(policy.objective).reads
        self._solved: tuple[tuple[object, ...], Allocation] | None = None
        self.solve_seconds: list[float] = []
        self.last: Decision | None = None

    def change(self, capacity: Capacity, policy: SchedulingPolicy, spot: SpotLimits) -> None:
        """Other GPUs, another policy or other limits of spot machines, from the next decision on."""
        self.state, self._policy = dataclasses.replace(self.state, capacity=capacity, spot=spot), policy
        self._reads, self._solved = find_policy(policy.objective).reads, None

    def __call__(self, present: Mapping[str, Gang], now: float) -> Answer:
        """Placements from ``now`` on. Raises ProblemError: the policy cannot be used on what is there."""
        self.state = dataclasses.replace(
            self.state, jobs=tuple(one.as_cluster_job(now) for one in present.values())
        )
        moment = self._began + now
        at_boundary = self._memory.next_at is not None and moment >= self._memory.next_at
        if at_boundary and not self._reads <= CONSTANT:
            self._solved = None
        self.last = decide(self.state, self._memory, self._policy, now=moment, solve=self._solve)
        self._memory = self.last.memory
        self._check(now)
        self._wait_for_others(present, self.last.round)
        if Reads.ISOLATED_ELAPSED in self._reads:
            self._compare_with_isolation(present, self.last)
        assert self._memory.next_at is not None
        return Answer(round=self.last.round, until=self._memory.next_at - self._began)

    def _solve(self, request: SolveRequest) -> Allocation:
        if self._solved is None or self._solved[0] != request.structure:
            name, agnostic = self._policy.objective, self._policy.heterogeneity_agnostic
            self._solved = request.structure, allocate(name, request.problem, agnostic=agnostic)
            self.solve_seconds.append(self._solved[1].solve_seconds)
        return self._solved[1]

    def _wait_for_others(self, present: Mapping[str, Gang], decided: Round) -> None:
        """A gang that finds idle GPUs starts without waiting until others, or it itself, have left."""
        idle = Counter({node.name: node.gpus for node in self.state.capacity.nodes})
        for gang in present.values():
            idle.subtract(() if gang.placement is None else gang.placement.nodes)
        for name in (*decided.started, *decided.moved):
            needs = Counter(decided.placements[name].nodes)
            finds_room = name in decided.started and all(idle[node] >= gpus for node, gpus in needs.items())
            present[name].others_leave = 0.0 if finds_room else self._stop_seconds
            idle.subtract(needs if finds_room else ())

    def _compare_with_isolation(self, present: Mapping[str, Gang], decision: Decision) -> None:
        """Note how much faster than on its isolated share each gang is from now on."""
        ratios = isolated_speeds(self.state, decision.inputs.problem, decision.round.placements)
        for name, gang in present.items():
            ratio = ratios.get(name, 0.0)
            gang.isolated_rate = 1.0 / ratio if ratio > 0 else 0.0

    def _check(self, now: float) -> None:
        assert self.last is not None
        used = Counter(name for at in self.last.round.first_placements.values() for name in at.nodes)
        for node in self.state.capacity.nodes:
            if used[node.name] > node.gpus:
                raise SimulationError(
                    f"at {now:g} s {used[node.name]} of {node.gpus} GPUs of {node.name} are given out"
                )


def cluster_of(nodes: Iterable[Node], prices: Mapping[str, float] | None = None) -> ClusterState:
    """A cluster without jobs; each GPU type is one pool. ``prices``: GPU type -> USD a GPU hour."""
    nodes = tuple(nodes)
    gpus = gpus_by(nodes, lambda node: node.gpu_type)
    prices = prices or {}
    return ClusterState(
        capacity=Capacity(
            gpu_types=tuple(gpus),
            nodes=nodes,
            pools=tuple(
                PricedPool(pool=kind, gpu_type=kind, price=prices.get(kind, 0.0), gpus=count)
                for kind, count in gpus.items()
            ),
        ),
        jobs=(),
    )
