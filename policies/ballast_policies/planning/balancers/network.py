"""Balancing with slow links: layers move away from a slow link's two ends (DynMo supplement D.2).

DynMo lets a rank's load include the wait for its neighbour's activations.  For 1F1B that wait has a
closed form.  Rank r computes F(k + p - 1 - r) and then B(k), so the dependencies between ranks form
cycles: F down from rank r to rank q and B back up pass every link twice and advance the pipeline by
q - r + 1 microbatches.  With t_r a rank's seconds per microbatch and e_r the transfer
from r to r + 1 (each way), the steady state needs per microbatch

    T = max over r <= q of (t_r + ... + t_q + 2 (e_r + ... + e_{q-1})) / (q - r + 1)

A partition with T <= c exists if layers can be assigned from left to right so that no window exceeds
c; the least excess K per (rank, cut) decides that:

    K_q(j) = min over k of load(k..j) - c + max(0, K_{q-1}(k) + 2 e_{q-1}(k)) <= 0
"""

from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import exact_partition, loads_on_ranks
from ballast_policies.planning.partition import CutStep, Partition, best_cuts
from ballast_policies.planning.rank_capacity import RankCapacity

_TOLERANCE = 1e-9
"""Relative error of the period."""


def steady_period_seconds(
    rank_seconds: Sequence[float] | np.ndarray, link_seconds: Sequence[float] | np.ndarray
) -> float:
    """T of the module's docstring: seconds between two microbatches of a long 1F1B pipeline.

    Args:
        rank_seconds: t, forward and backward of one microbatch, shape (p,).
        link_seconds: e, one transfer over each link, shape (p - 1,).
    """
    t, e = np.asarray(rank_seconds, dtype=float), np.asarray(link_seconds, dtype=float)
    worst = 0.0
    for first in range(len(t)):
        window = 0.0
        for last in range(first, len(t)):
            window += t[last] + (2 * e[last - 1] if last > first else 0.0)
            worst = max(worst, window / (last - first + 1))
    return worst


def network_aware_partition(
    seconds: Sequence[float],
    ranks: int,
    *,
    boundary_seconds: Sequence[float],
    link_factors: Sequence[float] | None = None,
    speeds: Sequence[float] | None = None,
) -> Partition:
    """The contiguous partition with the shortest steady period of 1F1B over these links.

    Bisection on the period, an O(p L^2) table each time.

    Args:
        seconds: forward and backward of one microbatch of each layer, shape (L,).
        ranks: p <= L.
        boundary_seconds: transfer of one microbatch after each layer but the last, at factor 1,
            shape (L - 1,).
        link_factors: how much slower each link is, shape (p - 1,); default all 1.
        speeds: relative speed of each rank, shape (p,).

    Raises:
        PlanningError: fewer layers than ranks, or bad seconds or speeds.
    """
    blind = exact_partition(seconds, ranks, RankCapacity(speeds=speeds))
    if ranks == 1:
        return blind
    factors = np.ones(ranks - 1) if link_factors is None else np.asarray(link_factors, dtype=float)
    transfer = np.asarray(boundary_seconds, dtype=float)
    low = float(blind.loads(seconds, speeds).max())
    best, high = blind, _period(blind, seconds, transfer, factors, speeds)
    while high - low > _TOLERANCE * high:
        middle = (low + high) / 2
        found = _within(middle, seconds, ranks, transfer, factors, speeds)
        if found is None:
            low = middle
        else:
            best, high = found, min(middle, _period(found, seconds, transfer, factors, speeds))
    return best


def _period(
    partition: Partition,
    seconds: Sequence[float],
    transfer: np.ndarray,
    factors: np.ndarray,
    speeds: Sequence[float] | None,
) -> float:
    links = [transfer[cut - 1] * factor for cut, factor in zip(partition.bounds[1:-1], factors, strict=True)]
    return steady_period_seconds(partition.loads(seconds, speeds), links)


def _within(
    period: float,
    seconds: Sequence[float],
    ranks: int,
    transfer: np.ndarray,
    factors: np.ndarray,
    speeds: Sequence[float] | None,
) -> Partition | None:
    """A partition whose period is at most ``period``, or None where there is none."""

    def least_excess(step: CutStep) -> tuple[np.ndarray, np.ndarray]:
        carried = step.before
        if step.rank:
            link = 2 * transfer[step.first - 1] * factors[step.rank - 1]
            carried = np.maximum(0.0, step.before + link)
        value = step.loads - period + carried
        value[value > period * 1e-12] = np.inf
        return value, value.argmin(axis=1)

    excess, found = best_cuts(ranks, len(seconds), loads_on_ranks(seconds, ranks, speeds), least_excess)
    return found if np.isfinite(excess) else None
