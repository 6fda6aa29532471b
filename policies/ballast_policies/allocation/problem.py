"""The allocation problem and its answer, as values.

Used by the operator's allocator, the simulator and ``ballast allocate``.  Units: throughput in
steps per second of the whole gang; times in seconds; capacity in GPUs; prices in USD per GPU hour.

A fixed job has a configuration for each GPU type; an elastic job has several sizes, and may mix types.
"""

import dataclasses
import math
import operator
from collections import Counter
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract import errors as contract


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Configuration:
    """GPUs and speed of one way to run a job.

    Attributes:
        name: unique among the job's configurations.
        gpus: GPU type -> GPUs, whole numbers; at least one GPU in all. A type with 0 is as one left out.
        throughput: steps (or other units of work) per second of the whole gang; 0: it cannot run so.
        usd_per_step: what a step costs besides the GPUs, e.g. to read its data from another region.

    Raises:
        contract.ContractError: a value is impossible; paths are relative to the configuration.
    """

    name: str
    gpus: Mapping[str, int]
    throughput: float
    usd_per_step: float = 0.0

    def __post_init__(self) -> None:
        problems = [
            contract.Problem(f"gpus.{gpu_type}", f"{count} is not a whole number of GPUs, 0 or more")
            for gpu_type, count in self.gpus.items()
            if not (count >= 0 and count == int(count))
        ]
        if not problems and not any(self.gpus.values()):
            problems.append(contract.Problem("gpus", "there is no GPU. To fix: give at least one"))
        for field, value in (("throughput", self.throughput), ("usd_per_step", self.usd_per_step)):
            if not (value >= 0 and math.isfinite(value)):
                problems.append(contract.Problem(field, f"{value} must be at least 0 and finite"))
        if not self.name:
            problems.append(contract.Problem("name", "expected a text, got ''"))
        if problems:
            raise contract.ContractError(problems)

    def __hash__(self) -> int:
        return hash((self.name, self.throughput))

    @classmethod
    def of_one_type(cls, gpu_type: str, gpus: int, throughput: float) -> "Configuration":
        """``gpus`` GPUs of one type, named by type and number."""
        return cls(name=f"{gpus} x {gpu_type}", gpus={gpu_type: gpus}, throughput=throughput)

    @property
    def total(self) -> int:
        """GPUs of all types."""
        return sum(self.gpus.values())

    def fits(self, capacity: Mapping[str, int]) -> bool:
        """True if there are enough GPUs of each type for the gang alone."""
        return all(count <= capacity.get(gpu_type, 0) for gpu_type, count in self.gpus.items() if count)


ENTITY_POLICIES = ("fairness", "fifo")
"""Ways in which an entity may divide its share among its members."""

MOST_ABOVE = 100
"""Entities above an entity: the policies go through them level by level."""


class ProblemError(ValueError):
    """The problem is not valid; the text names the field, the value and the reason."""


def _at_least_zero(field: str, value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ProblemError(f"{field}: {value} must be at least 0 and finite")


def _positive(field: str, value: float) -> None:
    if not (value > 0 and math.isfinite(value)):
        raise ProblemError(f"{field}: {value} must be positive and finite")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job that requests GPUs.

    Attributes:
        name: unique in the problem.
        throughput: GPU type -> steps per second of the whole gang; missing or 0: it cannot run there.
        configurations: of an elastic job, in place of ``throughput`` and ``gpus``; () for a gang of one size.
        weight: share relative to other jobs, > 0.
        entity: the team it belongs to, for hierarchical policies.
        user: of the team, who has a share of it where it shares by users; those that say none are one.
        steps_remaining: steps still to do; None: unknown, an hour's worth on its fastest type counts.
        elapsed: seconds since it arrived.
        isolated_elapsed: seconds that the same progress would have taken on its isolated share.
        deadline: seconds from now until it should be done; None: no deadline.
        budget: USD that its remaining steps may cost; None: no limit.
        usd_per_step: GPU type -> what a step there costs besides the GPUs, e.g. to read its data from another
            region; of a job with configurations they state it.

    Raises:
        ProblemError: a value is impossible.
    """

    name: str
    throughput: Mapping[str, float] = dataclasses.field(default_factory=dict)
    gpus: int = 1
    configurations: tuple[Configuration, ...] = ()
    weight: float = 1.0
    entity: str | None = None
    user: str = ""
    steps_remaining: float | None = None
    elapsed: float = 0.0
    isolated_elapsed: float = 0.0
    deadline: float | None = None
    budget: float | None = None
    usd_per_step: Mapping[str, float] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        where = f"jobs[{self.name}]"
        if self.gpus < 1 or self.gpus != int(self.gpus):
            raise ProblemError(f"{where}.gpus: {self.gpus} is not a positive whole number of GPUs")
        if self.configurations:
            self._check_configurations(where)
        _positive(f"{where}.weight", self.weight)
        for gpu_type, rate in self.throughput.items():
            _at_least_zero(f"{where}.throughput.{gpu_type}", rate)
        for gpu_type, usd in self.usd_per_step.items():
            _at_least_zero(f"{where}.usd_per_step.{gpu_type}", usd)
        for field in ("steps_remaining", "elapsed", "isolated_elapsed", "budget"):
            value = getattr(self, field)
            if value is not None:
                _at_least_zero(f"{where}.{field}", value)
        if self.deadline is not None and not math.isfinite(self.deadline):
            raise ProblemError(f"{where}.deadline: {self.deadline} must be finite. To fix: leave it out")

    # As dataclasses do it, without a look at each field: a decision sends thousands of jobs to the solver.
    def __getstate__(self) -> tuple[Any, ...]:
        state: tuple[Any, ...] = _STATE(self)
        return state

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        for name, value in zip(_FIELDS, state, strict=True):
            object.__setattr__(self, name, value)

    def _check_configurations(self, where: str) -> None:
        if self.throughput or self.gpus != 1:
            raise ProblemError(
                f"{where}.configurations: they state GPUs and speed. To fix: leave out throughput and gpus"
            )
        _refuse_repeated(f"{where}.configurations", [each.name for each in self.configurations])


_FIELDS = tuple(field.name for field in dataclasses.fields(Job))
_STATE = operator.attrgetter(*_FIELDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two jobs on the same GPUs at the same time: GPU type -> (steps/s of the first, of the second)."""

    jobs: tuple[str, str]
    throughput: Mapping[str, tuple[float, float]]

    def __post_init__(self) -> None:
        where = f"pairs[{'+'.join(self.jobs)}]"
        if self.jobs[0] == self.jobs[1]:
            raise ProblemError(f"{where}.jobs: a job cannot share GPUs with itself")
        for gpu_type, rates in self.throughput.items():
            for rate in rates:
                _at_least_zero(f"{where}.throughput.{gpu_type}", rate)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """A team: its weight, how its share is divided inside (``fairness`` or ``fifo``), its own parent team.

    Attributes:
        by_user: its share is divided equally between its users, and by ``policy`` between the jobs of each.
    """

    weight: float = 1.0
    policy: str = "fairness"
    parent: str | None = None
    by_user: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Jobs over GPU types.

    A job's throughput may name types that are not in ``gpu_types``; they are ignored, and so are
    configurations that take GPUs of such a type.
    ``budget``: USD that the remaining steps of all jobs together may cost; None: no limit.
    A job that belongs to no entity stands beside the entities, with its own weight.

    Raises:
        ProblemError: names repeat or are unknown, or a value is impossible.
    """

    gpu_types: tuple[str, ...]
    capacity: Mapping[str, int]
    jobs: tuple[Job, ...]
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    entities: Mapping[str, Entity] = dataclasses.field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()
    budget: float | None = None

    def __post_init__(self) -> None:
        _refuse_repeated("gpu_types", self.gpu_types)
        _refuse_repeated("jobs", [job.name for job in self.jobs])
        for gpu_type, gpus in self.capacity.items():
            if gpu_type not in self.gpu_types:
                raise ProblemError(f"capacity.{gpu_type}: not one of gpu_types {list(self.gpu_types)}")
            _at_least_zero(f"capacity.{gpu_type}", gpus)
        for gpu_type, price in self.prices.items():
            _at_least_zero(f"prices.{gpu_type}", price)
        if self.budget is not None:
            _at_least_zero("budget", self.budget)
        self._check_entities()
        if self.pairs:
            self._check_pairs()

    def _check_entities(self) -> None:
        for name, entity in self.entities.items():
            _positive(f"entities.{name}.weight", entity.weight)
            if entity.policy not in ENTITY_POLICIES:
                raise ProblemError(
                    f"entities.{name}.policy: {entity.policy!r} is not one of {', '.join(ENTITY_POLICIES)}"
                )
            above, seen = entity.parent, {name}
            while above is not None:
                if above not in self.entities:
                    raise ProblemError(f"entities.{name}.parent: {above!r} is not one of the entities")
                if above in seen:
                    raise ProblemError(f"entities.{name}.parent: {entity.parent!r} leads back to {above!r}")
                seen.add(above)
                if len(seen) > MOST_ABOVE + 1:
                    raise ProblemError(
                        f"entities.{name}.parent: over {MOST_ABOVE} entities above it. To fix: fewer levels"
                    )
                above = self.entities[above].parent
        for job in self.jobs:
            if job.entity is not None and self.entities and job.entity not in self.entities:
                raise ProblemError(f"jobs[{job.name}].entity: {job.entity!r} is not one of the entities")

    def _check_pairs(self) -> None:
        gangs = {job.name: job.gpus for job in self.jobs}
        elastic = {job.name for job in self.jobs if job.configurations}
        seen = set()
        for pair in self.pairs:
            first, second = pair.jobs
            where = f"pairs[{first}+{second}].jobs"
            for name in pair.jobs:
                if name not in gangs:
                    raise ProblemError(f"{where}: {name!r} is not one of the jobs")
                if name in elastic:
                    raise ProblemError(
                        f"{where}: {name!r} has configurations, and only gangs of one size share GPUs. "
                        "To fix: leave the pair out, or give the job throughput and gpus"
                    )
            if gangs[first] != gangs[second]:
                raise ProblemError(
                    f"{where}: gangs of {gangs[first]} and {gangs[second]} GPUs cannot share them"
                )
            key = (first, second) if first < second else (second, first)
            if key in seen:
                raise ProblemError(f"{where}: the pair is given more than once")
            seen.add(key)


def _refuse_repeated(field: str, names: "tuple[str, ...] | list[str]") -> None:
    if len(set(names)) < len(names):
        repeated = sorted(name for name, times in Counter(names).items() if times > 1)
        raise ProblemError(f"{field}: the names {repeated} are used more than once")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """The share of time of each job on each GPU type, with objective, bound and prices.

    Attributes:
        policy: name of the policy that made it.
        objective: value of the policy's objective, in the policy's unit, with the real throughputs.
        allocation: job -> GPU type -> fraction of time alone on it, 0 to 1; of a job with configurations,
            job -> name of the configuration -> fraction of time.
        pair_allocation: "a+b" -> GPU type -> fraction of time that the two share GPUs.
        throughput: job -> effective steps per second.
        levels: job -> gpus x throughput / (weight x throughput of the equal share); of a job with
            configurations as in ``Instance.level_scale``.
        status: ``optimal``; ``closed form`` or ``heuristic`` for policies that optimise nothing or not
            exactly; ``uncertified``: reported optimal by its solver, without a bound;
            ``greedy``: the fallback; ``gap``: the bound is not met to 1e-6.
        gap: relative gap between the objective and a proven bound; None: no bound.
        solve_seconds: wall time of the solve.
        solver: name of the method or solver.
        shadow_prices: GPU type -> increase of the objective per additional GPU; empty where unknown.
        unmet_deadlines: jobs whose deadline cannot be met, by policies that keep deadlines.
        fallbacks: a line for each method that found no answer: why, and which method answered instead.
    """

    policy: str
    objective: float
    allocation: Mapping[str, Mapping[str, float]]
    pair_allocation: Mapping[str, Mapping[str, float]]
    throughput: Mapping[str, float]
    levels: Mapping[str, float]
    status: str
    gap: float | None
    solve_seconds: float
    solver: str
    shadow_prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    unmet_deadlines: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
