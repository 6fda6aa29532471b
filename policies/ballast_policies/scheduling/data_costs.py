"""Costs of data that a job reads from another region, and what people are told of them."""

from collections.abc import Mapping, Sequence

from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.rounds.values import Placement
from ballast_policies.scheduling.state import ClusterJob

HOUR = 3600.0


def at_placement(of_pools: Mapping[str, float], placement: Placement) -> float:
    """Of prices by pool, that of a gang's step: each of its pools reads its part by its GPUs."""
    parts = placement.by_pool
    total = sum(part.gpus for part in parts)
    return sum(of_pools.get(part.pool, 0.0) * part.gpus for part in parts) / max(1, total)


def data_cost_message(
    job: ClusterJob, placement: Placement | None, pools: Sequence[PricedPool], *, by_price: bool
) -> str:
    """What its data costs where it is placed, and which pool is not chosen for it; empty: it pays for none.

    Args:
        job: the job.
        placement: None: it has none.
        pools: with their prices.
        by_price: whether the policy compares costs.
    """
    if placement is None or not job.usd_per_step:
        return ""
    speed, here = job.speed(placement), at_placement(job.usd_per_step, placement)
    if speed <= 0:
        return ""
    told = []
    if here > 0:
        told.append(
            f"reading its data from {job.data_region} costs {_in_two_digits(here * speed * HOUR)} an hour"
        )
    prices = {pool.pool: pool.price for pool in pools}
    used = {part.pool for part in placement.by_pool}
    gpus = sum(part.gpus * prices.get(part.pool, 0.0) for part in placement.by_pool) / speed / HOUR
    instead: list[tuple[float, str]] = []
    for pool in pools if by_price and gpus > 0 else ():
        there = _speed_there(job, pool, len(placement.nodes))
        if pool.pool in used | job.closed_pools or pool.price <= 0 or there <= 0:
            continue
        of_gpus = pool.price * len(placement.nodes) / there / HOUR
        of_data = job.usd_per_step.get(pool.pool, 0.0)
        if of_gpus < gpus and of_gpus + of_data > gpus + here:
            hourly = _in_two_digits(of_data * there * HOUR)
            instead.append(
                (
                    of_gpus,
                    f"pool {pool.pool} is cheaper by its GPUs, but it costs {hourly} an hour to "
                    f"read its data there from {job.data_region}",
                )
            )
    return "; ".join([*told, *(text for _, text in sorted(instead)[:1])])


def _speed_there(job: ClusterJob, pool: PricedPool, gpus: int) -> float:
    if pool.gpus < gpus:
        return 0.0
    if job.elastic is not None:
        return job.elastic.speed(pool.gpu_type, gpus)
    return job.job.throughput.get(pool.gpu_type, 0.0)


def _in_two_digits(amount: float) -> str:
    """As people write it: each change of the text is a write."""
    rounded = float(f"{amount:.2g}")
    return f"{rounded:,.0f}" if rounded >= 10 else f"{rounded:.10f}".rstrip("0").rstrip(".") or "0"
