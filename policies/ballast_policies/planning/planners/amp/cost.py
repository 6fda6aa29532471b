"""AMP's cost model: a strategy's step time from layers, speeds and links (AMP, section 3.4 and equation 10).

    step = (gas - 1) max_i t_i + sum_i t_i + sum_i e_i + max_i s_i

t_i is set by the slowest device of stage i and by the all-reduces of its tensor-parallel groups, e_i by
the slowest link between stages i and i + 1, s_i by the ring over its data-parallel replicas.
"""

import itertools
from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.planners.amp.layers import assign_layers, pipeline_seconds
from ballast_policies.planning.planners.amp.model import DeviceGrid, LayerCost, Placement, Strategy

_STATE_FACTOR = 4
"""Weights, gradients and two Adam moments, in units of the weights."""


def stage_seconds(
    layers: Sequence[LayerCost], grid: DeviceGrid, placement: Placement, microbatch_size: int
) -> np.ndarray:
    """Seconds of one microbatch of each layer on each stage's devices, shape (p, L)."""
    rows = []
    for stage in placement:
        tensor = len(stage[0])
        speed = min(grid.speeds[device] for group in stage for device in group)
        link = min(grid.slowest_link(group) for group in stage)
        rows.append(
            [
                layer.overhead_seconds / speed
                + microbatch_size * layer.seconds / (tensor * speed)
                + 2 * (tensor - 1) / tensor * layer.reduced_bytes * microbatch_size / link
                for layer in layers
            ]
        )
    return np.array(rows, dtype=float)


def boundary_seconds(
    layers: Sequence[LayerCost], grid: DeviceGrid, placement: Placement, microbatch_size: int
) -> np.ndarray:
    """Seconds of an activation and its gradient after each layer from each stage, shape (p - 1, L - 1).

    Replica k of a stage talks to replica k of the next, each tensor rank to its counterpart.
    """
    sizes = np.array([layer.output_bytes for layer in layers[:-1]]) * microbatch_size
    rows = []
    for stage, following in itertools.pairwise(placement):
        pairs = zip(_flat(stage), _flat(following), strict=True)
        rows.append(2 * sizes / min(grid.bandwidth[a, b] for a, b in pairs))
    return np.array(rows, dtype=float).reshape(len(placement) - 1, len(layers) - 1)


def sync_seconds(
    layers: Sequence[LayerCost], grid: DeviceGrid, placement: Placement, partition: Partition
) -> float:
    """Seconds of the slowest stage's gradient exchange between its replicas."""
    slowest = 0.0
    for stage, (first, end) in zip(placement, itertools.pairwise(partition.bounds), strict=True):
        data, tensor = len(stage), len(stage[0])
        weights = sum(layer.weight_bytes for layer in layers[first:end]) / tensor
        link = min(grid.slowest_link(peers) for peers in zip(*stage, strict=True))
        slowest = max(slowest, 2 * (data - 1) / data * weights / link)
    return slowest


def step_seconds(
    strategy: Strategy, layers: Sequence[LayerCost], grid: DeviceGrid, *, batch_size: int
) -> float:
    """Predicted step time; infinite where a device's memory does not hold its stage.

    Raises:
        PlanningError: microbatches of all replicas do not divide the batch.
    """
    per_round = strategy.data * strategy.microbatch_size
    if batch_size % per_round:
        raise PlanningError(
            f"a batch of {batch_size} does not divide into {strategy.data} replicas x microbatches of "
            f"{strategy.microbatch_size}. To fix: use a multiple of {per_round}"
        )
    gas = batch_size // per_round
    if grid.memory_bytes is not None and device_bytes(strategy, layers, gas) > grid.memory_bytes:
        return float("inf")
    size, placement = strategy.microbatch_size, strategy.placement
    t = stage_seconds(layers, grid, placement, size)
    e = boundary_seconds(layers, grid, placement, size)
    return pipeline_seconds(strategy.partition, t, e, gas) + sync_seconds(
        layers, grid, placement, strategy.partition
    )


def device_bytes(strategy: Strategy, layers: Sequence[LayerCost], microbatches: int) -> float:
    """Bytes of the fullest device: optimizer state, and outputs of the microbatches in flight (1F1B)."""
    fullest = 0.0
    bounds = strategy.partition.bounds
    for stage in range(strategy.pipeline):
        own = layers[bounds[stage] : bounds[stage + 1]]
        in_flight = min(microbatches, strategy.pipeline - stage)
        outputs = sum(layer.output_bytes for layer in own) * strategy.microbatch_size * in_flight
        weights = sum(layer.weight_bytes for layer in own) * _STATE_FACTOR
        fullest = max(fullest, (weights + outputs) / strategy.tensor)
    return fullest


def with_best_layers(
    layers: Sequence[LayerCost],
    grid: DeviceGrid,
    placement: Placement,
    *,
    microbatch_size: int,
    batch_size: int,
) -> Strategy:
    """The strategy of this placement and microbatch size, layers assigned by :func:`assign_layers`."""
    data, tensor = len(placement[0]), len(placement[0][0])
    t = stage_seconds(layers, grid, placement, microbatch_size)
    e = boundary_seconds(layers, grid, placement, microbatch_size)
    return Strategy(
        tensor=tensor,
        data=data,
        pipeline=len(placement),
        microbatch_size=microbatch_size,
        placement=placement,
        partition=assign_layers(t, e, batch_size // (data * microbatch_size)),
    )


def _flat(stage: tuple[tuple[int, ...], ...]) -> list[int]:
    return [device for group in stage for device in group]
