"""AMP: tensor, data and pipeline degrees, placement and layers on mixed GPUs and links (AMP, NeurIPS 2022).

Of a strategy, from layers, speeds and links as :mod:`.cost_model` has them (section 3.4 and equation 10):

    step = (gas - 1) max_i t_i + sum_i t_i + sum_i e_i + max_i s_i

t_i are seconds of a microbatch on stage i, e_i of an activation to the next stage and its gradient back, s_i
of the ring over its replicas, gas the microbatches of a pipeline.

Layers go to stages under all but its last term, exactly (supplement 6.4).  AMP's table
dp[layer][cuts][largest stage time to the right] has a column for each possible stage time. The same optimum
comes from fixing the bottleneck c and finding the least sum with all t_i <= c,

    f[i, j] = min over k of f[i - 1, k] + e_{i-1}(k) + t_i(k..j),   t_i(k..j) <= c

for c between the smallest feasible and the one of the least sum, by halves: a half is left out
where (gas - 1) c of its smallest c and the least sum of its largest rule it out.

Strategies are found by simulated annealing (supplement, algorithm 2), or exhaustively if few.
The printed algorithm draws normal numbers where it means uniform ones, assigns layers to the old
state instead of the new, and leaves the lines after the branch in its second arm only; here both
arms are followed by a new microbatch size, placement and assignment of the new state.

GPUs to stages by tiling the grid with dominoes (supplement, figure 5): a domino is tensor x data
GPUs, one stage; it lies upright (tensor-parallel groups down a column, where links are fastest) or turned
(groups along a row).  Stages are numbered in the order in which dominoes are laid, row by row.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Sequence
from math import exp

import numpy as np

from ballast_policies.planning.balancers.exact import loads_on_ranks, partition_by_rank
from ballast_policies.planning.partition import CutStep, Partition, PlanningError, best_cuts
from ballast_policies.planning.planners.cost_model import CostModel, Degrees
from ballast_policies.planning.planners.layout import Groups, Layout
from ballast_policies.planning.rank_capacity import TakenBytes

Placement = tuple[Groups, ...]
"""Cells of each tensor-parallel group, by stage and by data-parallel replica."""


class Grid:
    """GPUs of the full servers of a model's cluster, a column a server, as cells row * columns + column."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.rows, self.columns = model.devices.full_servers
        self.cells = self.rows * self.columns

    def gpus(self, placement: Placement) -> Placement:
        """The placement by numbers of GPUs, which fill one server after the other."""
        return _mapped(placement, lambda cell: cell % self.columns * self.rows + cell // self.columns)

    def placement(self, layout: Layout) -> Placement:
        """The cells of a layout's GPUs."""
        groups = tuple(stage.groups for stage in layout.stages)
        return _mapped(groups, lambda gpu: gpu % self.rows * self.columns + gpu // self.rows)


def _mapped(placement: Placement, number: Callable[[int], int]) -> Placement:
    return tuple(tuple(tuple(map(number, group)) for group in stage) for stage in placement)


def pipeline_seconds(
    partition: Partition, stage_seconds: np.ndarray, boundary_seconds: np.ndarray, microbatches: int
) -> float:
    """The step of above, without its last term.

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
    """The contiguous assignment with the least such seconds; arguments as for :func:`pipeline_seconds`.

    ``taken``: bytes of layers on a stage's devices; ``memory``: that they hold, needs ``taken``.

    Raises:
        PlanningError: fewer layers than stages, or nothing fits the memory.
    """
    ranks, layers = stage_seconds.shape
    first = partition_by_rank(stage_seconds, taken=taken, memory=memory)
    limit = None if memory is None else np.asarray(memory, dtype=float)
    loads = loads_on_ranks(stage_seconds, ranks, None, taken, limit)
    begins, ends = np.arange(layers), np.arange(1, layers + 1)[:, None]
    # times[i][j - 1, k]: stage i with layers k..j-1.
    times = np.stack([np.where(begins < ends, loads(i, begins, ends), np.inf) for i in range(ranks)])

    def widest(partition: Partition) -> float:
        return max(float(times[i, b - 1, a]) for i, (a, b) in enumerate(itertools.pairwise(partition.bounds)))

    def least_sum(bottleneck: float) -> Partition:
        """Partition of least f above; ``bottleneck`` must be feasible."""

        def choose(step: CutStep) -> tuple[np.ndarray, np.ndarray]:
            arriving = step.before
            if step.rank:
                arriving = arriving + boundary_seconds[step.rank - 1, step.first - 1]
            value = arriving + np.where(step.loads <= bottleneck, step.loads, np.inf)
            return value, value.argmin(axis=1)

        return best_cuts(ranks, layers, lambda i, k, j: times[i, j - 1, k], choose)[1]

    def seconds(partition: Partition, gas: int = microbatches) -> float:
        return pipeline_seconds(partition, stage_seconds, boundary_seconds, gas)

    free = least_sum(np.inf)
    best = min(first, free, key=seconds)
    candidates = np.unique(times[np.isfinite(times) & (times >= widest(first))])
    # Bottlenecks candidates[low:high], none of which has a lesser sum than the last number.
    spans = [(0, len(candidates), seconds(free, 1))]
    while spans:
        low, high, least = spans.pop()
        if low >= high or (microbatches - 1) * candidates[low] + least >= seconds(best):
            continue
        middle = (low + high) // 2
        found = least_sum(candidates[middle])
        best = min(best, found, key=seconds)
        # From the bottleneck that it has to the one that it may have, it is the answer.
        below = int(np.searchsorted(candidates, widest(found)))
        spans += [(middle + 1, high, least), (low, below, seconds(found, 1))]
    return best


def step_seconds(layout: Layout, model: CostModel) -> float:
    """Predicted step time; infinite where a GPU's memory does not hold its stage.

    Raises:
        PlanningError: the replicas of the pipeline cannot share the microbatches.
    """
    data, bounds = layout.replicas[0], np.array([layout.bounds])
    if layout.microbatches % data:
        raise PlanningError(
            f"a batch of {layout.batch_size} does not divide into {data} replicas x microbatches of "
            f"{layout.microbatch_size}. To fix: use a multiple of {data * layout.microbatch_size}"
        )
    gas = layout.microbatches // data
    degrees = Degrees(layout.tensor, data, layout.microbatch_size, gas)
    gpus = model.stage_gpus(tuple(stage.groups for stage in layout.stages))
    if not model.fits(degrees, gpus, bounds)[0]:
        return float("inf")
    times = model.times(degrees, gpus, bounds)
    t, e = times.forward + times.backward, 2 * times.transfer
    return float((gas - 1) * t.max() + t.sum() + e.sum() + times.exchange.max())


def with_best_layers(grid: Grid, placement: Placement, *, microbatch_size: int, batch_size: int) -> Layout:
    """The plan of this placement and microbatch size, layers assigned by :func:`assign_layers`.

    Where no layers fit the memory, those that would be fastest: their step is infinite.
    """
    model, data, tensor = grid.model, len(placement[0]), len(placement[0][0])
    gas = batch_size // (data * microbatch_size)
    groups, degrees = grid.gpus(placement), Degrees(tensor, data, microbatch_size, gas)
    gpus = model.stage_gpus(groups)
    t, _ = model.layer_seconds(degrees, gpus)
    sizes = microbatch_size / model.profiled_size * model.outputs[:-1]
    e = 2 * sizes / gpus.boundary_link[:, None]
    taken = model.stage_bytes(degrees, len(placement)).taken
    try:
        partition = assign_layers(t, e, gas, taken=taken, memory=gpus.memory.tolist())
    except PlanningError:
        partition = assign_layers(t, e, gas)
    return degrees.layout(partition.bounds, groups)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Search:
    """Result of a search.

    Attributes:
        plans: accepted ones with their predicted step seconds, best first, without doubles.
        evaluations: strategies that were scored.
    """

    plans: tuple[tuple[float, Layout], ...]
    evaluations: int


def tiling_degrees(grid: Grid, batch_size: int, most_tensor: float = float("inf")) -> list[tuple[int, int]]:
    """(tensor, data) whose product divides the GPUs, with no more stages than layers, that tile."""
    n = grid.cells
    return [
        (tensor, data)
        for tensor in range(1, n + 1)
        for data in range(1, n // tensor + 1)
        if n % (tensor * data) == 0
        and n // (tensor * data) <= grid.model.layers
        and batch_size % data == 0
        and tensor <= most_tensor
        and next(tilings(grid.rows, grid.columns, tensor=tensor, data=data), None) is not None
    ]


def microbatch_sizes(batch_size: int, data: int) -> tuple[int, ...]:
    """Powers of two that divide a replica's share of the batch."""
    share = batch_size // data
    return tuple(size for size in (2**k for k in range(share.bit_length())) if share % size == 0)


def search(
    grid: Grid,
    *,
    batch_size: int,
    evaluations: int = 200,
    seed: int = 0,
    most_tensor: float = float("inf"),
) -> Search:
    """All strategies, where there are at most as many as evaluations; else by :func:`anneal`.

    Args:
        grid: the GPUs.
        batch_size: samples of a step, over all replicas.
        evaluations: strategies to score, the first included.
        seed: the same seed gives the same search.
        most_tensor: largest tensor-parallel degree.

    Raises:
        PlanningError: no strategy fits the memory in the evaluations given.
    """
    allowed = tiling_degrees(grid, batch_size, most_tensor)
    if not allowed:
        raise PlanningError(
            f"no tensor x data degrees tile {grid.rows} x {grid.columns} devices for a batch of {batch_size}"
        )
    few = list(itertools.islice(_candidates(grid, allowed, batch_size), evaluations + 1))
    if len(few) > evaluations:
        return anneal(grid, allowed, batch_size=batch_size, evaluations=evaluations, seed=seed)
    every = [_scored(grid, placement, size, batch_size) for placement, size in few]
    return _search({strategy: seconds for seconds, strategy in every}, len(every))


def anneal(
    grid: Grid, allowed: Sequence[tuple[int, int]], *, batch_size: int, evaluations: int, seed: int = 0
) -> Search:
    """Simulated annealing over degrees, microbatch size and placement; arguments as for :func:`search`.

    A worse state is accepted with probability exp(min(cost - next, 0) / temperature); the temperature is
    the first state's cost at the start and falls linearly to 0.

    ``allowed``: of :func:`tiling_degrees`, one at least.

    Raises:
        PlanningError: no strategy fits the memory in the evaluations given.
    """
    random = np.random.default_rng(seed)

    def sampled(tensor: int, data: int) -> tuple[float, Layout]:
        size = int(random.choice(microbatch_sizes(batch_size, data)))
        placement = sample_tiling(grid.rows, grid.columns, tensor=tensor, data=data, choose=random.random)
        assert placement is not None, "only degrees that tile are sampled"
        return _scored(grid, placement, size, batch_size)

    tensor, data = allowed[int(random.integers(len(allowed)))]
    cost, state = sampled(tensor, data)
    scale = cost if np.isfinite(cost) else 1.0
    record = {state: cost}
    for step in range(1, evaluations):
        temperature = scale * (1 - step / evaluations)
        same = 1 if random.random() < 0.5 else 0
        # Neighbours share one of the two degrees.
        near = [pair for pair in allowed if pair[same] == (state.tensor, state.data)[same]]
        next_cost, candidate = sampled(*near[int(random.integers(len(near)))])
        if next_cost <= cost or random.random() < exp(min(cost - next_cost, 0.0) / temperature):
            cost, state = next_cost, candidate
            record[state] = cost
    return _search(record, evaluations)


def _candidates(
    grid: Grid, allowed: Sequence[tuple[int, int]], batch_size: int
) -> Iterator[tuple[Placement, int]]:
    for tensor, data in allowed:
        for placement in tilings(grid.rows, grid.columns, tensor=tensor, data=data):
            for size in microbatch_sizes(batch_size, data):
                yield placement, size


def _scored(grid: Grid, placement: Placement, size: int, batch_size: int) -> tuple[float, Layout]:
    layout = with_best_layers(grid, placement, microbatch_size=size, batch_size=batch_size)
    return step_seconds(layout, grid.model), layout


def _search(record: dict[Layout, float], evaluations: int) -> Search:
    plans = sorted(((cost, s) for s, cost in record.items() if np.isfinite(cost)), key=lambda plan: plan[0])
    if not plans:
        raise PlanningError(
            f"none of {evaluations} strategies fits the devices' memory. "
            "To fix: use more devices, or more evaluations"
        )
    return Search(plans=tuple(plans), evaluations=evaluations)


Shapes = Callable[[], tuple[bool, ...]]


def tilings(rows: int, columns: int, *, tensor: int, data: int) -> Iterator[Placement]:
    """All tilings of a rows x columns grid; none where the domino does not fit."""
    yield from _tile(rows, columns, tensor, data, lambda: (False, True))


def sample_tiling(
    rows: int, columns: int, *, tensor: int, data: int, choose: Callable[[], float]
) -> Placement | None:
    """One tiling by coin tosses, first fit from the top left; None where there is no tiling.

    ``tensor``: size of a domino along its tensor-parallel groups; ``data``: across them; ``choose``: a random
    number in [0, 1) each call.
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
