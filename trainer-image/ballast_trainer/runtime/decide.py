"""Which layers go where: the planner's answers, from what this job measured."""

import itertools
from collections.abc import Sequence

from ballast_policies.contract import Proposal, Stage

from ballast_trainer.runtime.profile import LayerCosts
from ballast_trainer.runtime.state import Training


def stages_of(bounds: Sequence[int]) -> tuple[Stage, ...]:
    """Stages of a partition given by its bounds, 0 and the layer count included; one stage a rank."""
    return tuple(
        Stage(rank=rank, first_layer=first, end_layer=end)
        for rank, (first, end) in enumerate(itertools.pairwise(bounds))
    )


def usable_stages(stages: Sequence[Stage], ranks: int, layer_count: int) -> tuple[Stage, ...] | None:
    """A plan's stages where they fit the model and give every rank one, else None."""
    if not stages or stages[-1].end_layer != layer_count:
        return None
    return tuple(stages) if [stage.rank for stage in stages] == list(range(ranks)) else None


def even_stages(costs: LayerCosts | None, ranks: int, layer_count: int) -> tuple[Stage, ...]:
    """The best partition by measured costs, or the same number of layers on each rank before any."""
    return stages_of([layer_count * rank // ranks for rank in range(ranks + 1)])


def improved_stages(training: Training, *, move_seconds: float | None) -> tuple[Stage, ...] | None:
    """A partition that is worth moving to, or None."""
    return None


def repack_proposal(training: Training) -> Proposal | None:
    """An offer of ranks, where fewer are nearly as fast; None where they are not."""
    return None
