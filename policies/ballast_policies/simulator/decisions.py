"""The operator's decisions, one after the other, on a cluster that is simulated."""

import dataclasses
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Generic, TypeVar

from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Allocation
from ballast_policies.allocation.registry import allocate, find_policy
from ballast_policies.rounds import Node
from ballast_policies.scheduling import (
    Capacity,
    ClusterJob,
    ClusterState,
    Decision,
    Memory,
    SchedulingPolicy,
    SolveRequest,
    decide,
)
from ballast_policies.simulator.clock import ActiveJob, Answer, SimulationError

CONSTANT = {Reads.PRICES, Reads.TEAMS, Reads.ARRIVAL_ORDER}
"""Inputs that stay as they are while jobs train: the last shares hold until jobs or GPUs come or go."""


@dataclasses.dataclass(slots=True, kw_only=True)
class SimulatedGang(ActiveJob):
    """A job of a simulation, as decisions see it."""

    def as_cluster_job(self, now: float) -> ClusterJob:
        """The job at ``now``, on the clock."""
        raise NotImplementedError


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
    ) -> None:
        self.state, self._policy, self._began = state, policy, began
        self._memory = Memory(next_at=None if first_round_ends is None else began + first_round_ends)
        self._constant = find_policy(policy.objective).reads <= CONSTANT
        self._solved: tuple[tuple[object, ...], Allocation] | None = None
        self.solve_seconds: list[float] = []
        self.last: Decision | None = None

    def __call__(self, present: Mapping[str, Gang], now: float) -> Answer:
        """Who runs where from ``now`` on.

        Raises:
            ProblemError: the policy cannot be used on what is there.
        """
        self.state = dataclasses.replace(
            self.state, jobs=tuple(one.as_cluster_job(now) for one in present.values())
        )
        moment = self._began + now
        if self._memory.next_at is not None and moment >= self._memory.next_at and not self._constant:
            self._solved = None
        self.last = decide(self.state, self._memory, self._policy, now=moment, solve=self._solve)
        self._memory = self.last.memory
        self._check(now)
        assert self._memory.next_at is not None
        return Answer(round=self.last.round, until=self._memory.next_at - self._began)

    def _solve(self, request: SolveRequest) -> Allocation:
        if self._solved is None or self._solved[0] != request.structure:
            name, agnostic = self._policy.objective, self._policy.heterogeneity_agnostic
            self._solved = request.structure, allocate(name, request.problem, agnostic=agnostic)
            self.solve_seconds.append(self._solved[1].solve_seconds)
        return self._solved[1]

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
    gpus = Counter[str]()
    for node in nodes:
        gpus[node.gpu_type] += node.gpus
    prices = prices or {}
    return ClusterState(
        capacity=Capacity(
            gpu_types=tuple(gpus),
            nodes=nodes,
            prices=prices,
            pools=tuple(
                PricedPool(pool=kind, gpu_type=kind, price=prices.get(kind, 0.0), gpus=count)
                for kind, count in gpus.items()
            ),
        ),
        jobs=(),
    )
