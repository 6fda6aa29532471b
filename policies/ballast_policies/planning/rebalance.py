"""The decision to move layers now: the time saved over the rest of the run against the cost of moving."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.balancers.registry import BALANCERS, BalancerInput
from ballast_policies.planning.partition import Partition, PlanningError, moved_layers


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceDecision:
    """Decision about a rebalance, with its reason.

    Attributes:
        rebalance: True: move to ``partition``.
        partition: the partition to move to, or the one in force.
        step_seconds_before, step_seconds_after: predicted seconds per step.
        why: the reason as text, with numbers.
        reverts: the last move is taken back, because it measured worse.
    """

    rebalance: bool
    partition: Partition
    step_seconds_before: float
    step_seconds_after: float
    why: str
    reverts: bool = False


def revert(partition: Partition, before: Partition) -> RebalanceDecision:
    """Go back to the partition of before the last move: this one has measured worse."""
    return RebalanceDecision(
        rebalance=True,
        partition=before,
        step_seconds_before=0.0,
        step_seconds_after=0.0,
        why="steps since the last move are slower than without it: it is taken back",
        reverts=True,
    )


def decide_rebalance(
    asked: BalancerInput,
    *,
    min_gain: float,
    horizon_steps: int,
    move_seconds: float | None = None,
    method: str = "exact",
) -> RebalanceDecision:
    """Compare the partition in force with the one that the balancer chooses.

    Args:
        asked: the partition in force, and what the balancer reads; the gain is computed from the seconds,
            whatever is balanced, and links count where the balancer measures them.
        min_gain: least relative gain in step time, 0.05 is 5 %; below it nothing moves (:func:`least_gain`).
        horizon_steps: steps over which the move has to pay for itself.
        move_seconds: what the last move cost; None: not known yet, taken as one step.
        method: a name of ``balancers.registry.BALANCERS``.

    Raises:
        PlanningError: ``method`` is unknown, its balancer does not suit the input, or no partition fits
            the memory.
    """
    balancer, partition = BALANCERS.find(method, PlanningError), asked.partition
    candidate = balancer.choose(asked)
    before, after = (
        asked.step_seconds(each, over_links=balancer.measures_links) for each in (partition, candidate)
    )
    cost = before if move_seconds is None else move_seconds
    moved = len(moved_layers(partition, candidate))
    pays, why = _pays(moved, before, after, cost=cost, min_gain=min_gain, horizon_steps=horizon_steps)
    return RebalanceDecision(
        rebalance=pays,
        partition=candidate if pays else partition,
        step_seconds_before=before,
        step_seconds_after=after if pays else before,
        why=why,
    )


def _pays(
    moves: int, before: float, after: float, *, cost: float, min_gain: float, horizon_steps: int
) -> tuple[bool, str]:
    """True if moving pays for itself, and the reason."""
    gain = (before - after) / before if before > 0 else 0.0
    if not moves or gain <= 0:
        return False, "no other partition is faster"
    if gain < min_gain:
        return False, f"the best partition gains {gain:.1%}, less than the {min_gain:.1%} asked for"
    saved = (before - after) * horizon_steps
    if saved <= cost:
        return (
            False,
            f"moving costs {cost:.3f} s and saves {saved:.3f} s over the next {horizon_steps} steps",
        )
    return True, (
        f"{moves} layers move: {before:.4f} -> {after:.4f} s a step ({gain:.1%}), "
        f"saving {saved:.2f} s over {horizon_steps} steps for {cost:.3f} s"
    )


STANDARD_ERRORS = 1.5
"""A gain below so many standard errors of the ranks' loads may be noise."""
MOST = 0.1
"""A gain of this is never taken for noise: steps of small layers on a shared machine tell no less."""
_FEWEST = 3
"""Measured steps of which noise can be told."""
_OF_A_MEDIAN = 1.25
"""Standard error of a median over that of a mean, of normal noise."""
_MEDIAN_CHANGE = 0.6745 * math.sqrt(2)
"""Median change from one measurement to the next, of normal noise with standard deviation 1."""


def least_gain(
    min_gain: float,
    measured: Sequence[Sequence[float]],
    partition: Partition,
    placement: Sequence[int] | None = None,
) -> float:
    """The gain below which nothing should move: ``min_gain``, or what noise may feign, up to ``MOST``.

    The cut that looks best of all is the one which noise has favoured most.  What counts is each rank's share
    of the work of all in a step, so that a step in which all were slower is no noise.  It is told from the
    changes between measured steps that follow each other: neither a trend nor a jump counts.

    Args:
        min_gain: in any case; 0: whatever gains at all.
        measured: seconds of each layer by measured step, shape (n, L).
        partition: the stages in force.
        placement: rank of each stage, with replicas the first, shape (stages,); None: one stage a rank.
    """
    seconds = np.asarray(measured, dtype=float)
    if min_gain <= 0 or len(seconds) < _FEWEST:
        return min_gain
    stages = np.add.reduceat(seconds, partition.bounds[:-1], axis=1)
    ranks = np.arange(partition.ranks) if placement is None else np.unique(placement, return_inverse=True)[1]
    loads = np.zeros((len(seconds), int(ranks.max()) + 1))
    np.add.at(loads.T, ranks, stages.T)
    whole = loads.sum(axis=1, keepdims=True)
    if not (whole > 0).all():
        return min_gain
    shares = loads / whole
    deviation = np.median(np.abs(np.diff(shares, axis=0)), axis=0) / _MEDIAN_CHANGE
    error = _OF_A_MEDIAN * math.sqrt((deviation**2).mean() / len(seconds)) / shares.mean()
    return max(min_gain, min(MOST, STANDARD_ERRORS * float(error)))
