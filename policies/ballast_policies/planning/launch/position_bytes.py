"""What layers take on each position of a pipeline with one stage a position, and what is needed besides."""

import dataclasses
import functools
import math
from collections import Counter

import numpy as np

from ballast_policies.planning.launch.measured_layers import WEIGHT_PARTS, MeasuredLayers, PipelineForm
from ballast_policies.planning.launch.rank_bytes import SENDS_AT_ONCE
from ballast_policies.planning.schedules import SCHEDULES, Kind, Schedule, ScheduleError
from ballast_policies.planning.schedules.validate import ScheduleFacts, validate

MOST_ACTIONS = 20_000
"""Positions x microbatches x stages a rank, up to which a schedule is built to see what it holds."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Counts:
    """By position: microbatches in flight, those of them between two halves, and versions of the weights."""

    in_flight: tuple[float, ...]
    between: tuple[float, ...]
    versions: tuple[int, ...]


def bytes_on_positions(layers: MeasuredLayers, form: PipelineForm) -> np.ndarray:
    """Bytes of each layer on each position, shape (positions, L)."""
    held, kept = np.asarray(layers.held_bytes, dtype=float), _values(layers, layers.activation_bytes)
    counts = counts_of(form)
    weights = WEIGHT_PARTS.get(form.optimizer, WEIGHT_PARTS["adamw"]) * held
    step = np.outer(counts.in_flight, kept) + np.outer(counts.between, _passing(layers))
    if form.averaged:
        step = np.maximum(step, weights)
    rows: np.ndarray = held + step
    return rows + np.outer(np.asarray(counts.versions) - 1.0, weights)


def reserves(layers: MeasuredLayers, form: PipelineForm) -> np.ndarray:
    """Bytes that each position needs besides at most, whichever layers it has, shape (positions,).

    Outputs that start backwards, messages, and what is there while one layer's backward runs.
    """
    positions, count, found = form.positions, len(layers.held_bytes), []
    outputs, passing, counts = _values(layers, layers.output_bytes), _passing(layers), counts_of(form)
    for at, (flying, between) in enumerate(zip(counts.in_flight, counts.between, strict=True)):
        end = count - positions + at + 1  # layers at..end - 1 may be there
        last = at == positions - 1
        output = float(outputs[-1] if last else outputs[at:end].max())
        received, sent = float(outputs[at - 1 : end - 1].max()) if at else 0.0, 0.0 if last else output
        needed = flying * output + (0.0 if between else float(passing[at:end].max()))
        if runs_in_torch(form):
            needed += max(0.0, form.microbatches - flying) * received + form.microbatches * sent
            if form.schedule not in SENDS_AT_ONCE:
                needed += form.microbatches * (received + sent)
        found.append(needed)
    return np.array(found)


def runs_in_torch(form: PipelineForm) -> bool:
    """Whether torch's pipelining runs it, which has a buffer for each message of a step."""
    kind = SCHEDULES.get(form.schedule)
    alone = form.positions == 1 or any(count != 1 for count in form.replicas)
    return not alone and kind is not None and not kind.asynchronous


@functools.lru_cache(maxsize=1000)
def counts_of(form: PipelineForm) -> Counts:
    """What the schedule holds; of several stages a rank, their mean.

    One of each, which every schedule has at least, where a stage has replicas or the schedule is too large to
    be built.
    """
    positions, microbatches = form.positions, max(1, form.microbatches)
    none = (0.0,) * positions
    ones = Counts(in_flight=(1.0,) * positions, between=none, versions=(1,) * positions)
    # One rank alone goes through its microbatches one by one.
    if positions == 1 or any(count != 1 for count in form.replicas):
        return ones
    if form.schedule == "1F1B":
        flying = tuple(float(min(microbatches, positions - at)) for at in range(positions))
        return dataclasses.replace(ones, in_flight=flying)
    if form.schedule == "GPipe":
        return dataclasses.replace(ones, in_flight=(float(microbatches),) * positions)
    built = schedule_of(form)
    if built is None:
        return ones
    schedule, facts = built
    own = [
        [stage for stage, holders in enumerate(schedule.stage_ranks) if position in holders]
        for position in range(positions)
    ]
    return Counts(
        in_flight=tuple(count / len(stages) for count, stages in zip(facts.in_flight, own, strict=True)),
        between=none if len(own[0]) > 1 else tuple(_between(schedule, at) for at in range(positions)),
        versions=tuple(max(facts.versions_held[stage] for stage in stages) for stages in own),
    )


@functools.lru_cache(maxsize=100)
def schedule_of(form: PipelineForm) -> tuple[Schedule, ScheduleFacts] | None:
    """The schedule of several positions without replicas; None: there is none, or it is too large."""
    positions, microbatches = form.positions, max(1, form.microbatches)
    kind = SCHEDULES.get(form.schedule)
    if kind is None or positions * microbatches * form.stages_per_rank > MOST_ACTIONS:
        return None
    try:
        if not kind.asynchronous:
            schedule = kind.build(positions, microbatches, form.stages_per_rank)
        else:
            # Long enough that the pipeline fills.
            steps = 2 + math.ceil(2 * positions / microbatches)
            if kind.build_run is not None:
                schedule = kind.build_run(positions, microbatches, steps)
            else:
                schedule = kind.build(positions, steps * microbatches, form.stages_per_rank)
        return schedule, validate(schedule)
    except ScheduleError:
        return None


def _between(schedule: Schedule, rank: int) -> float:
    """Most microbatches between their halves; the first stage does all in the weights' half."""
    now, most = Counter[int](), 0
    for action in schedule.actions[rank]:
        if action.stage and action.kind is Kind.BACKWARD_INPUT:
            now[action.stage] += 1
        elif action.stage and action.kind is Kind.BACKWARD_WEIGHT:
            now[action.stage] -= 1
        most = max(most, now.total())
    return float(most)


def _passing(layers: MeasuredLayers) -> np.ndarray:
    passing: np.ndarray = _values(layers, layers.gradient_bytes) + _values(layers, layers.repeated_bytes)
    return passing


def _values(layers: MeasuredLayers, values: tuple[int, ...]) -> np.ndarray:
    return np.asarray(values or (0,) * len(layers.held_bytes), dtype=float)
