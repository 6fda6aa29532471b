"""A whole decision: from the cluster's state to a round, by one policy.

:func:`decide` is the door for whoever has the solver at hand (simulations, forecasts). Where the problem is
solved elsewhere, as in the operator's solver process, its two halves are called around that:
:func:`build_problem` says what the policy is asked, :func:`apply_allocation` makes a round of the answer.
:func:`~ballast_policies.scheduling.assignments.assign` says what a decision wants of each job, and why.
Both are pure: what a decision has to know of earlier ones is a value (:class:`Memory`) that goes in and
comes out.

Grants of the last decision whose gangs have not started yet stay valid until the round ends. A round takes
GPUs from some gangs for others. Until the former have saved and stopped, the latter hold nothing, and each
pod that ends asks for a decision. If that were made from the observed placements alone, a waiting gang could
lose its grant to one that is slightly more urgent, and both would pay for a start. Within a round a grant
therefore counts as held, and a gang that has to stop counts as stopped.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping

from ballast_policies.allocation.fairness.teams import parts
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policies.isolated import isolated_speeds as speeds_on_isolated_shares
from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.price_classes import PriceClasses
from ballast_policies.allocation.problem import Allocation, Entity, Problem
from ballast_policies.allocation.registry import allocate, find_policy
from ballast_policies.rounds.decide import decide_round
from ballast_policies.rounds.divisions import with_mixtures
from ballast_policies.rounds.ledger import in_whole_pods
from ballast_policies.rounds.memory import RoundMemory
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, Round, RoundSettings, RoundState
from ballast_policies.scheduling.deadlines import deadline_choices, sized_for_deadlines
from ballast_policies.scheduling.inputs import (
    CompletedProblem,
    complete,
    price_classes,
    structure,
    values,
)
from ballast_policies.scheduling.state import ClusterJob, ClusterState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The grants of the last decision; each holds for one launch of its job.

    Attributes:
        granted: job -> (where, for which launch).
        leaving: running job that has to stop -> its launch.
        shrunk: running job that becomes smaller -> (where it will be, where it was, its launch).
        reasons: job -> (where, why).
    """

    granted: Mapping[str, tuple[Placement, int]] = dataclasses.field(default_factory=dict)
    leaving: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shrunk: Mapping[str, tuple[Placement, Placement, int]] = dataclasses.field(default_factory=dict)
    reasons: Mapping[str, tuple[Placement, str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, decided: Round, state: ClusterState) -> "Grants":
        """Jobs of ``state`` that a decision starts and those that it stops."""
        running = {job.name: job for job in state.jobs if job.placement is not None}
        launches = {job.name: job.launches for job in state.jobs}
        staying = {name for name, job in running.items() if job.stays(decided.placements.get(name))}
        shrunk = {}
        for name in staying:
            before, after = running[name].placement, decided.placements[name]
            if before is not None and len(after.nodes) < len(before.nodes):
                shrunk[name] = after, before, launches[name]
        return cls(
            granted={
                name: (placement, launches[name])
                for name, placement in decided.placements.items()
                if name not in staying
            },
            leaving={name: launches[name] for name in running if name not in staying},
            shrunk=shrunk,
            reasons={name: (at, decided.reasons[name]) for name, at in decided.placements.items()},
        )

    def explain(self, decided: Round) -> Round:
        """``decided`` within a round, with the reasons of the decision that made each placement."""
        words = {
            job: reason
            for job, (placement, reason) in self.reasons.items()
            if decided.placements.get(job) == placement
        }
        return dataclasses.replace(decided, reasons={**decided.reasons, **words})

    def effective_placements(
        self, state: ClusterState, *, now: float
    ) -> tuple[Mapping[str, Placement], Mapping[str, float], frozenset[str]]:
        """The state's gangs as the last decision placed them; a job launched since then as observed."""
        running, since, pending = {}, {}, set()
        nodes = {node.name: node for node in state.capacity.nodes}
        for job in state.jobs:
            granted = self.granted.get(job.name)
            if job.placement is not None and self.leaving.get(job.name) != job.launches:
                running[job.name], since[job.name] = self._as_asked(job, job.placement), job.running_since
            elif granted is not None and granted[1] == job.launches and _open(granted[0], job, nodes):
                running[job.name], since[job.name] = granted[0], now
                pending.add(job.name)
        return running, since, frozenset(pending)

    def _as_asked(self, job: ClusterJob, placement: Placement) -> Placement:
        """Placement of the job once it has shrunk as the last decision asks."""
        asked = self.shrunk.get(job.name)
        return asked[0] if asked is not None and asked[1:] == (placement, job.launches) else placement


def _open(placement: Placement, job: ClusterJob, nodes: Mapping[str, Node]) -> bool:
    """True if the job may still be started there: a node may have a new taint or pool, its pods another."""
    there = [nodes[name] for name in placement.nodes if name in nodes]
    pools = {name: pool for pool, names in placement.nodes_by_pool.items() for name in names}
    barred = any(
        node.closed or node.taints in job.asks.barred or node.pool != pools[node.name] for node in there
    )
    return not barred and in_whole_pods(placement.nodes, job.asks.per_pod)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SchedulingPolicy:
    """Policy by which is decided.

    Attributes:
        objective: name of the allocation policy.
        heterogeneity_agnostic: it takes all GPU types for equally fast.
        teams: team -> its weight, policy and parent; empty: each job's entity is one.
        min_run_seconds, max_moves_per_hour: what holds gangs in place.
        dry_run: nothing that is decided is carried out.
        version: another one where anything in it has changed.
    """

    objective: str
    heterogeneity_agnostic: bool = False
    teams: Mapping[str, Entity] = dataclasses.field(default_factory=dict)
    round_seconds: float = 360.0
    min_run_seconds: float = 0.0
    max_moves_per_hour: int | None = None
    dry_run: bool = False
    name: str = ""
    version: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Memory of earlier decisions.

    Attributes:
        next_at: when the round ends, epoch seconds; None: there was no decision yet.
        accounts: what jobs were promised and have received; None: there was no decision yet.
        grants: of the last decision.
    """

    next_at: float | None = None
    decisions: int = 0
    accounts: RoundMemory | None = None
    grants: Grants = dataclasses.field(default_factory=Grants)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SolveRequest:
    """Problem that a policy is to solve.

    Attributes:
        inputs: the state's problem by GPU type, with the defaults that complete it.
        classes: the columns of the problem that is solved.
        objective: by which policy.
        structure: with ``values`` equal where an earlier answer still holds; see :mod:`.inputs`.
    """

    inputs: CompletedProblem
    classes: PriceClasses
    problem: Problem
    objective: str
    structure: tuple[object, ...]

    @functools.cached_property
    def values(self) -> list[list[object]]:
        """Values that the policy reads."""
        return values(self.objective, self.problem)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """A decision; it is in force once its memory is handed to the next.

    Attributes:
        round: who is to run where.
        inputs: what the policy was asked by GPU type, with the defaults in it.
        allocation: its shares, by GPU type.
        plan_id: name of this one.
        within_round: a round had begun before.
        dry_run: nothing of it is carried out.
    """

    round: Round
    inputs: CompletedProblem
    allocation: Allocation
    memory: Memory
    plan_id: str
    within_round: bool
    dry_run: bool = False


Solve = Callable[[SolveRequest], Allocation]
"""The answer to a request, over its columns."""


def decide(
    state: ClusterState,
    memory: Memory,
    policy: SchedulingPolicy,
    *,
    now: float,
    solve: Solve | None = None,
) -> Decision:
    """The decision at ``now`` (epoch seconds), at the start of a round or within one.

    ``solve``: None: :func:`~ballast_policies.allocation.registry.allocate`.

    Raises:
        ProblemError: the policy cannot be used on the state.
    """
    request = build_problem(state, policy, now=now)
    if solve is None:
        found = allocate(policy.objective, request.problem, agnostic=policy.heterogeneity_agnostic)
    else:
        found = solve(request)
    return apply_allocation(state, memory, policy, request, found, now=now)


def build_problem(state: ClusterState, policy: SchedulingPolicy, *, now: float) -> SolveRequest:
    """Problem for the policy: the state's, completed, over the columns that it tells apart.

    Raises:
        ProblemError: there is no such policy.
    """
    inputs = complete(policy.objective, policy.teams, state.problem, state.unmeasured)
    by_price = Reads.PRICES in find_policy(policy.objective).reads
    besides = {job.name: job.usd_per_step for job in state.jobs if by_price and job.usd_per_step}
    closed = {job.name: job.closed_pools for job in state.jobs if job.closed_pools}
    prices = inputs.problem.prices if by_price else None
    classes = price_classes(state, prices, closed, by_region=bool(besides))
    sized = sized_for_deadlines(state, policy.objective, inputs.problem)
    mixtures = with_mixtures(sized, state.mixed, policy.objective, agnostic=policy.heterogeneity_agnostic)
    problem = classes.split(mixtures, closed, besides)
    return SolveRequest(
        inputs=inputs,
        classes=classes,
        problem=problem,
        objective=policy.objective,
        structure=(policy.version, *structure(policy.objective, problem, state.unmeasured, now=now)),
    )


def apply_allocation(
    state: ClusterState,
    memory: Memory,
    policy: SchedulingPolicy,
    request: SolveRequest,
    allocation: Allocation,
    *,
    now: float,
) -> Decision:
    """The round of an answer to ``request``. ``allocation``: over the request's columns."""
    length, classes = policy.round_seconds, request.classes
    choices = deadline_choices(
        state, policy.objective, request.inputs.problem, allocation, round_seconds=length, now=now
    )
    allocation = choices.applied(allocation, classes.of_pool)
    accounts = _accounts(state, memory, allocation, classes, now, length)
    # A fresh memory starts in the middle of a round: a start of the operator alone moves no gang.
    at_boundary = memory.next_at is not None and now >= memory.next_at
    next_at = now + length if memory.next_at is None else memory.next_at
    if at_boundary:
        # On the grid: a decision that comes late does not delay the rounds after it.
        next_at += length * (1 + (now - next_at) // length)
    next_at = min(next_at, now + length)  # rounds may have become shorter since
    running, since, pending = state.running, state.running_since, frozenset[str]()
    if not at_boundary:
        running, since, pending = memory.grants.effective_placements(state, now=now)
    decided = decide_round(
        Question(
            nodes=state.capacity.nodes,
            now=now,
            shares=allocation.allocation,
            jobs=state.problem.jobs,
            state=RoundState(
                received=accounts.received,
                promised=accounts.promised,
                running=running,
                running_since=since,
                trains_from=state.trains_from,
                moves=accounts.moves,
            ),
            settings=RoundSettings(
                round_seconds=length,
                min_run_seconds=policy.min_run_seconds,
                max_moves_per_hour=policy.max_moves_per_hour,
                within_round=not at_boundary,
            ),
            elastic=choices.sized({job.name: job.elastic for job in state.jobs if job.elastic is not None}),
            mixed={name: gang for name, gang in state.mixed.items() if name not in choices.shares},
            spread={job.name: job.spread for job in state.jobs if job.spread is not None},
            shared=state.shared,
            spot=state.spot,
            surplus=find_policy(policy.objective).surplus,
            tenants={job.name: job.tenant for job in state.jobs if job.tenant in state.tenants.gpus},
            room=state.tenants.gpus,
            pending=pending,
            asks=choices.barred(state.asks),
            columns=classes.of_pool,
            parts=_team_parts(policy.objective, request.inputs.problem),
        )
    )
    decided = choices.explain(decided)
    if not at_boundary:
        decided = memory.grants.explain(decided)
    return Decision(
        round=decided,
        inputs=request.inputs,
        allocation=classes.merge(allocation),
        memory=Memory(
            next_at=next_at,
            decisions=memory.decisions + 1,
            accounts=accounts if policy.dry_run else accounts.with_moves(decided, now),
            grants=Grants.of(decided, state),
        ),
        plan_id=f"{policy.name[:200]}-{int(now)}-{memory.decisions + 1}",
        within_round=not at_boundary,
        dry_run=policy.dry_run,
    )


def isolated_speeds(
    state: ClusterState, problem: Problem, running: Mapping[str, Placement]
) -> dict[str, float]:
    """Running job -> steps/s on its isolated share / steps/s on the GPUs that it has; 0: not known.

    A ratio, because a job's measured speed is worth more than any estimate of it.
    """
    if not running:
        return {}
    posed = instance(with_mixtures(problem, state.mixed, "isolated"))
    found = {}
    for job, rate in zip(state.jobs, speeds_on_isolated_shares(posed).tolist(), strict=True):
        placement = running.get(job.name)
        if placement is not None:
            here = job.speed(placement)
            found[job.name] = rate / here if here > 0 else 0.0
    return found


def _accounts(
    state: ClusterState,
    memory: Memory,
    allocation: Allocation,
    classes: PriceClasses,
    now: float,
    round_seconds: float,
) -> RoundMemory:
    """Accounts of the time that jobs were promised and have received until now."""
    shares, running, columns = allocation.allocation, state.running, classes.of_pool
    if memory.accounts is None:
        fresh = RoundMemory.from_running(running, state.running_since, shares, now=now, columns=columns)
        return dataclasses.replace(fresh, gpu_types=classes.split_columns)
    known = memory.accounts.over_columns(classes.gpu_type, classes.gpus)
    return known.until(
        now,
        shares,
        running=running,
        round_seconds=round_seconds,
        columns=columns,
        speeds={job.name: job.beside_speed for job in state.jobs if job.beside_speed != 1.0},
    )


def _team_parts(objective: str, problem: Problem) -> Mapping[str, float] | None:
    """Job -> its team's part of the cluster, by a policy that reads teams; None: it does not."""
    if Reads.TEAMS not in find_policy(objective).reads:
        return None
    return dict(zip((job.name for job in problem.jobs), parts(instance(problem)).tolist(), strict=True))
