"""A row of the table of policies: solution, objective, inputs and guarantees of one; and an answer."""

import dataclasses
import enum
from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.problem import Allocation

CERTIFIED_GAP = 1e-6
"""Relative gap up to which an answer with a bound is called optimal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Answer:
    """A policy's answer on one instance.

    Attributes:
        x: (columns,) shares of time.
        solver: name of the method or solver that computed it.
        bound: proven bound on the objective (above for a maximum, below for a minimum); None: none.
        gap: relative gap, where it is not the one between the objective and ``bound``.
        objective: value of the objective; filled in when the policy has answered.
        value: instance -> value of the objective, where that is not a function of x alone.
        status: as in Allocation; a bound that is not met turns ``optimal`` into ``gap``.
        shadow_prices: (k,) increase of the objective per additional GPU; None: unknown.
        unmet_deadlines: names of jobs whose deadline cannot be met.
        fallbacks: of methods that found no answer, which method answered instead, and why; filled in with
            the objective.
    """

    x: np.ndarray
    solver: str
    bound: float | None = None
    gap: float | None = None
    objective: float | None = None
    value: Callable[[Instance], float] | None = None
    status: str = "optimal"
    shadow_prices: np.ndarray | None = None
    unmet_deadlines: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()


def nothing(instance: Instance) -> Answer:
    """The answer where no job can run."""
    return Answer(x=np.zeros(len(instance.columns)), solver="none", bound=0.0)


def relative_gap(objective: float, bound: float | None) -> float | None:
    """|bound - objective| / |bound|; None without a bound."""
    if bound is None:
        return None
    if objective == bound:
        return 0.0
    return float(abs(bound - objective) / max(abs(bound), 1e-12))


def as_allocation(
    instance: Instance,
    answer: Answer,
    *,
    policy: str,
    objective: float,
    gap: float | None,
    seconds: float,
) -> Allocation:
    """The Allocation of the answer; ``instance`` has the real throughputs."""
    types, names, columns = instance.gpu_types, instance.names, instance.columns
    X = instance.alone(answer.x)
    shares = {name: dict(zip(types, row, strict=True)) for name, row in zip(names, X.tolist(), strict=True)}
    if instance.elastic.any():
        shares |= {
            names[m]: dict.fromkeys(instance.configurations[m], 0.0)
            for m in np.flatnonzero(instance.elastic).tolist()
        }
        for c in np.flatnonzero(instance.elastic[columns.first] & (answer.x > 0)):
            m = int(columns.first[c])
            shares[names[m]][instance.configurations[m][columns.place[c]]] = float(answer.x[c])
    pairs: dict[str, dict[str, float]] = {}
    for c in np.flatnonzero((columns.second >= 0) & (answer.x > 0)):
        name = "+".join(instance.pairs[columns.pair[c]].jobs)
        pairs.setdefault(name, {})[types[columns.kind[c]]] = float(answer.x[c])
    speed = instance.throughput(answer.x)
    status = answer.status
    if status == "optimal" and gap is not None and gap > CERTIFIED_GAP:
        status = "gap"
    shadow = (
        {} if answer.shadow_prices is None else dict(zip(types, answer.shadow_prices.tolist(), strict=True))
    )
    return Allocation(
        policy=policy,
        objective=float(objective),
        allocation=shares,
        pair_allocation=pairs,
        throughput=dict(zip(names, speed.tolist(), strict=True)),
        levels=dict(zip(names, instance.levels(speed).tolist(), strict=True)),
        status=status,
        gap=gap,
        solve_seconds=seconds,
        solver=answer.solver,
        shadow_prices=shadow,
        unmet_deadlines=answer.unmet_deadlines,
        fallbacks=answer.fallbacks,
    )


class Reads(enum.StrEnum):
    """Inputs that a policy may read beyond throughputs and gangs; each has a default."""

    WEIGHTS = "weight"
    """The weight of each job."""
    PRICES = "prices"
    """The price of each GPU type."""
    TEAMS = "entity"
    """The team of each job, and the teams' weights."""
    STEPS = "steps_remaining"
    """Steps left of each job."""
    ARRIVAL_ORDER = "arrival order"
    """Order of the jobs' arrivals."""
    ELAPSED = "elapsed"
    """Seconds since each job's arrival."""
    ISOLATED_ELAPSED = "isolated_elapsed"
    """Seconds that each job's progress would have taken on its isolated share."""
    DEADLINES = "deadline"
    """Seconds until each job should be done."""
    BUDGETS = "budget"
    """Rest of the budget of each job, and of all jobs together."""


CLOCK = (Reads.ELAPSED, Reads.ISOLATED_ELAPSED, Reads.DEADLINES)
"""Inputs that change with time, even where no job has made a step."""


class SpaceSharing(enum.StrEnum):
    """Use of pairs of jobs on the same GPUs."""

    ALLOWED = "yes"
    """Used where asked for."""
    NEVER = "no"
    """Not defined for the policy: pairs are left out."""
    ALWAYS = "always"
    """Required: without sharing it would be another policy."""


class Surplus(enum.StrEnum):
    """Order in which elastic gangs get the GPUs left when every gang that runs has its least size."""

    LEVEL = "level"
    """The one that has least of what it would have on 1/n of the GPUs, by weight."""
    ARRIVAL = "arrival"
    """The one that came first."""
    SHORTEST = "shortest"
    """The one that becomes faster by the largest part a GPU, over the square root of its length."""
    LONGEST = "longest"
    """The one that would end last."""
    FINISH_TIME = "finish time"
    """The one that is delayed most against its isolated share."""
    THROUGHPUT = "throughput"
    """The one that gains the most steps per second a GPU."""
    COMPLETION_TIME = "completion time"
    """The one whose size and GPU type the choice of the least total completion time says."""
    COST = "cost"
    """None, unless its steps become no dearer, or its deadline needs them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Policy:
    """The properties of a policy; operator, command lines and documentation read it here.

    Attributes:
        summary: the problem that it solves, for the documentation.
        solve: instance -> answer.
        objective: (instance, x) -> value, in the unit that the policy's file states.
        reads: inputs that it reads beyond throughputs and gangs.
        compares_speeds: steps per second of one job are weighed against those of another, not only
            against the same job's on other GPU types.
        space_sharing: whether pairs of jobs on the same GPUs are used.
        surplus: which elastic gang grows first.
        spreads_when_agnostic: its heterogeneity-agnostic baseline divides each job's time over the GPU
            types as the cluster is made up; the baselines of the others serve whole jobs on any type.
        names_unmet_deadlines: its answer lists the deadlines that cannot be met.
        takes_configurations: jobs may have configurations; otherwise they are refused.
        proves_gap: its answer comes with a bound on the optimum; otherwise it optimises nothing, or
            not provably.
        imports: large modules that its first allocation imports. A caller that limits the time of an
            answer imports them first.
    """

    summary: str
    solve: Callable[[Instance], Answer]
    objective: Callable[[Instance, np.ndarray], float]
    reads: frozenset[Reads] = frozenset()
    compares_speeds: bool = False
    space_sharing: SpaceSharing = SpaceSharing.ALLOWED
    surplus: Surplus = Surplus.LEVEL
    spreads_when_agnostic: bool = False
    names_unmet_deadlines: bool = False
    takes_configurations: bool = False
    proves_gap: bool = True
    imports: tuple[str, ...] = ()
