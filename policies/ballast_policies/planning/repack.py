"""Repacking: the same layers on fewer ranks (DynMo supplement, Algorithm 3, corrected).

The published loop moves all layers of one rank onto any other with room, and forgets to break and
to keep the order of layers.  Here neighbours merge, so stages stay contiguous: of each number of
ranks the subset with the smallest largest load is found exactly, under the memory limits, and among
equals the one for which the fewest bytes travel.  Rank 0 always stays (it hosts the rendezvous).
"""

import dataclasses
from collections.abc import Callable, Sequence

from ballast_policies.planning.balancers.subset import RankSubsets
from ballast_policies.planning.partition import Partition
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
    target_ranks: int | None = None,
    max_slowdown: float = 0.1,
    reference_step_seconds: float | None = None,
    speeds: Sequence[float] | None = None,
    bytes: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    bytes_on: Callable[[int], Sequence[Sequence[float]]] | None = None,
    schedulable: Callable[[int], bool] | None = None,
) -> RepackDecision:
    """The fewest ranks, or the number asked for, if the step is at most (1 + max_slowdown) x the reference.

    Args:
        partition: the one in force.
        seconds: measured seconds per step of each layer.
        microbatches: per step.
        min_ranks: never fewer.
        target_ranks: this many ranks or all of today's; None: the fewest that are enough ("best").
        max_slowdown: how much slower a step may get, relative to the reference.
        reference_step_seconds: what "no slower" means; default: today's prediction. A job whose
            layers got cheaper may give its step time of before the change.
        speeds: relative speed of each rank.
        bytes: bytes of each layer.
        memory: bytes that each rank can hold.
        bytes_on: for a number of ranks n, what each layer takes at each place of their pipeline, shape
            (n, L), if not ``bytes``: activations of the microbatches in flight there count with it.
        schedulable: whether the job's schedule exists on so many ranks; default: on any number.

    Raises:
        PlanningError: memory without bytes, or for another number of ranks.
    """
    before = predict_step_seconds(partition.loads(seconds, speeds), microbatches)
    reference = before if reference_step_seconds is None else reference_step_seconds
    limit = reference * (1 + max_slowdown)
    reasons = []
    subsets = RankSubsets(partition, seconds, speeds=speeds, bytes=bytes, memory=memory, bytes_on=bytes_on)
    fewest, most = max(1, min_ranks), partition.ranks
    if target_ranks is not None:
        fewest, most = max(fewest, target_ranks), min(most, target_ranks + 1)
    for ranks in range(fewest, most):
        if schedulable is not None and not schedulable(ranks):
            reasons.append(f"{ranks}: the schedule does not exist on so many ranks")
            continue
        found = subsets.best(ranks)
        if found is None:
            reasons.append(f"{ranks}: the layers do not fit the memory of any {ranks} ranks with rank 0")
            continue
        kept, candidate = found.ranks, found.partition
        kept_speeds = None if speeds is None else [speeds[rank] for rank in kept]
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
        + ("; ".join(reasons) or f"{max(partition.ranks, fewest)} is the least allowed"),
    )
