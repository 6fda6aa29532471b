"""The operator's decisions on a simulated cluster: shares by the policy, then rounds."""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Generic, TypeVar

from ballast_policies.allocation.problem import Allocation, Job, Problem
from ballast_policies.allocation.registry import allocate, find_policy
from ballast_policies.rounds import (
    ElasticGang,
    Node,
    Question,
    RoundMemory,
    RoundSettings,
    RoundState,
    SizeSettings,
    SpreadGang,
    decide_round,
)
from ballast_policies.simulator.clock import LEAST_STEP, ActiveJob, Answer, SimulationError


@dataclasses.dataclass(slots=True, kw_only=True)
class SimulatedGang(ActiveJob):
    """A job of a simulation, as policies and rounds see it."""

    def as_job(self, now: float) -> Job:
        """Its speeds and progress; of an elastic one at its least size."""
        raise NotImplementedError

    def as_elastic(self, now: float) -> ElasticGang | None:
        """Its sizes; None: it has one."""
        del now
        return None

    def as_spread(self) -> SpreadGang | None:
        """Where it runs on more nodes than would hold it; None: it does not."""
        return None


Gang = TypeVar("Gang", bound=SimulatedGang)


class OperatorDecisions(Generic[Gang]):
    """One decision after the other.

    A policy is solved again when jobs have come or gone, and at the ends of rounds where it reads how far
    jobs are. Within a round free GPUs are handed out.

    Args:
        policy: as in ``ClusterPolicy.spec.objective``.
        settings: of the rounds.
        nodes: of the cluster.
        prices: GPU type -> USD a GPU hour.
        agnostic: the policy takes all GPU types for equally fast.
        first_round_ends: seconds of the clock; the others end on the grid from there on. None: a round after
            the first decision.

    Attributes:
        solve_seconds: wall time of each solve.
        begins_round: whether the last decision began a round.
    """

    def __init__(
        self,
        policy: str,
        settings: RoundSettings,
        *,
        nodes: Sequence[Node],
        prices: Mapping[str, float] | None = None,
        agnostic: bool = False,
        first_round_ends: float | None = None,
    ) -> None:
        self._policy, self._settings, self._nodes = policy, settings, tuple(nodes)
        self._prices, self._agnostic = prices or {}, agnostic
        self._capacity = Counter[str]()
        for node in nodes:
            self._capacity[node.gpu_type] += node.gpus
        self._sizes = SizeSettings(surplus=find_policy(policy).surplus)
        self._reads_progress = bool(find_policy(policy).reads)
        self._memory: RoundMemory | None = None
        self._allocation: tuple[frozenset[str], Allocation] | None = None
        self._round_ends = first_round_ends
        self.solve_seconds: list[float] = []
        self.begins_round = False

    def __call__(self, present: Mapping[str, Gang], now: float) -> Answer:
        """Who runs where from ``now`` on.

        Raises:
            ProblemError: the policy cannot be used on what is there.
        """
        length = self._settings.round_seconds
        ends = now + length if self._round_ends is None else self._round_ends
        within_round = now < ends - LEAST_STEP
        self.begins_round = self._memory is None or not within_round
        if not within_round:
            ends += length * (1 + (now - ends + LEAST_STEP) // length)
        self._round_ends = ends
        jobs = tuple(one.as_job(now) for one in present.values())
        shares = self._shares(jobs, fresh=self._reads_progress and not within_round)
        running = {name: one.placement for name, one in present.items() if one.placement is not None}
        since = {name: present[name].since for name in running}
        if self._memory is None:
            memory = RoundMemory.from_running(running, since, shares, now=now)
        else:
            memory = self._memory.of_jobs(present).until(now, shares, running=running, round_seconds=length)
        elastic = {name: one.as_elastic(now) for name, one in present.items()}
        spread = {name: present[name].as_spread() for name in running}
        decided = decide_round(
            Question(
                now=now,
                shares=shares,
                jobs=jobs,
                nodes=self._nodes,
                state=RoundState(
                    received=memory.account.received,
                    promised=memory.account.promised,
                    running=running,
                    running_since=since,
                    moves=memory.moves,
                ),
                settings=dataclasses.replace(self._settings, within_round=within_round),
                elastic={name: gang for name, gang in elastic.items() if gang is not None},
                spread={name: gang for name, gang in spread.items() if gang is not None},
                sizes=self._sizes,
            )
        )
        self._memory = memory.with_moves(decided, now)
        used = Counter(name for placed in decided.placements.values() for name in placed.nodes)
        for node in self._nodes:
            if used[node.name] > node.gpus:
                raise SimulationError(
                    f"at {now:g} s {used[node.name]} of {node.gpus} GPUs of {node.name} are given out"
                )
        return Answer(round=decided, until=ends)

    def _shares(self, jobs: tuple[Job, ...], *, fresh: bool) -> Mapping[str, Mapping[str, float]]:
        names = frozenset(job.name for job in jobs)
        if fresh or self._allocation is None or self._allocation[0] != names:
            problem = Problem(
                gpu_types=tuple(self._capacity), capacity=self._capacity, jobs=jobs, prices=self._prices
            )
            allocation = allocate(self._policy, problem, agnostic=self._agnostic)
            self._allocation = names, allocation
            self.solve_seconds.append(allocation.solve_seconds)
        return self._allocation[1].allocation
