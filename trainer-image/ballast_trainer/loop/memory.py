"""Bytes of each layer on each stage: held, activations in flight, and further versions of the weights."""

import functools
import math
from collections.abc import Sequence

from ballast_policies.planning.schedules import Schedule, ScheduleFacts, validate

from ballast_trainer.loop.state import TrainingState
from ballast_trainer.pipeline.layout import ScheduleRequest


def stage_bytes(
    training: TrainingState, held: Sequence[int], weights: Sequence[int], *, ranks: int, by_rank: bool = False
) -> list[list[float]]:
    """Bytes of each layer on each stage of a pipeline of ``ranks`` positions, shape (stages, L).

    Held bytes, activations of as many microbatches as the schedule has in flight there, and a copy of
    the weights for each further version that it keeps.  Activations count once they are measured.

    Args:
        training: the job, which gives the schedule and the measured activations.
        held: parameters, gradients and optimizer state of each layer, shape (L,).
        weights: the parameters alone, shape (L,).
        ranks: positions of the pipeline.
        by_rank: a row a position rather than a stage, for ranks whose stages count as one.

    Raises:
        ConfigurationError: the counts do not suit the schedule.
    """
    kept = training.profile.activation_bytes() or (0,) * len(held)
    if ranks == 1:
        # One rank alone goes through its microbatches one by one.
        flying, versions = [1.0], [1]
    else:
        schedule, facts = _facts(training.schedule_request(ranks))
        flying, versions = list(map(float, facts.stage_in_flight)), list(facts.versions_held)
        if by_rank:
            own = [
                [stage for stage, holders in enumerate(schedule.stage_ranks) if rank in holders]
                for rank in range(ranks)
            ]
            flying = [count / len(stages) for count, stages in zip(facts.in_flight, own, strict=True)]
            versions = [max(facts.versions_held[stage] for stage in stages) for stages in own]
    return [
        [
            size + in_flight * activation + (version - 1) * weight
            for size, activation, weight in zip(held, kept, weights, strict=True)
        ]
        for in_flight, version in zip(flying, versions, strict=True)
    ]


@functools.lru_cache(maxsize=32)
def _facts(request: ScheduleRequest) -> tuple[Schedule, ScheduleFacts]:
    if request.asynchronous:
        # Long enough that the pipeline fills, and that as many versions are held as in any longer run.
        schedule = request.run_of(2 + math.ceil(2 * request.ranks / request.microbatches))
    else:
        schedule = request.one_step()
    return schedule, validate(schedule)
