"""Kinds of machines of pools, as stated or as labels say, which jobs may use them, and limits of spot."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ballast_policies.rounds.question import SpotLimits
from ballast_policies.rounds.spot_limits import nodes_by_place
from ballast_policies.rounds.values import Node, Round

from ballast_operator.allocator.problem.gang_size import Refusal
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.api.conditions import JobReason, some_of
from ballast_operator.api.costs import SpotUse
from ballast_operator.api.node_pool import CapacityType, NodePool
from ballast_operator.api.policy_conditions import PolicyCondition, PolicyReason
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView
from ballast_operator.views.notices import capacity_type_of

NAMED_NODES = 3
"""Nodes that a message names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PoolKind:
    """What kind of machines a pool has.

    Attributes:
        capacity_type: that counts.
        conflict: what contradicts it, as text; empty: nothing does.
    """

    capacity_type: CapacityType = CapacityType.ON_DEMAND
    conflict: str = ""


def pool_kind(pool: NodePool, nodes: Sequence[NodeView]) -> PoolKind:
    """What counts for ``pool``: its own word, else most of its nodes' labels, else its selector's."""
    said: dict[CapacityType, list[tuple[str, str]]] = {}
    for node in nodes:
        found = capacity_type_of(node.labels)
        if found is not None:
            said.setdefault(found[0], []).append((node.name, found[1]))
    counts = Counter({kind: len(entries) for kind, entries in said.items()})
    selected = capacity_type_of(pool.node_selector)
    kind = pool.capacity_type
    if kind is None and counts:
        kind = max(counts, key=lambda one: (counts[one], one))
    elif kind is None:
        kind = selected[0] if selected is not None else CapacityType.ON_DEMAND
    others = [entry for other, entries in said.items() if other is not kind for entry in entries]
    if not others:
        return PoolKind(capacity_type=kind)
    named = some_of([f"{name} ({label})" for name, label in others], NAMED_NODES)
    stated = "capacityType is" if pool.capacity_type is not None else "most nodes are"
    conflict = f"pool {pool.name}: {stated} {kind}, but not of {named}"
    return PoolKind(capacity_type=kind, conflict=conflict)


def types_differ(kinds: Iterable[PoolKind]) -> list[tuple[PolicyCondition, bool, PolicyReason, str]]:
    """The condition CapacityTypesAgree, where labels contradict; nothing where none does."""
    conflicts = [kind.conflict for kind in kinds if kind.conflict]
    if not conflicts:
        return []
    fix = "To fix: a pool for each type, or correct nodePools[].capacityType"
    message = f"{'; '.join(conflicts[:5])}. {fix}"
    return [(PolicyCondition.CAPACITY_TYPES_AGREE, False, PolicyReason.TYPES_DIFFER, message)]


_CLOSED = {
    SpotUse.ALLOW: None,
    SpotUse.FORBID: CapacityType.SPOT,
    SpotUse.REQUIRE: CapacityType.ON_DEMAND,
}


def told_apart(
    marks: Mapping[str, str], kinds: Mapping[str, PoolKind], jobs: Iterable[JobView]
) -> Mapping[str, str]:
    """``marks`` of pools with their capacity types, if one of ``jobs`` tells these apart."""
    specs = [view.spec for view in jobs if view.spec is not None]
    if all(spec.spot is SpotUse.ALLOW and spec.deadline is None for spec in specs):
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


def spot_limits(spec: ClusterPolicySpec, kinds: Mapping[str, PoolKind]) -> SpotLimits:
    """The limits over the pools that are spot at present."""
    return SpotLimits(
        pools=frozenset(pool for pool, kind in kinds.items() if kind.capacity_type is CapacityType.SPOT),
        on_demand_share=spec.spot.on_demand_share,
        most_in_one_pool=spec.spot.most_in_one_pool,
    )


def within_spot_limits(
    limits: SpotLimits, decided: Round | None, nodes: Iterable[Node] = ()
) -> list[tuple[PolicyCondition, bool, PolicyReason, str]]:
    """The condition WithinSpotLimits after a round; nothing where nothing is limited.

    ``nodes``: with their zones.
    """
    if not limits.limits or decided is None:
        return []
    places, used, total = {node.name: node.place for node in nodes}, Counter[str](), 0
    for placement in decided.first_placements.values():
        total += len(placement.nodes)
        for place, there in nodes_by_place(placement, places, limits.pools).items():
            used[place] += len(there)
    in_use, spot = dict(sorted(used.items())), used.total()
    message = f"{spot} of {total} GPUs in use are spot" + (
        f" ({', '.join(f'{count} of pool {pool}' for pool, count in in_use.items())})" if in_use else ""
    )
    if decided.kept_off_spot:
        jobs = sorted(decided.kept_off_spot)
        why = decided.kept_off_spot[jobs[0]]
        message += f"; kept off spot machines: {some_of(jobs)}, by {why}"
        return [(PolicyCondition.WITHIN_SPOT_LIMITS, False, PolicyReason.SPOT_LIMIT_REACHED, message)]
    if spot > limits.most(total):
        message += f", at most {limits.most(total)} could be started; what runs stays"
        return [(PolicyCondition.WITHIN_SPOT_LIMITS, False, PolicyReason.SPOT_LIMIT_EXCEEDED, message)]
    return [(PolicyCondition.WITHIN_SPOT_LIMITS, True, PolicyReason.SPOT_AS_ALLOWED, message)]
