"""A row of the table of policies: solution, objective, inputs and guarantees of one policy."""

import dataclasses
import enum
from collections.abc import Callable

import numpy as np

from ballast_policies.allocation.answer import Answer
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.problem import WarmStart


class Reads(enum.StrEnum):
    """Inputs that a policy may read beyond throughputs, gangs and weights; each has a default."""

    PRICES = "prices"
    """The price of each GPU type."""
    TEAMS = "entity"
    """The team of each job, and the teams' weights."""
    STEPS = "steps_remaining"
    """Steps left of each job."""
    ARRIVAL_ORDER = "arrival order"
    """Which job came first."""
    ELAPSED = "elapsed"
    """Seconds since each job's arrival."""
    ISOLATED_ELAPSED = "isolated_elapsed"
    """Seconds that each job's progress would have taken on its isolated share."""
    DEADLINES = "deadline"
    """Seconds until each job should be done."""
    BUDGETS = "budget"
    """What the rest of each job, and of all jobs together, may cost."""


CLOCK = (Reads.ELAPSED, Reads.ISOLATED_ELAPSED, Reads.DEADLINES)
"""Inputs that change with time, even where no job has made a step."""


class SpaceSharing(enum.StrEnum):
    """Whether pairs of jobs on the same GPUs are used."""

    ALLOWED = "yes"
    """Used where asked for."""
    NEVER = "no"
    """Not defined for the policy: pairs are left out."""
    ALWAYS = "always"
    """Required: without sharing it would be another policy."""


class Surplus(enum.StrEnum):
    """Which elastic gang gets the GPUs that are left when every gang that runs has its least size."""

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
        solve_from: (instance, start of a similar instance's answer) -> answer, sooner than ``solve`` on
            large instances; None: every instance is solved from scratch.
        reads: inputs that it reads beyond throughputs, gangs and weights.
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
    solve_from: Callable[[Instance, WarmStart], Answer] | None = None
    reads: frozenset[Reads] = frozenset()
    compares_speeds: bool = False
    space_sharing: SpaceSharing = SpaceSharing.ALLOWED
    surplus: Surplus = Surplus.LEVEL
    spreads_when_agnostic: bool = False
    names_unmet_deadlines: bool = False
    takes_configurations: bool = False
    proves_gap: bool = True
    imports: tuple[str, ...] = ()

    @property
    def reads_clock(self) -> tuple[Reads, ...]:
        """The inputs that it reads and that change with time."""
        return tuple(field for field in CLOCK if field in self.reads)
