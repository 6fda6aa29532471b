"""Search over strategies: simulated annealing (AMP supplement, algorithm 2), or exhaustive if few.

The printed algorithm draws normal numbers where it means uniform ones, assigns layers to the old
state instead of the new, and leaves the lines after the branch in its second arm only; here both
arms are followed by a new microbatch size, placement and assignment of the new state.

Devices to stages by tiling the grid with dominoes (AMP supplement, figure 5): a domino is tensor x data
devices, one stage; it lies upright (tensor-parallel groups down a column, where links are fastest) or turned
(groups along a row).  Stages are numbered in the order in which dominoes are laid, row by row.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from math import exp

import numpy as np

from ballast_policies.planning.partition import PlanningError
from ballast_policies.planning.planners.amp.cost import step_seconds, with_best_layers
from ballast_policies.planning.planners.amp.model import DeviceGrid, LayerCost, Placement, Strategy


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """What a search found.

    Attributes:
        plans: accepted strategies with their predicted step seconds, best first, without doubles.
        best_so_far: least step seconds after each evaluation.
    """

    plans: tuple[tuple[float, Strategy], ...]
    best_so_far: tuple[float, ...]


def degrees(grid: DeviceGrid, layers: int, batch_size: int) -> tuple[tuple[int, int], ...]:
    """(tensor, data) whose product divides the devices, with no more stages than layers, that tile."""
    n = grid.devices
    return tuple(
        (tensor, data)
        for tensor in range(1, n + 1)
        for data in range(1, n // tensor + 1)
        if n % (tensor * data) == 0
        and n // (tensor * data) <= layers
        and batch_size % data == 0
        and next(tilings(grid.rows, grid.columns, tensor=tensor, data=data), None) is not None
    )


def microbatch_sizes(batch_size: int, data: int) -> tuple[int, ...]:
    """Powers of two that divide a replica's share of the batch."""
    share = batch_size // data
    return tuple(size for size in (2**k for k in range(share.bit_length())) if share % size == 0)


def anneal(
    layers: Sequence[LayerCost],
    grid: DeviceGrid,
    *,
    batch_size: int,
    evaluations: int = 200,
    seed: int = 0,
    most_tensor: float = float("inf"),
) -> Search:
    """Simulated annealing over degrees, microbatch size and placement.

    A worse state is accepted with probability exp(min(cost - next, 0) / temperature); the temperature is
    the first state's cost at the start and falls linearly to 0.

    Args:
        layers: the model.
        grid: the devices.
        batch_size: samples of a step, over all replicas.
        evaluations: strategies to score, the first included.
        seed: the same seed gives the same search.
        most_tensor: largest tensor-parallel degree.

    Raises:
        PlanningError: no strategy fits the memory in the evaluations given.
    """
    random = np.random.default_rng(seed)
    allowed = [pair for pair in degrees(grid, len(layers), batch_size) if pair[0] <= most_tensor]
    if not allowed:
        raise PlanningError(
            f"no tensor x data degrees tile {grid.rows} x {grid.columns} devices for a batch of {batch_size}"
        )

    def sampled(tensor: int, data: int) -> tuple[float, Strategy]:
        size = int(random.choice(microbatch_sizes(batch_size, data)))
        placement = sample_tiling(grid.rows, grid.columns, tensor=tensor, data=data, choose=random.random)
        assert placement is not None, "only degrees that tile are sampled"
        return _scored(layers, grid, placement, size, batch_size)

    tensor, data = allowed[int(random.integers(len(allowed)))]
    cost, state = sampled(tensor, data)
    scale = cost if np.isfinite(cost) else 1.0
    record, best_so_far = {state: cost}, [cost]
    for step in range(1, evaluations):
        temperature = scale * (1 - step / evaluations)
        same = 1 if random.random() < 0.5 else 0
        # Neighbours share one of the two degrees.
        near = [pair for pair in allowed if pair[same] == (state.tensor, state.data)[same]]
        next_cost, candidate = sampled(*near[int(random.integers(len(near)))])
        best_so_far.append(min(best_so_far[-1], next_cost))
        if next_cost <= cost or random.random() < exp(min(cost - next_cost, 0.0) / temperature):
            cost, state = next_cost, candidate
            record[state] = cost
    return _search(record, best_so_far)


def search(
    layers: Sequence[LayerCost],
    grid: DeviceGrid,
    *,
    batch_size: int,
    evaluations: int = 200,
    seed: int = 0,
    most_tensor: float = float("inf"),
) -> Search:
    """All strategies, where there are at most as many as evaluations; else :func:`anneal`.

    Raises:
        PlanningError: nothing fits the memory.
    """
    allowed = [pair for pair in degrees(grid, len(layers), batch_size) if pair[0] <= most_tensor]
    few = list(itertools.islice(_candidates(grid, allowed, batch_size), evaluations + 1))
    if not few or len(few) > evaluations:
        return anneal(
            layers,
            grid,
            batch_size=batch_size,
            evaluations=evaluations,
            seed=seed,
            most_tensor=most_tensor,
        )
    every = [_scored(layers, grid, placement, size, batch_size) for placement, size in few]
    running = itertools.accumulate((seconds for seconds, _ in every), min)
    return _search({strategy: seconds for seconds, strategy in every}, list(running))


def _candidates(
    grid: DeviceGrid, allowed: Sequence[tuple[int, int]], batch_size: int
) -> Iterator[tuple[Placement, int]]:
    for tensor, data in allowed:
        for placement in tilings(grid.rows, grid.columns, tensor=tensor, data=data):
            for size in microbatch_sizes(batch_size, data):
                yield placement, size


def _scored(
    layers: Sequence[LayerCost], grid: DeviceGrid, placement: Placement, size: int, batch_size: int
) -> tuple[float, Strategy]:
    strategy = with_best_layers(layers, grid, placement, microbatch_size=size, batch_size=batch_size)
    return step_seconds(strategy, layers, grid, batch_size=batch_size), strategy


def _search(record: dict[Strategy, float], best_so_far: Sequence[float]) -> Search:
    plans = sorted(((cost, s) for s, cost in record.items() if np.isfinite(cost)), key=lambda plan: plan[0])
    if not plans:
        raise PlanningError(
            f"none of {len(best_so_far)} strategies fits the devices' memory. "
            "To fix: use more devices, or more evaluations"
        )
    return Search(plans=tuple(plans), best_so_far=tuple(best_so_far))


Shapes = Callable[[], tuple[bool, ...]]


def tilings(rows: int, columns: int, *, tensor: int, data: int) -> Iterator[Placement]:
    """All tilings of a rows x columns grid; none where the domino does not fit."""
    turns = (False,) if tensor == data == 1 else (False, True)
    yield from _tile(rows, columns, tensor, data, lambda: turns)


def sample_tiling(
    rows: int, columns: int, *, tensor: int, data: int, choose: Callable[[], float]
) -> Placement | None:
    """One tiling by coin tosses, first fit from the top left; None where there is no tiling.

    Args:
        rows: of the grid.
        columns: of the grid.
        tensor: size of a domino, along its tensor-parallel groups.
        data: size of a domino, across them.
        choose: a random number in [0, 1) each call, e.g. ``generator.random``.
    """

    def turns() -> tuple[bool, ...]:
        return (False, True) if choose() < 0.5 else (True, False)

    return next(_tile(rows, columns, tensor, data, turns), None)


def _tile(rows: int, columns: int, tensor: int, data: int, turns: Shapes) -> Iterator[Placement]:
    if rows * columns % (tensor * data):
        return
    yield from _extend(rows, columns, tensor, data, turns, frozenset(), ())


def _extend(
    rows: int,
    columns: int,
    tensor: int,
    data: int,
    turns: Shapes,
    taken: frozenset[int],
    laid: Placement,
) -> Iterator[Placement]:
    free = next((cell for cell in range(rows * columns) if cell not in taken), None)
    if free is None:
        yield laid
        return
    top, left = divmod(free, columns)
    for turned in turns():
        if turned and tensor == data == 1:
            continue
        high, wide = (data, tensor) if turned else (tensor, data)
        if top + high > rows or left + wide > columns:
            continue
        block = [[(top + r) * columns + left + c for c in range(wide)] for r in range(high)]
        cells = {cell for row in block for cell in row}
        if cells & taken:
            continue
        groups = block if turned else [list(group) for group in zip(*block, strict=True)]
        stage = tuple(tuple(group) for group in groups)
        yield from _extend(rows, columns, tensor, data, turns, taken | cells, (*laid, stage))
