"""A policy's answer on an instance, and its conversion to an Allocation."""

import dataclasses
from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.problem import Allocation, WarmStart

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
        start: for a similar instance; None: this policy has none, or the instance was small.
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
    start: WarmStart | None = None


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
        start=answer.start,
    )
