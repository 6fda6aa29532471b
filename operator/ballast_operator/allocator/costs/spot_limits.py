"""``spec.spot`` of the ClusterPolicy: what it leaves of spot pools, and whether jobs are kept off them."""

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from ballast_policies.rounds import Node, Placement, Round, SpotLimits
from ballast_policies.rounds.spot_limits import nodes_by_place

from ballast_operator.allocator.problem.capacity import ClusterCapacity
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


def within_limits(
    capacity: ClusterCapacity, limits: SpotLimits, running: Iterable[Placement], wanted: Sequence[int]
) -> ClusterCapacity:
    """The capacity with the spot GPUs that could be in use at a time, so that shares are ones to be had.

    Its nodes stay as they are: which of them are not offered, each round decides. Where not all pools can be
    used whole, the cheapest come first. What runs counts in any case.

    Args:
        capacity: of the policy's pools.
        limits: of spot machines.
        running: where gangs run.
        wanted: the most GPUs of each job.
    """
    if not limits.limits and not capacity.withheld:
        return capacity
    has: Counter[str] = Counter()
    places: dict[str, Counter[str]] = {}
    for node in capacity.nodes:
        has[node.pool] += node.gpus
        places.setdefault(node.pool, Counter())[node.place] += node.gpus
    held: Counter[str] = Counter()
    for placement in running:
        for name, nodes in placement.nodes_by_pool.items():
            held[name] += len(nodes)
    spot = sum(has[pool] for pool in limits.pools)
    demand, largest = sum(wanted), max(wanted, default=0)
    beside = limits.most_beside(has.total() - spot)
    most = math.inf if beside is None else min(beside, limits.most(demand))
    left = most - sum(held[pool] for pool in limits.pools)
    part = limits.most_in_one_pool
    usable = {}
    for pool in sorted(capacity.pools, key=lambda pool: (pool.price <= 0, pool.price, pool.pool)):
        if pool.pool not in limits.pools:
            continue
        there: float = has[pool.pool]
        if part < 1:
            most_there = max(largest, part * min(demand, spot))
            there = sum(
                min(gpus, part / (1 - part) * (spot - gpus) + largest, most_there)
                for gpus in places.get(pool.pool, {}).values()
            )
        more = int(max(0, min(there - held[pool.pool], left)))
        left -= more
        usable[pool.pool] = min(has[pool.pool], held[pool.pool] + more)
    withheld: Counter[str] = Counter()
    pools = []
    for pool in capacity.pools:
        gpus = usable.get(pool.pool, pool.gpus)
        withheld[pool.gpu_type] += pool.gpus - gpus
        pools.append(dataclasses.replace(pool, gpus=gpus))
    return dataclasses.replace(capacity, pools=tuple(pools), withheld=withheld)


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
