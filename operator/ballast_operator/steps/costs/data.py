"""Costs of a job's data, by the steps that it has done, where their data is, and where they were done."""

from ballast_policies.prices.egress import GB

from ballast_operator.api.costs.job_data import DataCost
from ballast_operator.api.job_allocation import JobAllocation, PoolCost
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.steps.context import ReconcileContext


def accrue_data(
    context: ReconcileContext, status: TrainingJobStatus, unreported: int = 0
) -> TrainingJobStatus:
    """The status with the data of the steps that it has more than were counted; call before the gang changes.

    Each pool reads its part by its GPUs. While a price is not known (an operator that has just started knows
    no pools), steps wait to be counted.
    """
    data, known, allocation = context.spec.data, status.data, status.allocation
    read = _steps_read(status) + unreported
    if allocation is None or (data is None and known is None):
        return status
    if data is None or known is None:
        # From here on: what was done without ``spec.dataLocation`` cost nothing.
        return status.replace(data=(known or DataCost()).replace(steps=read))
    new = max(0, read - known.steps)
    parts = allocation.by_pool
    total = sum(part.gpus for part in parts) or 1
    moved, copied = _checkpoint(context, status, known)
    costs: dict[str, float] = {}
    gigabytes = 0.0
    for part in parts:
        info = context.around.pools.named(part.pool)
        price = data.usd_per_step(info.data_prices, info.region)
        if price is None:
            return status
        costs[part.pool] = new * price * part.gpus / total
        gigabytes += new * data.bytes_per_step * part.gpus / total / GB if info.region != data.region else 0.0
    costs[parts[0].pool] += copied
    gigabytes += moved / GB
    if (
        not any(costs.values())
        and not gigabytes
        and new == 0
        and known.region == _region(context, allocation)
    ):
        return status
    return _paid(status, costs, allocation).replace(
        data=known.replace(
            region=_region(context, allocation),
            steps=read,
            gigabytes=known.gigabytes + gigabytes,
            cost=known.cost + sum(costs.values()),
        )
    )


def data_cost_per_second(context: ReconcileContext) -> float:
    """What the gang pays for data at its present speed; 0: nothing, or it is not known."""
    data, status = context.spec.data, context.view.status
    progress, allocation = status.progress, status.allocation
    if data is None or allocation is None or progress is None or not progress.steps_per_second:
        return 0.0
    total, found = sum(part.gpus for part in allocation.by_pool) or 1, 0.0
    for part in allocation.by_pool:
        info = context.around.pools.named(part.pool)
        found += (data.usd_per_step(info.data_prices, info.region) or 0.0) * part.gpus / total
    return found * progress.steps_per_second


def _steps_read(status: TrainingJobStatus) -> int:
    """Steps whose data was read: those that were lost and done again twice."""
    done = status.progress.step if status.progress is not None else 0
    return done + status.lost_steps


def _region(context: ReconcileContext, allocation: JobAllocation) -> str:
    return context.around.pools.named(allocation.by_pool[0].pool).region


def _checkpoint(context: ReconcileContext, status: TrainingJobStatus, known: DataCost) -> tuple[float, float]:
    """(bytes of a checkpoint that was copied to where the gang is now, what that cost)."""
    data, allocation = context.spec.data, status.allocation
    assert data is not None and allocation is not None
    info = context.around.pools.named(allocation.by_pool[0].pool)
    saved = status.progress is not None and bool(status.progress.checkpoint_step)
    if not saved or not known.region or known.region == info.region or data.checkpoint_bytes is None:
        return 0.0, 0.0
    return data.checkpoint_bytes, data.usd_to_move(info.data_prices, known.region, info.region)


def _paid(status: TrainingJobStatus, costs: dict[str, float], allocation: JobAllocation) -> TrainingJobStatus:
    entries = {entry.pool: entry for entry in status.pool_costs}
    types = {part.pool: part.gpu_type for part in allocation.by_pool}
    for pool, paid in costs.items():
        if paid > 0:
            entry = entries.get(pool, PoolCost(pool=pool, gpu_type=types[pool]))
            entries[pool] = entry.replace(data_cost=entry.data_cost + paid)
    return status.replace(
        cost_so_far=status.cost_so_far + sum(costs.values()), pool_costs=tuple(entries.values())
    )
