"""Pools that are closed to a job because of ``spec.spot``."""

from collections.abc import Collection, Iterable, Mapping

from ballast_operator.allocator.problem.capacity_types import PoolKind
from ballast_operator.allocator.problem.gang_size import Refusal
from ballast_operator.api.conditions import JobReason
from ballast_operator.api.costs.spot_use import SpotUse
from ballast_operator.api.node_pool import CapacityType
from ballast_operator.views.job import JobView

_CLOSED = {
    SpotUse.ALLOW: None,
    SpotUse.FORBID: CapacityType.SPOT,
    SpotUse.REQUIRE: CapacityType.ON_DEMAND,
}


def told_apart(
    marks: Mapping[str, str], kinds: Mapping[str, PoolKind], jobs: Iterable[JobView]
) -> Mapping[str, str]:
    """``marks`` of pools with their capacity types, if one of ``jobs`` tells these apart."""
    if all(view.spec is None or view.spec.spot is SpotUse.ALLOW for view in jobs):
        return marks
    return {pool: f"{kind.capacity_type} {marks.get(pool, '')}" for pool, kind in kinds.items()}


def pools_closed(spot: SpotUse, kinds: Mapping[str, PoolKind]) -> frozenset[str]:
    """Pools whose machines the job must not be started on."""
    return frozenset(pool for pool, kind in kinds.items() if kind.capacity_type is _CLOSED[spot])


def no_pool_left(spot: SpotUse, closed: Collection[str], pools: Collection[str]) -> Refusal | None:
    """Why a job that may use ``pools`` otherwise cannot be placed; None: some of them are open to it."""
    if not pools or any(pool not in closed for pool in pools):
        return None
    what = "spot machines" if spot is SpotUse.FORBID else "machines that are not spot"
    return Refusal(
        reason=JobReason.NO_MATCHING_CAPACITY_TYPE,
        message=f"spec.spot is {spot}, and all pools of its GPU types have {what}: "
        f"{', '.join(sorted(pools)[:5])}. To fix: set spec.spot to Allow, or add a pool",
    )


def left_out(spot: SpotUse, closed: Iterable[str]) -> str:
    """Which pools a job is not offered, as text; empty: none."""
    named = ", ".join(sorted(closed)[:5])
    return f"spec.spot is {spot}: not offered {named}" if named else ""
