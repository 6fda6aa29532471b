"""The allocation problem and its answer, as values.

Who calls it: the operator's allocator, the simulator, ``ballast allocate``.  Units: throughput in
steps per second of the whole gang; times in seconds; capacity in GPUs; prices in USD per GPU hour.
"""

import dataclasses
import math
from collections.abc import Mapping


class ProblemError(ValueError):
    """The problem cannot be posed; the text names the field, the value and the reason."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One job that wants GPUs.

    Attributes:
        name: unique in the problem.
        throughput: GPU type -> steps per second of the whole gang; missing or 0: it cannot run there.
        gpus: size of the gang.
        weight: share relative to other jobs, > 0.
        entity: the team it belongs to, for hierarchical policies.
        steps_remaining: steps still to do; None: unknown.
        elapsed: seconds since it arrived.
        isolated_elapsed: seconds that the same progress would have taken on its isolated share.
        deadline: seconds from now until it should be done; None: no deadline.
    """

    name: str
    throughput: Mapping[str, float]
    gpus: int = 1
    weight: float = 1.0
    entity: str | None = None
    steps_remaining: float | None = None
    elapsed: float = 0.0
    isolated_elapsed: float = 0.0
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.gpus < 1:
            raise ProblemError(f"jobs[{self.name}].gpus: {self.gpus} is not a positive number of GPUs")
        if not (self.weight > 0 and math.isfinite(self.weight)):
            raise ProblemError(f"jobs[{self.name}].weight: {self.weight} must be positive and finite")
        for gpu_type, rate in self.throughput.items():
            if not (rate >= 0 and math.isfinite(rate)):
                raise ProblemError(f"jobs[{self.name}].throughput.{gpu_type}: {rate} must be at least 0")
        for field in ("steps_remaining", "elapsed", "isolated_elapsed"):
            value = getattr(self, field)
            if value is not None and not (value >= 0 and math.isfinite(value)):
                raise ProblemError(f"jobs[{self.name}].{field}: {value} must be at least 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """Two jobs on the same GPUs at the same time: GPU type -> (steps/s of the first, of the second)."""

    jobs: tuple[str, str]
    throughput: Mapping[str, tuple[float, float]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entity:
    """A team: its weight, and how its share is divided inside (``fairness`` or ``fifo``)."""

    weight: float = 1.0
    policy: str = "fairness"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """Jobs over GPU types.

    Raises:
        ProblemError: names repeat, or a value is impossible.
    """

    gpu_types: tuple[str, ...]
    capacity: Mapping[str, int]
    jobs: tuple[Job, ...]
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    entities: Mapping[str, Entity] = dataclasses.field(default_factory=dict)
    pairs: tuple[Pair, ...] = ()

    def __post_init__(self) -> None:
        names = [job.name for job in self.jobs]
        repeated = (
            sorted({name for name in names if names.count(name) > 1}) if len(set(names)) < len(names) else []
        )
        if repeated:
            raise ProblemError(f"jobs: the names {repeated} are used more than once")
        for gpu_type in self.gpu_types:
            if self.capacity.get(gpu_type, 0) < 0:
                raise ProblemError(f"capacity.{gpu_type}: {self.capacity[gpu_type]} must be at least 0")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Allocation:
    """Who gets which share of time on which GPU type.

    Attributes:
        policy: name of the policy that made it.
        objective: value of the policy's objective, in the policy's unit.
        allocation: job -> GPU type -> fraction of time, 0 to 1.
        pair_allocation: "a+b" -> GPU type -> fraction of time that the two share GPUs.
        throughput: job -> effective steps per second.
        levels: job -> gpus x throughput / (weight x throughput of the equal share).
        status: ``optimal``, ``greedy``, or why it is not optimal.
        gap: relative gap between the objective and a proven bound; None: no bound.
        solve_seconds: wall time of the solve.
        solver: what solved it.
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
