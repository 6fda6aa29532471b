"""The idle time of a step, split into the part of the schedule and of unevenly loaded ranks."""

import dataclasses

from ballast_policies.planning import predict_step_seconds
from ballast_policies.planning.schedules import split_bubble, stage_costs
from ballast_policies.planning.stages import partition_of

from ballast_trainer.loop.state import TrainingState
from ballast_trainer.profiling.profile import LayerCosts


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IdleSeconds:
    """Seconds per step that a rank of the mean is idle, by measured costs of the layers.

    Attributes:
        schedule: idle time of the schedule with the same work on even stages.
        imbalance: idle time that uneven stages add, and rebalancing can recover. A little below 0 where few
            microbatches fill a pipeline of uneven stages faster.
    """

    schedule: float
    imbalance: float


def idle_seconds(training: TrainingState, costs: LayerCosts) -> IdleSeconds:
    """The idle time that the schedule and the partition in force explain.

    Schedules with a flush are simulated; without one the closed form of a run between two drains is used.
    """
    positions = training.world.positions
    request = training.schedule_request(positions)
    if positions == 1:
        return IdleSeconds(schedule=0.0, imbalance=0.0)
    busy = sum(costs.forward + costs.backward) / positions
    if request.asynchronous:
        loads, microbatches = training.rank_loads(costs), training.microbatches_per_drain
        mean = sum(loads) / positions
        even = predict_step_seconds([mean] * positions, microbatches)
        return IdleSeconds(schedule=even - mean, imbalance=predict_step_seconds(loads, microbatches) - even)
    split = split_bubble(
        request.one_step(),
        stage_costs(
            partition_of(training.stages),
            forward_seconds=costs.forward,
            backward_seconds=costs.backward,
            microbatches=training.microbatches,
        ),
    )
    own = busy * split.inherent / (1 - split.inherent)
    return IdleSeconds(schedule=own, imbalance=busy * split.idle / (1 - split.idle) - own)
