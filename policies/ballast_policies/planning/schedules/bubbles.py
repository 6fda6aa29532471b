"""Idle fraction of a pipeline: by formula, and split into the parts of the schedule and of imbalance."""

import dataclasses
from collections.abc import Sequence
from math import ceil

from ballast_policies.planning.schedules.costs import StageCosts, even_costs
from ballast_policies.planning.schedules.schedule import Schedule
from ballast_policies.planning.schedules.simulate import simulate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BubbleSplit:
    """Idle fractions of all ranks' time; ``inherent + dynamic == idle``.

    Attributes:
        idle: of the schedule with its own costs.
        inherent: of the same schedule with the same work spread evenly over the stages.
        dynamic: the rest, which balancing can win back. A little below 0 where a pipeline of few
            microbatches, or one with slow transfers, fills faster with uneven stages than with even ones.
    """

    idle: float
    inherent: float
    dynamic: float


def split_bubble(schedule: Schedule, costs: StageCosts) -> BubbleSplit:
    """Idle time with these costs, and with the same total work on even stages at even speeds."""
    idle = simulate(schedule, costs).idle_fraction
    inherent = simulate(schedule, _evened(schedule, costs)).idle_fraction
    return BubbleSplit(idle=idle, inherent=inherent, dynamic=idle - inherent)


def split_measured_bubble(
    schedule: Schedule, *, busy_seconds: Sequence[float], step_seconds: float, forward_share: float = 1 / 3
) -> BubbleSplit:
    """The same split of a measured step.

    ``inherent`` is the idle time of the schedule with the measured work on even stages, without
    transfers; so ``dynamic`` holds imbalance and all that the schedule does not explain (transfers,
    the runtime, noise).

    Args:
        schedule: the one that ran.
        busy_seconds: seconds of computing of each rank in the step, shape (p,).
        step_seconds: the whole step.
        forward_share: forward seconds over forward and backward seconds.

    Raises:
        ValueError: another number of ranks, or a step without time.
    """
    if len(busy_seconds) != schedule.ranks or step_seconds <= 0:
        raise ValueError(
            f"{len(busy_seconds)} busy times and a step of {step_seconds} s for {schedule.ranks} ranks"
        )
    idle = 1.0 - sum(busy_seconds) / (len(busy_seconds) * step_seconds)
    even = even_costs(schedule.stages, forward=forward_share, backward=1 - forward_share)
    inherent = simulate(schedule, even).idle_fraction
    return BubbleSplit(idle=idle, inherent=inherent, dynamic=idle - inherent)


def pipeline_bubble(ranks: int, microbatches: int, chunks: int = 1) -> float:
    """(p - 1) / (v m): idle over ideal time of GPipe, 1F1B and interleaved 1F1B (dissertation 4.2.2)."""
    return (ranks - 1) / (chunks * microbatches)


def optimal_active_minibatches(workers: int, input_stage_replicas: int) -> int:
    """PipeDream's NOAM: inputs admitted per replica of the input stage (dissertation 2.4.2)."""
    return ceil(workers / input_stage_replicas)


def _evened(schedule: Schedule, costs: StageCosts) -> StageCosts:
    """The same seconds in total, the same on every stage of every rank."""

    def mean(values: tuple[float, ...]) -> tuple[float, ...]:
        if not values:
            return ()
        slowed = [
            value * sum(1 / (costs.speeds[rank] if costs.speeds else 1.0) for rank in holders) / len(holders)
            for value, holders in zip(values, schedule.stage_ranks, strict=True)
        ]
        return (sum(slowed) / len(slowed),) * len(slowed)

    return dataclasses.replace(
        costs,
        forward=mean(costs.forward),
        backward=mean(costs.backward),
        backward_input=mean(costs.backward_input),
        update=mean(costs.update),
        speeds=(),
    )
