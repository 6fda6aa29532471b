"""The table of methods: which code solves a program, by its size and kind, and what answers where it cannot.

Every place that chooses between two methods asks :func:`choose`. A method that finds no answer says which one
answers instead (:func:`fell_back`), and the policy's answer lists it (``Answer.fallbacks``). A method stands
here because a limit of ``benchmarks/allocation/families.py`` is missed without it.
"""

import dataclasses
import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

LARGE = 1000
"""Rows from which on the search for prices is faster than the simplex method."""
LARGE_ELASTIC = 100
"""The same where a job has configurations: it has many columns."""
MANY_PAIRS = 3000
"""Pairs from which on a few of each job are enough to begin with."""
STAGES = 100
"""Jobs from which on a stage for each GPU type is faster than a linear program for each level."""
EXACT_PARTS = 50_000
"""Programs without one kind of job, times their columns, up to which each is solved: about a second."""
CONES = 2500
"""Kinds of jobs up to which their fair shares are one cone program."""
HUNGARIAN = 1000
"""Jobs up to which the Hungarian method matches them."""
JOBS_PER_PLACE = 12
"""Jobs for each place in a queue from which on prices of the places are fine enough to be exact."""


class Task(enum.StrEnum):
    """Kind of problem to solve."""

    PROGRAM = "linear program"
    FILLING = "water filling"
    FAIR_SHARES = "fair shares (`strategy-proof`)"
    PARTS = "parts that jobs keep (`strategy-proof`)"
    QUEUES = "places in queues (`allox`)"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Size of a program or an instance.

    Attributes:
        rows: jobs, or kinds of jobs where like ones count as one.
        columns: of all programs together.
        pairs: columns on which two jobs share GPUs.
        elastic: some jobs have configurations.
        places: in all queues.
    """

    rows: int
    columns: int = 0
    pairs: int = 0
    elastic: bool = False
    places: int = 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Method:
    """A row of the table.

    Attributes:
        code: its module, below ``ballast_policies.allocation``.
        when: the sizes that it is chosen for, in words.
        applies: whether it is chosen for a size. The first row of the task that applies is. Left out: always.
        otherwise: name of the method that answers where it finds nothing; None: the policy fails.
        without: CPU seconds of the task without it; empty: it is the exact method, or the one that is left.
    """

    name: str
    task: Task
    code: str
    when: str
    applies: Callable[[Size], bool] = lambda size: True
    otherwise: str | None = None
    without: str = ""


PAIRS = Method(
    name="column generation",
    task=Task.PROGRAM,
    code="solvers.linear",
    when=f"{MANY_PAIRS:,} pairs and more",
    applies=lambda size: size.pairs >= MANY_PAIRS,
    without="space sharing of 256 distinct jobs 11 s, with it 0.5 s (`growth.py`)",
)
PRICES = Method(
    name="prices",
    task=Task.PROGRAM,
    code="solvers.boxstep",
    when=f"no pairs, {LARGE:,} rows and more; {LARGE_ELASTIC} where jobs are elastic",
    applies=lambda size: not size.pairs and size.rows >= (LARGE_ELASTIC if size.elastic else LARGE),
    otherwise="simplex",
    without="`max-min-fairness` of 10,000 jobs over 40 s, with it 0.3 s",
)
SIMPLEX = Method(
    name="simplex",
    task=Task.PROGRAM,
    code="solvers.simplex",
    when="any other",
)
BY_TYPES = Method(
    name="a stage for each GPU type",
    task=Task.FILLING,
    code="fairness.water_prices",
    when=f"{STAGES} jobs and more, no pairs",
    applies=lambda size: size.rows >= STAGES and not size.pairs,
    otherwise="a program for each level",
    without="1,000 jobs over 20 s, with it 10,000 in 0.2 s",
)
BY_LEVELS = Method(
    name="a program for each level",
    task=Task.FILLING,
    code="fairness.water_levels",
    when="any other",
    otherwise="a stage for each GPU type",
)
CONE = Method(
    name="cone program",
    task=Task.FAIR_SHARES,
    code="solvers.nash",
    when=f"up to {CONES:,} kinds of jobs; any number where jobs are elastic",
    applies=lambda size: size.elastic or size.rows <= CONES,
)
FAIR_PRICES = Method(
    name="fair prices",
    task=Task.FAIR_SHARES,
    code="solvers.nash",
    when="more",
    without="10,000 jobs with heavy tails over 60 s, with it 1.9 s",
)
EXACT = Method(
    name="a program without each kind",
    task=Task.PARTS,
    code="policies.strategy_proof",
    when=f"up to {EXACT_PARTS:,} columns of all programs together",
    applies=lambda size: size.columns <= EXACT_PARTS,
)
LEAST_PART = Method(
    name="the least that prices prove",
    task=Task.PARTS,
    code="policies.strategy_proof",
    when="more",
)
ASSIGNMENT = Method(
    name="Hungarian method",
    task=Task.QUEUES,
    code="solvers.queues",
    when=f"up to {HUNGARIAN:,} jobs",
    applies=lambda size: size.rows <= HUNGARIAN,
)
PLACE_PRICES = Method(
    name="prices of places",
    task=Task.QUEUES,
    code="solvers.queues",
    when=f"{JOBS_PER_PLACE} jobs and more for each place",
    applies=lambda size: size.places <= size.rows // JOBS_PER_PLACE,
    otherwise="best of several matchings",
    without="10,000 like jobs up to 1.6 % above the least total time, with it proven least",
)
MATCHINGS = Method(
    name="best of several matchings",
    task=Task.QUEUES,
    code="solvers.queues",
    when="any other",
)

METHODS: tuple[Method, ...] = (
    PAIRS,
    PRICES,
    SIMPLEX,
    BY_TYPES,
    BY_LEVELS,
    CONE,
    FAIR_PRICES,
    EXACT,
    LEAST_PART,
    ASSIGNMENT,
    PLACE_PRICES,
    MATCHINGS,
)
"""All methods, in the order in which they are asked."""


def choose(task: Task, size: Size) -> Method:
    """The method for a size: the first of the task's rows that applies."""
    return next(method for method in METHODS if method.task is task and method.applies(size))


_fallbacks: ContextVar[list[str] | None] = ContextVar("fallbacks", default=None)


@contextmanager
def fallbacks_listed() -> Iterator[list[str]]:
    """A list of the fall-backs meanwhile, each once, in the order in which they came."""
    listed: list[str] = []
    token = _fallbacks.set(listed)
    try:
        yield listed
    finally:
        _fallbacks.reset(token)


def fell_back(method: Method, reason: str, to: Method) -> None:
    """Note that ``to`` was asked after ``method``, and why."""
    listed, line = _fallbacks.get(), f"{method.name}: {reason}; then {to.name}"
    if listed is not None and line not in listed:
        listed.append(line)
