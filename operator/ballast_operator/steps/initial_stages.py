"""The stages of a launch: layers over ranks as evenly as numbers go, before anything was measured."""

from ballast_policies.contract import Stage
from ballast_policies.planning.schedules.schedule import loop_ranks, v_ranks

from ballast_operator.views.spec import JobSpec


def initial_stages(spec: JobSpec, ranks: int) -> tuple[Stage, ...]:
    """A stage of the plan for each stage of the schedule, in the order of the layers, the first ones larger.

    Empty leaves it to the trainer: the number of layers is not known, or some stage would have none.
    """
    placement = stage_ranks(spec.schedule, ranks=ranks, stages_per_rank=spec.stages_per_rank)
    if spec.layers is None or spec.layers < len(placement):
        return ()
    size, larger = divmod(spec.layers, len(placement))
    ends = [size * number + min(number, larger) for number in range(len(placement) + 1)]
    return tuple(
        Stage(rank=rank, first_layer=ends[number], end_layer=ends[number + 1])
        for number, rank in enumerate(placement)
    )


def stage_ranks(schedule: str, *, ranks: int, stages_per_rank: int) -> tuple[int, ...]:
    """The rank of each stage: they loop over the ranks, or fold back; a rank alone has the whole model."""
    if ranks == 1:
        return (0,)
    holders = v_ranks(ranks) if schedule == "ZeroBubbleV" else loop_ranks(ranks, stages_per_rank)
    return tuple(rank for (rank,) in holders)
