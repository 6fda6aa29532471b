"""Work and memory of each rank of a forecast."""

import dataclasses
import itertools
from collections.abc import Sequence

from ballast_policies.contract.job.parallelism import ParallelismConfig
from ballast_policies.planning.memory.rank_bytes import rank_bytes
from ballast_policies.planning.partition import Partition
from ballast_policies.planning.profile import ProfiledLayer
from ballast_policies.planning.schedules.schedule import Schedule
from ballast_policies.planning.schedules.validate import validate


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankForecast:
    """One rank.

    Attributes:
        layers: first and end layer of each of its stages.
        busy_seconds: of a step.
        in_flight: most microbatches whose activations it holds at once, over its stages.
        weight_versions: most versions of a stage's weights it holds.
        held_bytes: weights, gradients, optimizer state, further versions of the weights.
        activation_bytes: at the fullest moment, besides what is held.
    """

    rank: int
    layers: tuple[tuple[int, int], ...]
    busy_seconds: float
    in_flight: int
    weight_versions: int
    held_bytes: float
    activation_bytes: float

    @property
    def bytes(self) -> float:
        """Everything at the fullest moment."""
        return self.held_bytes + self.activation_bytes


def cuts_of(partition: Partition) -> list[tuple[int, int]]:
    """First and end layer of each stage."""
    return list(itertools.pairwise(partition.bounds))


def rank_forecasts(
    partition: Partition,
    schedule: Schedule,
    rows: Sequence[ProfiledLayer],
    busy: Sequence[float],
    parallelism: ParallelismConfig,
) -> tuple[RankForecast, ...]:
    """The ranks of one pipeline.

    Args:
        partition: layers to stages.
        schedule: of one step, or of a run without a flush.
        rows: the layers.
        busy: seconds of a step by rank.
        parallelism: replicas of the pipeline, and what these share.
    """
    facts, cuts = validate(schedule), cuts_of(partition)
    found = []
    sizes = rank_bytes(
        partition,
        schedule,
        facts,
        rows,
        averaged=parallelism.data > 1,
        gradient_shares=parallelism.gradient_shares,
        weights_shared=parallelism.weight_shares > 1,
    )
    for rank, size in enumerate(sizes):
        own = [stage for stage, holders in enumerate(schedule.stage_ranks) if rank in holders]
        found.append(
            RankForecast(
                rank=rank,
                layers=tuple(cuts[stage] for stage in own),
                busy_seconds=busy[rank],
                in_flight=facts.in_flight[rank],
                weight_versions=max(facts.versions_held[stage] for stage in own),
                held_bytes=size.held,
                activation_bytes=size.step,
            )
        )
    return tuple(found)
