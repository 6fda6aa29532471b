"""The fullest moments of a rank with one stage, in units of its stage's bytes (:mod:`.rank_bytes`).

At each moment of a step it has n microbatches between forward and backward, h of them between the halves of
a split backward, g = 0 or, before gradients are there, -1, and b = 1 while a layer's backward runs. So
whatever its layers, it holds the most, over some moments, of

    n kept + h gradients + g weights + b passing

Moments that are below another one in every number are left out.
"""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator

import numpy as np

from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.schedules.builders.synchronous import in_flight
from ballast_policies.planning.schedules.registry import SCHEDULES, build_schedule
from ballast_policies.planning.schedules.schedule import Kind, Schedule, ScheduleError
from ballast_policies.planning.schedules.validate import ScheduleFacts, validate

MOST_ACTIONS = 20_000
"""Ranks x microbatches x stages a rank, up to which a schedule is built to see what it holds."""

Moment = tuple[int, int, int, int]
"""n, h, g and b."""

RUN_ALONE: Moment = (1, 0, 0, 1)
"""Moment of one rank that goes through several microbatches one by one."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Moments:
    """Moments of a pipeline with one stage a position; where it has replicas, of the fullest of them.

    Attributes:
        numbers: n, h, g and b of the moments of each position, shape (p, moments, 4).
        in_flight: most microbatches at once, shape (p,).
        versions: of the weights, held at once, shape (p,).
    """

    numbers: np.ndarray
    in_flight: np.ndarray
    versions: np.ndarray


def moments_of(form: PipelineForm) -> Moments:
    """Moments of a form; one microbatch in flight where its schedule is too large to be built."""
    replicas = form.replicas if _replicated(form) else ()
    return _moments_of(form.schedule, form.positions, max(1, form.microbatches), replicas)


@functools.lru_cache(maxsize=1000)
def _moments_of(schedule: str, positions: int, microbatches: int, replicas: tuple[int, ...]) -> Moments:
    # One rank alone goes through its microbatches one by one.
    named = "1F1B" if positions == 1 and not replicas else schedule
    holders = replicas or (1,) * positions
    if named in ("1F1B", "GPipe"):
        shares = [sorted({microbatches // count, -(-microbatches // count)} - {0}) for count in holders]
        active = [
            in_flight(holders, stage) if named == "1F1B" else microbatches for stage in range(positions)
        ]
        moments = [
            [moment for share in of for moment in _drained(min(most, share), share)]
            for of, most in zip(shares, active, strict=True)
        ]
        flying = [min(most, of[-1]) for of, most in zip(shares, active, strict=True)]
        return _packed(moments, flying, [1] * positions)
    if named == "PipeDream":
        flying = [in_flight(holders, stage) for stage in range(positions)]
        return _packed([stashed(count) for count in flying], flying, flying)
    if named == "PipeDream2BW" and microbatches > 1:
        flying = list(range(positions, 0, -1))
        return _packed([[(n, 0, 0, 1)] for n in flying], flying, [2] * positions)
    form = PipelineForm(schedule=named, positions=positions, microbatches=microbatches, replicas=replicas)
    built = schedule_of(form)
    if built is None or built[0].stages != positions:
        one = [1] * positions
        return _packed([[(1, 0, -1, 1)] for _ in one], one, one)
    played, facts = built
    return _packed(
        [
            [moment for rank in holders for moment in _played(played, rank, stage)]
            for stage, holders in enumerate(played.stage_ranks)
        ],
        facts.stage_in_flight,
        facts.versions_held,
    )


def _drained(flying: int, microbatches: int) -> list[Moment]:
    """Moments of 1F1B and GPipe: where all are in flight before the first backward, no gradients exist."""
    if microbatches > flying:
        return [(flying, 0, 0, 1)]
    return [(flying, 0, -1, 1), *[(flying - 1, 0, 0, 1)] * (flying > 1)]


def stashed(flying: int) -> list[Moment]:
    """Moments of PipeDream: each microbatch's gradients are used at once."""
    return [(flying, 0, -1, 1), (flying - 1, 0, 0, 0)]


def _played(schedule: Schedule, rank: int, stage: int) -> Iterator[Moment]:
    kept = between = 0
    gradients = -1
    for action in schedule.actions[rank]:
        if action.kind is Kind.FORWARD:
            kept += 1
        elif action.kind is Kind.BACKWARD_INPUT:
            # The first stage does the whole backward in the weights' half.
            between += stage > 0
        elif action.kind is Kind.UPDATE:
            gradients = -1
        else:
            yield kept, between, gradients, int(action.kind is Kind.BACKWARD or not stage)
            kept -= 1
            between -= action.kind is Kind.BACKWARD_WEIGHT and stage > 0
            gradients = 0
        yield kept, between, gradients, 0


def _packed(by_position: list[list[Moment]], in_flight: Iterable[int], versions: Iterable[int]) -> Moments:
    fullest = [_undominated(set(moments)) for moments in by_position]
    numbers = np.zeros((len(fullest), max(map(len, fullest)), 4))
    for position, moments in enumerate(fullest):
        numbers[position, : len(moments)] = moments
    return Moments(numbers, np.array(list(in_flight), dtype=float), np.array(list(versions), dtype=float))


def _undominated(moments: set[Moment]) -> list[Moment]:
    found: list[Moment] = []
    for moment in sorted(moments, reverse=True):
        if not any(all(mine <= other for mine, other in zip(moment, above, strict=True)) for above in found):
            found.append(moment)
    return found


@functools.lru_cache(maxsize=100)
def schedule_of(form: PipelineForm) -> tuple[Schedule, ScheduleFacts] | None:
    """The schedule of several positions; None: there is none, or it is too large.

    Of one without a flush, a run that is long enough for the pipeline to fill; of very many microbatches, two
    for each rank: but for LoopedBFS, which has all of them in flight, more take no more memory.
    """
    microbatches, kind = max(1, form.microbatches), SCHEDULES.get(form.schedule)
    replicas = form.replicas if _replicated(form) else ()
    ranks = sum(replicas) or form.positions
    each = ranks * form.stages_per_rank
    if each * microbatches > MOST_ACTIONS:
        microbatches = min(microbatches, 2 * ranks)
    if kind is None or each * microbatches > MOST_ACTIONS:
        return None
    try:
        schedule = build_schedule(
            form.schedule,
            ranks=ranks,
            microbatches=microbatches,
            chunks=form.stages_per_rank,
            replicas=replicas,
            steps=2 + math.ceil(2 * ranks / microbatches) if kind.asynchronous else None,
        )
        return schedule, validate(schedule)
    except ScheduleError:
        return None


def _replicated(form: PipelineForm) -> bool:
    return any(count != 1 for count in form.replicas)
