"""Steps of pipelines by playing their schedules, and what a measured step tells of the runtime."""

from collections.abc import Callable, Sequence

import numpy as np
from ballast_policies.planning.schedules.costs import StageCosts
from ballast_policies.planning.schedules.registry import build_schedule, stages_of
from ballast_policies.planning.schedules.simulate import simulate


def simulated_step_seconds(
    forward_loads: Sequence[float] | np.ndarray,
    backward_loads: Sequence[float] | np.ndarray,
    microbatches: int,
    *,
    schedule: str = "1F1B",
    chunks: int = 1,
    boundary_seconds: Sequence[float] = (),
    action_seconds: float = 0.0,
) -> float:
    """Seconds per step of one stage a rank (two for the V shapes), by playing the schedule.

    The first stage has no input that learns: where a schedule splits the backward, all of it is the
    weights' half there.

    Args:
        forward_loads: seconds per step of each stage's forwards (all microbatches).
        backward_loads: the same of its backwards.
        microbatches: m >= 1.
        schedule: a name of ``schedules.SCHEDULES`` with as many stages.
        chunks: stages a rank, where the schedule leaves it open.
        boundary_seconds: one transfer between each two stages; nothing where they share a rank.
        action_seconds: what the runtime needs for each forward and each backward besides its layers,
            half of it for each half of a split backward; :func:`fitted_action_seconds` finds it.

    Raises:
        ScheduleError: the schedule is unknown, or does not suit the number of stages.
    """
    stages = len(forward_loads)
    ranks = stages // stages_of(schedule, 1, chunks)
    backward = tuple(load / microbatches for load in backward_loads)
    costs = StageCosts(
        forward=tuple(load / microbatches for load in forward_loads),
        backward=backward,
        backward_input=(0.0, *(seconds / 2 for seconds in backward[1:])),
        transfer=tuple(boundary_seconds),
        action_seconds=action_seconds,
    )
    built = build_schedule(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return simulate(built, costs).makespan


def fitted_action_seconds(
    step_seconds: float, predict: Callable[[float], float], *, tolerance: float = 1e-3
) -> float:
    """Seconds that the runtime takes for each action, from a measured step, which the prediction then meets.

    One number stands for bookkeeping, waking up and the network's latency. It is found in the plan in
    force and holds for any other on the same machines.

    Args:
        step_seconds: measured.
        predict: action seconds -> predicted step, growing.
        tolerance: relative, of the step.

    Returns:
        Seconds, at least 0: a measured step below the prediction is the layers' noise.
    """
    low, high = 0.0, step_seconds
    if predict(low) >= step_seconds:
        return 0.0
    while predict(high) - predict(low) > tolerance * step_seconds:
        middle = (low + high) / 2
        low, high = (middle, high) if predict(middle) < step_seconds else (low, middle)
    return (low + high) / 2
