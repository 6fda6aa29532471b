"""What the nodes of each pool have cost, summed up in the ClusterPolicy's status."""

import dataclasses
from collections.abc import Mapping, Sequence

from ballast_policies.accounting import cost

from ballast_operator.allocator.costs.paid import Paid
from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.api.cluster_policy_status import ClusterPolicyStatus, PoolBill, PoolCapacity
from ballast_operator.api.node_pool import NodePool
from ballast_operator.kube.kinds import Object
from ballast_operator.views.assignment import PoolInfo
from ballast_operator.views.clock import Time

MOST_POOLS = 256
"""Pools that a bill keeps, those of earlier policies included."""


def written_bill(status: Object | None) -> tuple[tuple[PoolBill, ...], Time | None]:
    """(the bill of a ClusterPolicy's status, up to when it is); nothing where it cannot be read."""
    read = ClusterPolicyStatus.written(status, "bill", "billAt")
    return ((), None) if read is None else (read.bill, read.bill_at)


def brought_up_to(
    bill: Sequence[PoolBill], at: Time | None, now: Time, paid: Paid | None = None
) -> tuple[PoolBill, ...]:
    """The bill with the time from ``at`` to ``now`` added, at the GPUs and prices that it says.

    Every change of these is written when it is seen, so that they held all the time; while no operator ran,
    they are taken to have held as well. What jobs held is what they have ``paid``; None: by the GPUs, too.
    """
    seconds = 0.0 if at is None else max(0.0, (now - at).total_seconds())
    found = []
    for entry in bill:
        more = cost(entry.gpus * seconds, entry.price_per_gpu_hour)
        held, others = entry.held_cost, entry.deleted_jobs_cost
        data, others_data = entry.data_cost, entry.deleted_jobs_data_cost
        if paid is None:
            held += cost(min(entry.gpus, entry.gpus_held) * seconds, entry.price_per_gpu_hour)
        else:
            held, others = paid.gpus.of(entry.pool), paid.gpus.others.get(entry.pool)
            data, others_data = paid.data.of(entry.pool), paid.data.others.get(entry.pool)
        # A node that came since is paid for from when a job had it.
        more = max(more, held - entry.held_cost)
        found.append(
            entry.replace(
                gpu_seconds=entry.gpu_seconds + entry.gpus * seconds,
                cost=entry.cost + more,
                held_cost=held,
                deleted_jobs_cost=others,
                data_cost=data,
                deleted_jobs_data_cost=others_data,
            )
        )
    return tuple(found)


def next_bill(
    bill: Sequence[PoolBill],
    at: Time | None,
    now: Time,
    *,
    pools: Sequence[NodePool],
    capacity: Sequence[PoolCapacity],
    paid: Paid | None = None,
) -> tuple[PoolBill, ...]:
    """The bill up to now, and what is paid from now on; pools that are gone keep what they have cost."""
    known = {entry.pool: entry for entry in brought_up_to(bill, at, now, paid)}
    prices = {pool.name: pool.price_per_gpu_hour for pool in pools}
    found = {name: entry.replace(gpus=0, gpus_held=0) for name, entry in known.items()}
    for entry in capacity:
        before = known.get(entry.pool, new_pool(entry.pool, paid, now))
        found[entry.pool] = before.replace(
            gpu_type=entry.gpu_type,
            gpus=max(entry.gpus, entry.gpus_held),
            gpus_held=entry.gpus_held,
            price_per_gpu_hour=prices.get(entry.pool, before.price_per_gpu_hour),
        )
    # The pools in use are last: where there are too many, those go that are gone.
    used = {entry.pool for entry in capacity}
    ordered = sorted(found.values(), key=lambda entry: entry.pool in used)
    return tuple(ordered[-MOST_POOLS:])


def new_pool(pool: str, paid: Paid | None, now: Time) -> PoolBill:
    """The bill of a pool that begins now."""
    others = None if paid is None else paid.gpus.others.get(pool)
    others_data = None if paid is None else paid.data.others.get(pool)
    return PoolBill(pool=pool, since=now, deleted_jobs_cost=others, deleted_jobs_data_cost=others_data)


def pool_infos(
    pools: Sequence[NodePool], before: Mapping[str, PoolInfo], status: Object | None, *, at: Time
) -> dict[str, PoolInfo]:
    """The pools from ``at`` on; those that were not known ``before`` have cost until now what the bill says.

    ``status``: of the ClusterPolicy, as an operator has left it.
    """
    billed = {
        entry.get("pool"): entry.get("pricePerGpuHour", 0.0) for entry in (status or {}).get("bill") or []
    }
    losses = {entry.get("pool"): entry.get("perHour") for entry in (status or {}).get("hazard") or []}
    regions = {entry.get("pool"): entry.get("region", "") for entry in (status or {}).get("capacity") or []}
    found = {}
    for pool in pools:
        price, resource = pool.price_per_gpu_hour, pool.gpu_resource
        known = before.get(pool.name)
        if known is None:
            known = PoolInfo(price_per_hour=billed.get(pool.name, price), region=regions.get(pool.name, ""))
        found[pool.name] = dataclasses.replace(
            known.changed(price, resource, at=at),
            node_selector=pool.node_selector,
            start_seconds=pool.start_seconds,
            max_nodes=pool.max_nodes or 0,
            shares=pool.sharing is not None,
            losses_per_hour=losses.get(pool.name),
        )
    return found


def with_regions(infos: Mapping[str, PoolInfo], capacity: ClusterCapacity) -> dict[str, PoolInfo]:
    """``infos`` with the regions in which the pools are, and the prices of data between these."""
    regions, prices = capacity.regions, capacity.data_prices
    return {
        name: dataclasses.replace(info, region=regions.get(name, info.region), data_prices=prices)
        for name, info in infos.items()
    }
