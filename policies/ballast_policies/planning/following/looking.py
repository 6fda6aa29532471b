"""Times to look at the partition, and the review of moves.

Looking and moving cost about the same each time; an uneven partition costs more the longer it stays.  So the
time to look is when the steps since the last look have lost as much as a look and a move cost: the rule of
renting until the rent has reached the price (Karlin et al. 1988), which never pays more than twice what
knowing the future would.  Loads that change fast lose fast, and are looked at soon; even ones never.
"""

import dataclasses
from collections.abc import Sequence

from ballast_policies.planning.balancers.exact import exact_partition
from ballast_policies.planning.balancers.several_stages import StagedPipeline
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.rank_capacity import UNLIMITED, RankCapacity
from ballast_policies.planning.step_time import predict_step_seconds

_LONGEST_BACK_OFF = 10
"""Looks in a row without a move after which waiting is not doubled any more."""


def lost_seconds(
    partition: Partition,
    seconds: Sequence[float],
    *,
    microbatches: int,
    min_gain: float,
    capacity: RankCapacity = UNLIMITED,
    staged: StagedPipeline | None = None,
) -> float:
    """What a step loses under ``partition`` against the best one; 0 where that is below ``min_gain``.

    Args:
        partition: the one in force.
        seconds: of each layer per step, shape (L,).
        microbatches: per step.
        min_gain: relative gain in step time below which no layer would move.
        capacity: speed and memory of the ranks.
        staged: where ranks hold several stages, their schedule: it is played, and the best partition is the
            one from which the balancer would begin to search.

    Raises:
        PlanningError: no partition fits the memory.
    """
    if staged is not None:
        now = staged.step_seconds(partition)
        return _worth(now - staged.step_seconds(staged.evened(partition)), now, min_gain)
    loads = partition.loads(seconds, capacity.speeds)
    now = predict_step_seconds(loads, microbatches)
    if now <= 0:
        return 0.0
    if capacity.speeds is None:
        # No partition has a smaller largest load than the work spread evenly, nor than the largest layer.
        bound = max(sum(seconds) / partition.ranks, *seconds)
        if (loads.max() - bound) * (microbatches - 1) / microbatches < min_gain * now:
            return 0.0
    best = exact_partition(seconds, partition.ranks, capacity)
    return _worth(
        now - predict_step_seconds(best.loads(seconds, capacity.speeds), microbatches), now, min_gain
    )


def _worth(lost: float, now: float, min_gain: float) -> float:
    return lost if lost > 0 and lost >= min_gain * now else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class CheckTimer:
    """What has been lost since the last look.

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
        """Whether it is time to look.

        Args:
            cost: seconds of a look and a move.
        """
        return self.lost > 0 and self.lost >= cost * 2**self.in_vain


def measured_worse(
    before: Sequence[float], after: Sequence[float], *, predicted: float, min_gain: float
) -> bool:
    """Whether steps after a move are slower than without it, beyond any doubt of the measurement.

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
