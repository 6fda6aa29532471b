"""``spec.spot`` of the ClusterPolicy: what it leaves of spot pools, and whether jobs are kept off them."""

from collections import Counter
from collections.abc import Iterable, Mapping

from ballast_policies.rounds import Node, Round, SpotLimits
from ballast_policies.rounds.spot_limits import nodes_by_place

from ballast_operator.allocator.problem.capacity_types import PoolKind
from ballast_operator.api.cluster_policy import ClusterPolicySpec
from ballast_operator.api.node_pool import CapacityType
from ballast_operator.api.policy_conditions import PolicyCondition, PolicyReason
from ballast_operator.views.names import some_of


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
