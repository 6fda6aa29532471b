"""Times to look at the partition, and the review of moves.

Looking and moving cost about the same each time; an uneven partition costs more the longer it stays.  So the
time to look is when the steps since the last look have lost as much as a look and a move cost: the rule of
renting until the rent has reached the price (Karlin et al. 1988), which never pays more than twice what
knowing the future would.  Loads that change fast lose fast, and are looked at soon; even ones never.

Costs expected of layers follow from the last steps that were measured.  Of measurements without a trend it is
the median, which noise and single disturbed steps do not move.  But a median of measurements on their way is
as old as their middle one.  So where they rise or fall beyond doubt, it is the line through them (Theil 1950,
Sen 1968: the median slope of all pairs), and where they have jumped, the level that they have reached.
"""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.registry import BalancerInput
from ballast_policies.planning.partition import PlanningError

_LONGEST_BACK_OFF = 10
"""Looks in a row without a move after which waiting is not doubled any more."""


def lost_seconds(asked: BalancerInput, *, min_gain: float) -> float:
    """Seconds that a step loses under the partition in force against the best one; 0 below ``min_gain``.

    ``min_gain``: relative gain in step time below which no layer would move. Where ranks hold several stages
    the best partition is the one from which the balancer would begin to search.

    Raises:
        PlanningError: no partition fits the memory.
    """
    partition, seconds, microbatches = asked.partition, asked.seconds, asked.microbatches
    now = asked.step_seconds(partition)
    if asked.staged is not None:
        return _worth(now - asked.step_seconds(asked.staged.evened(partition)), now, min_gain)
    if now <= 0:
        return 0.0
    if asked.capacity.speeds is None:
        # No partition has a smaller largest load than the work spread evenly, nor than the largest layer.
        bound = max(sum(seconds) / partition.ranks, *seconds)
        if (partition.loads(seconds).max() - bound) * (microbatches - 1) / microbatches < min_gain * now:
            return 0.0
    best = exact_partition(seconds, partition.ranks, asked.capacity)
    return _worth(now - asked.step_seconds(best), now, min_gain)


def _worth(lost: float, now: float, min_gain: float) -> float:
    return lost if lost > 0 and lost >= min_gain * now else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class CheckTimer:
    """Seconds lost since the last check.

    Attributes:
        lost: seconds.
        in_vain: looks in a row after which nothing moved, though something was lost.
    """

    lost: float = 0.0
    in_vain: int = 0

    def after_step(self, lost: float) -> "CheckTimer":
        """A step is done that lost this many seconds."""
        return dataclasses.replace(self, lost=self.lost + lost)

    def after_look(self, *, moved: bool) -> "CheckTimer":
        """The partition was looked at; where nothing moved, the next look waits for twice the loss."""
        return CheckTimer(in_vain=0 if moved else min(self.in_vain + 1, _LONGEST_BACK_OFF))

    def is_over(self, cost: float) -> bool:
        """True if a check is due. ``cost``: seconds of a look and a move."""
        return self.lost > 0 and self.lost >= cost * 2**self.in_vain


def measured_worse(
    before: Sequence[float], after: Sequence[float], *, predicted: float, min_gain: float
) -> bool:
    """True if steps after a move are slower than without it, beyond any doubt of the measurement.

    So that noise reverts nothing, the fastest step after has to be slower than the slowest one before, each
    brought to today's costs of the layers: with five steps after and eight before, steps of one
    distribution come out so in one case of 1,287.

    Args:
        before: measured over predicted seconds of the last steps before the move.
        after: measured seconds of the steps since.
        predicted: seconds of a step under the partition of before, by today's costs.
        min_gain: relative difference that counts at all.
    """
    return bool(before and after) and min(after) > max(before) * predicted * (1 + min_gain)


DEVIATIONS = 2.0
"""The expected value is at most this many times as far from the median as the furthest measurement."""
_SIGNIFICANT = 2.4
"""Standard deviations of Kendall's sum from which a trend is none of chance: all five of five measurements in
order, or 24 of the 28 pairs of eight (of noise alone, one series in 70)."""
_FEWEST = 5
"""Measurements of which a trend can be told."""


def expected_costs(steps: Sequence[int], measured: Sequence[Sequence[float]], at: float) -> tuple[float, ...]:
    """The expected value of each series at a step; never below 0.

    Args:
        steps: at which they were measured, growing, shape (n,), n >= 1.
        measured: by step, shape (n, k) for k series, finite.
        at: a step, not before the last one measured.

    Returns:
        Shape (k,).  Within :data:`DEVIATIONS` times the largest deviation of a series from its median.

    Raises:
        PlanningError: nothing was measured, shapes do not match, steps do not grow, or a value is not finite.
    """
    at_steps, values = _checked(steps, measured, at)
    expected = np.median(values, axis=0)
    moving = _trending(values)
    if moving.any():
        expected[moving] = _followed(at_steps, values[:, moving], expected[moving], at)
    return tuple(np.maximum(expected, 0.0).tolist())


def _checked(
    steps: Sequence[int], measured: Sequence[Sequence[float]], at: float
) -> tuple[np.ndarray, np.ndarray]:
    fix = "To fix: one row of finite values for each measured step, steps growing"
    try:
        at_steps, values = np.asarray(steps, dtype=float), np.asarray(measured, dtype=float)
    except ValueError as error:
        raise PlanningError(f"measured: rows of different lengths. {fix}") from error
    if values.ndim != 2 or not len(values) or at_steps.shape != values.shape[:1]:
        raise PlanningError(f"measured: shape {values.shape} for {len(at_steps)} steps. {fix}")
    if not np.isfinite(values).all():
        raise PlanningError(f"measured: not all values are finite, got {values.tolist()}. {fix}")
    if not np.isfinite(at_steps).all() or (np.diff(at_steps) <= 0).any():
        raise PlanningError(f"steps: {list(steps)} do not grow. {fix}")
    if not at >= at_steps[-1] or math.isinf(at):
        raise PlanningError(f"at: {at} is no step after the last one measured, {steps[-1]}. {fix}")
    return at_steps, values


def _trending(values: np.ndarray) -> np.ndarray:
    """Mask (k,) of the series that rise or fall beyond doubt, by Mann and Kendall's test."""
    count = len(values)
    if count < _FEWEST:
        return np.zeros(values.shape[1], dtype=bool)
    first, second = np.triu_indices(count, 1)
    ordered = np.abs(np.sign(values[second] - values[first]).sum(axis=0))
    deviation = math.sqrt(count * (count - 1) * (2 * count + 5) / 18)
    return np.asarray(ordered >= _SIGNIFICANT * deviation)


def _followed(steps: np.ndarray, values: np.ndarray, median: np.ndarray, at: float) -> np.ndarray:
    """The line through each series at a step, or the level that it has jumped to; shape (k,)."""
    first, second = np.triu_indices(len(steps), 1)
    slope = np.median((values[second] - values[first]) / (steps[second] - steps[first])[:, None], axis=0)
    since = steps - at
    here = np.median(values - np.outer(since, slope), axis=0)
    off_line = np.abs(values - here - np.outer(since, slope)).sum(axis=0)
    furthest = DEVIATIONS * np.abs(values - median).max(axis=0)
    level, off_level = _jumped(values)
    # A series that has jumped goes no further by itself.
    return np.where(off_level <= off_line, level, np.clip(here, median - furthest, median + furthest))


def _jumped(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The later one of two levels that fit each series best, and the sum of what they miss; shapes (k,)."""
    levels, missed = [], []
    for split in range(2, len(values) - 1):
        older, newer = values[:split], values[split:]
        levels.append(np.median(newer, axis=0))
        missed.append(
            np.abs(older - np.median(older, axis=0)).sum(axis=0) + np.abs(newer - levels[-1]).sum(axis=0)
        )
    best = np.argmin(missed, axis=0)
    each = np.arange(values.shape[1])
    return np.array(levels)[best, each], np.array(missed)[best, each]
