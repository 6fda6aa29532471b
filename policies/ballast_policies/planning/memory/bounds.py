"""Bounds on the bytes of :mod:`.stage_bytes` that add up over layers, for searches that need sums.

A cut that is within them is within the formula, which may find a little less.
"""

import numpy as np

from ballast_policies.planning.memory.measured_layers import MeasuredLayers, PipelineForm
from ballast_policies.planning.memory.moments import Moments, moments_of, schedule_of
from ballast_policies.planning.memory.rank_bytes import RECEIVED_AHEAD, WHOLE_GRADIENTS


def bytes_on_positions(layers: MeasuredLayers, form: PipelineForm) -> np.ndarray:
    """Bytes of each layer on each position, shape (positions, L)."""
    held, kept = np.asarray(layers.held_bytes, dtype=float), _values(layers, layers.activation_bytes)
    found = _moments(form)
    flying, between = found.numbers[..., 0].max(axis=1), found.numbers[..., 1].max(axis=1)
    weights = np.asarray(layers.weights(form.optimizer))
    step = np.outer(flying, kept) + np.outer(between, _passing(layers))
    rows: np.ndarray = held + step + np.outer(found.versions - 1.0, weights)
    return rows


def reserves(layers: MeasuredLayers, form: PipelineForm) -> np.ndarray:
    """Bytes that each position needs besides at most, whichever layers it has, shape (positions,).

    Outputs that start backwards, messages, and what is there while one layer's backward runs.
    """
    positions, count, reserved = form.positions, len(layers.held_bytes), []
    gradients = np.asarray(layers.weights(form.optimizer))
    outputs, passing, found = _values(layers, layers.output_bytes), _passing(layers), _moments(form)
    for at, (flying, _, _, running) in enumerate(found.numbers.max(axis=1)):
        end = max(at, count - positions + at) + 1  # layers at..end - 1 may be there
        last = at == positions - 1
        output = float(outputs[-1] if last else outputs[at:end].max(initial=0.0))
        received = float(outputs[at - 1 : end - 1].max(initial=0.0)) if at else 0.0
        handed_on = 0.0 if last else output
        needed = flying * output + running * float(passing[at:end].max(initial=0.0))
        needed += RECEIVED_AHEAD * max(received, handed_on)
        if form.gradient_shares > 1:
            needed += WHOLE_GRADIENTS * float(gradients[at:end].max(initial=0.0))
        elif form.averaged:
            needed = max(needed, float(gradients[at:end].max(initial=0.0)))
        if form.weights_shared:
            needed += float(gradients[at:end].max(initial=0.0))
        reserved.append(needed)
    return np.array(reserved)


def _moments(form: PipelineForm) -> Moments:
    """Those of a form; of several stages a rank, the mean of what its schedule has of each."""
    if form.stages_per_rank == 1 or form.positions == 1:
        return moments_of(form)
    built = schedule_of(form)
    if built is None:
        return moments_of(form)
    schedule, facts = built
    own = [
        [stage for stage, holders in enumerate(schedule.stage_ranks) if position in holders]
        for position in range(form.positions)
    ]
    flying = np.array([count / len(stages) for count, stages in zip(facts.in_flight, own, strict=True)])
    numbers = np.zeros((form.positions, 1, 5))
    numbers[:, 0, 0], numbers[:, 0, 4] = flying, 1
    versions = np.array([max(facts.versions_held[stage] for stage in stages) for stages in own], dtype=float)
    return Moments(numbers, flying, versions)


def _passing(layers: MeasuredLayers) -> np.ndarray:
    passing: np.ndarray = _values(layers, layers.gradient_bytes) + _values(layers, layers.repeated_bytes)
    return passing


def _values(layers: MeasuredLayers, values: tuple[int, ...]) -> np.ndarray:
    return np.asarray(values or (0,) * len(layers.held_bytes), dtype=float)
