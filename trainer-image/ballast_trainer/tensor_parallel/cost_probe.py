"""Measurement of the costs of pruning and migrating columns on this machine (Algorithm 2, line 1).

Both are measured on the layers that are held, once, when the group first finds a rank late.
"""

import functools
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from ballast_policies.planning.tensor_parallel.semi import LinearCost, MoveCosts, fit_cost

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.tensor_parallel.migration import numbers_per_unit
from ballast_trainer.tensor_parallel.parallel_pair import ParallelPair
from ballast_trainer.tensor_parallel.product import ColumnSelection

_FRACTIONS = (0.25, 0.75)
_REPEATS = 3


def _seconds(work: Callable[[], object], clock: Callable[[], float]) -> float:
    taken = []
    for _ in range(_REPEATS):
        began = clock()
        work()
        taken.append(clock() - began)
    return statistics.median(taken)


def _resize(pair: ParallelPair, fraction: float) -> None:
    """The copies that a resized pair makes in a forward and a backward."""
    for linear in (pair.inner, pair.outer):
        weight = linear.weight.detach()
        columns = weight.shape[1]
        kept = torch.arange(max(1, round(columns * (1 - fraction))), device=weight.device)
        selection = ColumnSelection(layer="", matrix="", columns=columns, kept=kept)
        value = weight.new_zeros(pair.rows, columns)
        for matrix, name in ((value, "input"), (weight, "weight")):
            selection.select(matrix)
            selection.restore(selection.select(matrix), name)


def _small_products(pair: ParallelPair) -> None:
    """The products of a helper for one column: forward, and both of the backward."""
    value = pair.outer.weight.new_zeros(pair.rows, pair.inner.weight.shape[1])
    for weight in (pair.inner.weight.detach()[:1], pair.outer.weight.detach()[:, :1].t()):
        wide = value @ weight.t()
        wide @ weight
        wide.t() @ value


def measure_costs(
    pairs: Sequence[ParallelPair], axis: Axis, columns: int, *, microbatches: int, slowdown: float
) -> MoveCosts:
    """Omega and Phi in seconds a step; collective over the axis, the same on all of its ranks.

    Args:
        pairs: all that are held; the first stands for all.
        axis: the tensor group.
        columns: L, the columns of a rank's whole work.
        microbatches: of a step.
        slowdown: of this rank's device, where one is emulated.
    """
    pair = pairs[0]
    device = pair.outer.weight.device
    times = len(pairs) * microbatches * slowdown
    left_out = [
        times * _seconds(functools.partial(_resize, pair, fraction), pair.clock.now)
        for fraction in _FRACTIONS
    ]
    helping = times * _seconds(functools.partial(_small_products, pair), pair.clock.now)
    numbers = sum(numbers_per_unit(each) * each.units for each in pairs)
    sent = []
    for fraction in _FRACTIONS:
        buffer = torch.zeros(max(1, round(fraction * numbers)), device=device)
        # Weights go out by a broadcast, their gradients return by an all-reduce.
        there = _seconds(functools.partial(axis.broadcast, buffer, 0), time.perf_counter)
        back = _seconds(functools.partial(axis.all_reduce, buffer), time.perf_counter)
        sent.append(there + back)
    rows = axis.gather_values([*left_out, *sent, helping], device)
    slowest = [max(column) for column in zip(*rows, strict=True)]
    at = [fraction * columns for fraction in _FRACTIONS]
    resize, communicate = fit_cost(at, slowest[:2]), fit_cost(at, slowest[2:4])
    return MoveCosts(
        resize_fixed=resize.fixed,
        resize=LinearCost(per_column=resize.per_column),
        communicate=communicate,
        help_fixed=slowest[4],
    )
