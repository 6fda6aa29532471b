"""Repacking: the same layers on fewer ranks (DynMo supplement, Algorithm 3, corrected).

The published loop moves all layers of one rank onto any other with room, and forgets to break and
to keep the order of layers.  Here whole neighbours merge, so stages stay contiguous: kept ranks are
those whose first layers stay where they are most, rank 0 always among them (it hosts the
rendezvous), and the layers are then cut exactly over them under the memory limits.
"""

import dataclasses
from collections.abc import Sequence

from ballast_policies.planning.partition import Partition, PlanningError, exact_partition
from ballast_policies.planning.step_time import predict_step_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepackDecision:
    """Fewer ranks, or why not.

    Attributes:
        repack: True: ``kept_ranks`` are enough.
        kept_ranks: today's rank numbers, in the order of their new ranks; the first is 0.
        released_ranks: today's rank numbers that come free.
        partition: over the kept ranks, in the new numbering; the one in force where nothing is repacked.
        step_seconds_before, step_seconds_after: predicted.
        why: in words, with numbers.
    """

    repack: bool
    kept_ranks: tuple[int, ...]
    released_ranks: tuple[int, ...]
    partition: Partition
    step_seconds_before: float
    step_seconds_after: float
    why: str


def repack(
    partition: Partition,
    seconds: Sequence[float],
    *,
    microbatches: int,
    min_ranks: int = 1,
    max_slowdown: float = 0.1,
    reference_step_seconds: float | None = None,
    speeds: Sequence[float] | None = None,
    bytes: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
) -> RepackDecision:
    """The fewest ranks whose predicted step is at most (1 + max_slowdown) x the reference.

    Args:
        partition: the one in force.
        seconds: measured seconds per step of each layer.
        microbatches: per step.
        min_ranks: never fewer.
        max_slowdown: how much slower a step may get, relative to the reference.
        reference_step_seconds: what "no slower" means; default: today's prediction. A job whose
            layers got cheaper may give its step time of before the change.
        speeds: relative speed of each rank.
        bytes: bytes of each layer.
        memory: bytes that each rank can hold.
    """
    before = predict_step_seconds(partition.loads(seconds, speeds), microbatches)
    reference = before if reference_step_seconds is None else reference_step_seconds
    limit = reference * (1 + max_slowdown)
    reasons = []
    for ranks in range(max(1, min_ranks), partition.ranks):
        kept = _kept_ranks(partition, ranks)
        kept_speeds = None if speeds is None else [speeds[rank] for rank in kept]
        kept_memory = None if memory is None else [memory[rank] for rank in kept]
        try:
            candidate = exact_partition(seconds, ranks, speeds=kept_speeds, bytes=bytes, memory=kept_memory)
        except PlanningError as error:
            reasons.append(f"{ranks}: {error}")
            continue
        after = predict_step_seconds(candidate.loads(seconds, kept_speeds), microbatches)
        if after > limit:
            reasons.append(f"{ranks}: {after:.4f} s a step, over the limit of {limit:.4f} s")
            continue
        return RepackDecision(
            repack=True,
            kept_ranks=kept,
            released_ranks=tuple(rank for rank in range(partition.ranks) if rank not in kept),
            partition=candidate,
            step_seconds_before=before,
            step_seconds_after=after,
            why=(
                f"{ranks} of {partition.ranks} ranks are enough: {before:.4f} -> {after:.4f} s a step, "
                f"limit {limit:.4f} s"
            ),
        )
    return RepackDecision(
        repack=False,
        kept_ranks=tuple(range(partition.ranks)),
        released_ranks=(),
        partition=partition,
        step_seconds_before=before,
        step_seconds_after=before,
        why="cannot do with fewer ranks: "
        + ("; ".join(reasons) or f"{partition.ranks} is the least allowed"),
    )


def _kept_ranks(partition: Partition, ranks: int) -> tuple[int, ...]:
    """Spread over the old ranks, so that each kept one merges with its own right-hand neighbours."""
    return tuple(partition.ranks * rank // ranks for rank in range(ranks))
