"""Whether to move layers now: the gain over what is left of the run against the cost of moving."""

import dataclasses
from collections.abc import Sequence

from ballast_policies.planning.balancers.deepspeed import deepspeed_partition
from ballast_policies.planning.balancers.fewest_moves import nearest_partition
from ballast_policies.planning.balancers.network import network_aware_partition, steady_period_seconds
from ballast_policies.planning.diffusion import diffuse
from ballast_policies.planning.moves import Move, moves_between
from ballast_policies.planning.partition import Partition, PlanningError, bytes_taken, fits
from ballast_policies.planning.step_time import predict_step_seconds


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RebalanceDecision:
    """What to do, and why.

    Attributes:
        rebalance: True: move to ``partition``.
        partition: the partition to move to, or the one in force.
        moves: the layers that move.
        step_seconds_before, step_seconds_after: predicted seconds per step.
        why: in words, with numbers.
    """

    rebalance: bool
    partition: Partition
    moves: tuple[Move, ...]
    step_seconds_before: float
    step_seconds_after: float
    why: str


def decide_rebalance(
    partition: Partition,
    seconds: Sequence[float],
    *,
    microbatches: int,
    min_gain: float,
    horizon_steps: int,
    move_seconds: float | None = None,
    speeds: Sequence[float] | None = None,
    bytes: Sequence[int] | None = None,
    memory: Sequence[int] | None = None,
    rank_bytes: Sequence[Sequence[float]] | None = None,
    balanced: Sequence[float] | None = None,
    link_seconds: Sequence[float] | None = None,
    method: str = "exact",
) -> RebalanceDecision:
    """Compare the partition in force with the best one.

    Args:
        partition: the one in force.
        seconds: measured seconds per step of each layer.
        microbatches: per step.
        min_gain: least relative gain in step time, 0.05 is 5 %; below it nothing moves, so that
            noise in the measurement does not send layers back and forth.
        horizon_steps: steps over which the move has to pay for itself.
        move_seconds: what the last move cost; None: not known yet, taken as one step.
        speeds: relative speed of each rank.
        bytes: bytes of each layer: what travels with it.
        memory: bytes that each rank can hold.
        rank_bytes: what each layer takes on each rank, shape (p, L), if not ``bytes``: activations of as
            many microbatches as are in flight there count with it.
        balanced: what is spread evenly in place of the seconds, e.g. each layer's parameters; what is
            gained is told by the seconds all the same.
        link_seconds: with ``network``: transfer of one microbatch over each link, shape (p - 1,).
        method: ``exact`` (dynamic programming; of the optimal partitions, the one that moves the fewest
            bytes), ``diffusion`` (chain moves from today's), ``network`` (over slow links), or
            ``deepspeed`` (its rule, for reference).

    Raises:
        PlanningError: ``method`` is unknown, or no partition fits the memory; for ``deepspeed``, its
            one partition does not, or ranks are of unlike speed.
    """
    weights = seconds if balanced is None else balanced
    if method == "exact":
        candidate = nearest_partition(
            partition, weights, speeds=speeds, bytes=bytes, memory=memory, rank_bytes=rank_bytes
        )
    elif method == "diffusion":
        passed = diffuse(partition, weights, speeds=speeds, bytes=bytes, memory=memory, rank_bytes=rank_bytes)
        candidate = passed[-1] if passed else partition
    elif method == "network":
        candidate = _over_links(
            partition, weights, microbatches, link_seconds, speeds, bytes, memory, rank_bytes
        )
    elif method == "deepspeed":
        candidate = _by_deepspeed(partition, weights, speeds, bytes, memory, rank_bytes)
    else:
        raise PlanningError(f"method: {method!r} is not one of deepspeed, diffusion, exact, network")

    def step(of: Partition) -> float:
        loads = of.loads(seconds, speeds)
        if method != "network" or not link_seconds:
            return predict_step_seconds(loads, microbatches)
        # The steady period takes the place of the largest load; filling passes each link twice.
        period = steady_period_seconds(loads / microbatches, link_seconds)
        return (microbatches - 1) * period + float(loads.sum()) / microbatches + 2 * sum(link_seconds)

    before, after = step(partition), step(candidate)
    cost = before if move_seconds is None else move_seconds
    gain = (before - after) / before if before > 0 else 0.0
    moves = moves_between(partition, candidate)

    def decision(rebalance: bool, why: str) -> RebalanceDecision:
        return RebalanceDecision(
            rebalance=rebalance,
            partition=candidate if rebalance else partition,
            moves=moves if rebalance else (),
            step_seconds_before=before,
            step_seconds_after=after if rebalance else before,
            why=why,
        )

    if not moves or gain <= 0:
        return decision(False, "no other partition is faster")
    if gain < min_gain:
        return decision(False, f"the best partition gains {gain:.1%}, less than the {min_gain:.1%} asked for")
    saved = (before - after) * horizon_steps
    if saved <= cost:
        return decision(
            False, f"moving costs {cost:.3f} s and saves {saved:.3f} s over the next {horizon_steps} steps"
        )
    return decision(
        True,
        f"{len(moves)} layers move: {before:.4f} -> {after:.4f} s a step ({gain:.1%}), "
        f"saving {saved:.2f} s over {horizon_steps} steps for {cost:.3f} s",
    )


def _over_links(
    partition: Partition,
    weights: Sequence[float],
    microbatches: int,
    link_seconds: Sequence[float] | None,
    speeds: Sequence[float] | None,
    bytes: Sequence[int] | None,
    memory: Sequence[int] | None,
    rank_bytes: Sequence[Sequence[float]] | None,
) -> Partition:
    if link_seconds is None or len(link_seconds) != partition.ranks - 1:
        raise PlanningError(
            f"method network needs link_seconds for {partition.ranks - 1} links, got {link_seconds}"
        )
    found = network_aware_partition(
        [weight / microbatches for weight in weights],
        partition.ranks,
        boundary_seconds=[1.0] * (partition.layers - 1),
        link_factors=link_seconds,
        speeds=speeds,
    )
    if not fits(found, bytes, memory, rank_bytes):
        # The shortest period does not fit: the best partition that does, blind to the links.
        return nearest_partition(
            partition, weights, speeds=speeds, bytes=bytes, memory=memory, rank_bytes=rank_bytes
        )
    return found


def _by_deepspeed(
    partition: Partition,
    weights: Sequence[float],
    speeds: Sequence[float] | None,
    bytes: Sequence[int] | None,
    memory: Sequence[int] | None,
    rank_bytes: Sequence[Sequence[float]] | None,
) -> Partition:
    if speeds is not None and min(speeds) != max(speeds):
        raise PlanningError(f"DeepSpeed's rule knows no speeds, got {list(speeds)}. To fix: method exact")
    found = deepspeed_partition(weights, partition.ranks)
    if not fits(found, bytes, memory, rank_bytes):
        raise PlanningError(
            f"DeepSpeed's rule knows no memory: its partition {found.bounds} needs "
            f"{bytes_taken(found, bytes, rank_bytes).tolist()} bytes of {memory}. To fix: method exact"
        )
    return found
