"""AMP's cost model: a strategy's step time from layers, speeds and links (AMP, section 3.4 and equation 10).

    step = (gas - 1) max_i t_i + sum_i t_i + sum_i e_i + max_i s_i

t_i is set by the slowest device of stage i and by the all-reduces of its tensor-parallel groups, e_i by
the slowest link between stages i and i + 1, s_i by the ring over its data-parallel replicas.

Layers go to stages under all but its last term, exactly (AMP supplement 6.4): gas microbatches, t_i seconds
per microbatch of stage i, e_i of the transfer after it. AMP's table dp[layer][cuts][largest stage time to
the right] has a column for each possible stage time. The same optimum comes from fixing the bottleneck c
and finding the least sum with all t_i <= c,

    f[i, j] = min over k of f[i - 1, k] + e_{i-1}(k) + t_i(k..j),   t_i(k..j) <= c

for c upwards from the smallest feasible, until (gas - 1) c alone rules the rest out.
"""

import functools
import itertools
from collections.abc import Iterable, Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import bounds_of, partition_by_rank
from ballast_policies.planning.memory.measured_layers import PipelineForm
from ballast_policies.planning.memory.stage_bytes import ROUNDING, LayerSums, StageBytes
from ballast_policies.planning.partition import Partition, PlanningError
from ballast_policies.planning.planners.amp.model import DeviceGrid, LayerCost, Placement, Strategy
from ballast_policies.planning.rank_capacity import TakenBytes


def pipeline_seconds(
    partition: Partition, stage_seconds: np.ndarray, boundary_seconds: np.ndarray, microbatches: int
) -> float:
    """T of above.

    Args:
        partition: layers to stages.
        stage_seconds: seconds of one microbatch of each layer on each stage's devices, shape (p, L).
        boundary_seconds: of a transfer after each layer from each stage, shape (p - 1, L - 1).
        microbatches: gas.
    """
    bounds = partition.bounds
    t = [stage_seconds[i, bounds[i] : bounds[i + 1]].sum() for i in range(partition.ranks)]
    e = [boundary_seconds[i, bounds[i + 1] - 1] for i in range(partition.ranks - 1)]
    return float((microbatches - 1) * max(t) + sum(t) + sum(e))


def assign_layers(
    stage_seconds: np.ndarray,
    boundary_seconds: np.ndarray,
    microbatches: int,
    *,
    taken: TakenBytes | None = None,
    memory: Sequence[float] | None = None,
) -> Partition:
    """The contiguous assignment with the least T; arguments as for :func:`pipeline_seconds`.

    Args:
        stage_seconds: see there.
        boundary_seconds: see there.
        microbatches: see there.
        taken: bytes of layers on a stage's devices.
        memory: bytes that each stage's devices hold; needs ``taken``.

    Raises:
        PlanningError: fewer layers than stages, or nothing fits the memory.
    """
    ranks = stage_seconds.shape[0]
    first = partition_by_rank(stage_seconds, taken=taken, memory=memory)
    S = np.concatenate([np.zeros((ranks, 1)), np.cumsum(stage_seconds, axis=1)], axis=1)
    # times[i][k, j]: stage i with layers k..j-1.
    times = S[:, None, :] - S[:, :, None]
    if taken is not None and memory is not None:
        width = times.shape[1]
        end = np.maximum(np.arange(width), 1)
        begin = np.minimum(np.arange(width)[:, None], end - 1)
        held = taken(np.arange(ranks)[:, None, None], begin, end)
        times = np.where(held <= ROUNDING * np.asarray(memory, dtype=float)[:, None, None], times, np.inf)
    # A hair above every candidate, so that a bound equal to a stage's own time admits it.
    smallest = max(times[i, a, b] for i, (a, b) in enumerate(itertools.pairwise(first.bounds))) * (1 + 1e-12)
    best = first
    value = pipeline_seconds(first, stage_seconds, boundary_seconds, microbatches)
    free = _least_sum(times, boundary_seconds, np.inf)
    floor = pipeline_seconds(free, stage_seconds, boundary_seconds, 1)
    candidates = np.unique(times[np.isfinite(times) & (times >= smallest / (1 + 2e-12))])
    for bottleneck in candidates:
        if (microbatches - 1) * bottleneck + floor >= value:
            break
        found = _least_sum(times, boundary_seconds, max(bottleneck * (1 + 1e-12), smallest))
        seconds = pipeline_seconds(found, stage_seconds, boundary_seconds, microbatches)
        if seconds < value:
            best, value = found, seconds
    return best


def _least_sum(times: np.ndarray, boundary_seconds: np.ndarray, bottleneck: float) -> Partition:
    """The least sum f of above; ``bottleneck`` must be feasible."""
    ranks, width, _ = times.shape
    f = np.full(width, np.inf)
    f[0] = 0.0
    cuts = [np.zeros(width, dtype=int)]
    for stage in range(ranks):
        arriving = f.copy()
        if stage:
            arriving[1:-1] += boundary_seconds[stage - 1]
        value = arriving[:, None] + np.where(times[stage] <= bottleneck, times[stage], np.inf)
        value[np.tril_indices(width)] = np.inf
        cuts.append(np.argmin(value, axis=0))
        f = value.min(axis=0)
    return Partition(bounds=bounds_of(np.stack(cuts)))


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
    size, placement = strategy.microbatch_size, strategy.placement
    taken = stage_bytes(layers, placement, size, gas).of_cut(strategy.partition)
    if (taken > ROUNDING * np.array(stage_memory(grid, placement))).any():
        return float("inf")
    t = stage_seconds(layers, grid, placement, size)
    e = boundary_seconds(layers, grid, placement, size)
    return pipeline_seconds(strategy.partition, t, e, gas) + sync_seconds(
        layers, grid, placement, strategy.partition
    )


def stage_bytes(
    layers: Sequence[LayerCost], placement: Placement, microbatch_size: int, microbatches: int
) -> StageBytes:
    """What layers take as any stage of the pipelines of a placement."""
    return _stage_bytes(
        tuple(layers), len(placement), len(placement[0]), len(placement[0][0]), microbatch_size, microbatches
    )


@functools.lru_cache(maxsize=1000)
def _stage_bytes(
    layers: tuple[LayerCost, ...], stages: int, data: int, tensor: int, size: int, microbatches: int
) -> StageBytes:
    form = PipelineForm(schedule="1F1B", positions=stages, microbatches=microbatches, averaged=data > 1)

    def scaled(values: Iterable[float], factor: float) -> np.ndarray:
        return factor * np.array(list(values), dtype=float)

    held = (
        _STATE_FACTOR * each.weight_bytes if each.held_bytes is None else each.held_bytes for each in layers
    )
    kept = (each.output_bytes if each.activation_bytes is None else each.activation_bytes for each in layers)
    sums = LayerSums(
        held=scaled(held, 1 / tensor),
        weights=scaled((each.weight_bytes for each in layers), 1 / tensor),
        activations=scaled(kept, size / tensor),
        # An output is on every rank of a tensor-parallel group.
        outputs=scaled((each.output_bytes for each in layers), size),
        repeated=scaled((each.repeated_bytes for each in layers), size / tensor),
        gradients=scaled((each.gradient_bytes for each in layers), size / tensor),
    )
    return StageBytes(sums, form)


def stage_memory(grid: DeviceGrid, placement: Placement) -> list[float]:
    """What the smallest device of each stage holds, bytes."""
    return [min(grid.memory(device) for group in stage for device in group) for stage in placement]


def with_best_layers(
    layers: Sequence[LayerCost],
    grid: DeviceGrid,
    placement: Placement,
    *,
    microbatch_size: int,
    batch_size: int,
) -> Strategy:
    """The strategy of this placement and microbatch size, layers assigned by :func:`assign_layers`.

    Where no layers fit the memory, those that would be fastest: their step is infinite.
    """
    data, tensor = len(placement[0]), len(placement[0][0])
    t = stage_seconds(layers, grid, placement, microbatch_size)
    e = boundary_seconds(layers, grid, placement, microbatch_size)
    gas = batch_size // (data * microbatch_size)
    limits = stage_memory(grid, placement)
    taken = stage_bytes(layers, placement, microbatch_size, gas).taken
    try:
        partition = assign_layers(t, e, gas, taken=taken, memory=limits)
    except PlanningError:
        partition = assign_layers(t, e, gas)
    return Strategy(
        tensor=tensor,
        data=data,
        pipeline=len(placement),
        microbatch_size=microbatch_size,
        placement=placement,
        partition=partition,
    )


def _flat(stage: tuple[tuple[int, ...], ...]) -> list[int]:
    return [device for group in stage for device in group]
