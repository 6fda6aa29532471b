"""Sums over a job's life: its cost, its suspensions, and its time on isolated shares."""

import math

from ballast_policies.accounting import cost, isolated_seconds, price_part
from ballast_policies.contract.messages import Report
from ballast_policies.prices.egress import GB
from ballast_policies.scheduling.refusals import Verdict

from ballast_operator.api.base import MOST_STEPS
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.costs import DataCost, TeamPart
from ballast_operator.api.job_allocation import JobAllocation, PoolCost, SharedGpu
from ballast_operator.api.training_job_status import GpuTime, Isolated, Progress, TrainingJobStatus
from ballast_operator.steps.context import ReconcileContext, seconds_since, with_condition, with_status
from ballast_operator.views.clock import Time, show
from ballast_operator.views.job import (
    ROUNDING,
    active_seconds,
    budget_message,
    budget_spent,
    deadline_message,
    deadline_passed,
)


def accrue_cost(
    context: ReconcileContext, status: TrainingJobStatus, *, unreported: int = 0
) -> TrainingJobStatus:
    """The status with cost and active time of the gang it holds brought up to now; call before that changes.

    ``unreported``: steps that a script has done and that it has not told of.
    """
    allocation = status.allocation
    if allocation is None:
        return status
    spans = paid_spans(context, status)
    trains = context.view.status.is_true(JobCondition.RUNNING) and allocation.ending is None
    known = {entry.pool: entry for entry in status.pool_costs}
    total = held = 0.0
    for part in allocation.on_nodes_by_pool:
        gpu_seconds, paid = 0.0, 0.0
        for since, until, of_price in spans:
            seconds = max(0.0, (until - since).total_seconds()) * part.gpus * of_price
            gpu_seconds += seconds
            paid += cost(seconds, context.price_of(part.pool, since, until))
        entry = known.get(part.pool, PoolCost(pool=part.pool, gpu_type=part.gpu_type))
        known[part.pool] = entry.replace(
            gpu_seconds=entry.gpu_seconds + gpu_seconds,
            cost=entry.cost + paid,
            startup_cost=entry.startup_cost + (0.0 if trains else paid),
        )
        total += paid
        held += gpu_seconds
    paid_up = status.replace(
        cost_so_far=status.cost_so_far + total,
        cost_at=context.now,
        active_seconds=active_seconds(status, context.now),
        pool_costs=tuple(known.values()),
        gpu_time=_gpu_time(status, held, trains=trains),
    )
    found = accrue_data(context, paid_up, unreported)
    return found.replace(pool_costs=found.pool_costs[-MOST_POOLS:])


def _gpu_time(status: TrainingJobStatus, held: float, *, trains: bool) -> GpuTime | None:
    """GPU time by use, with ``held`` GPU seconds more, by what the ranks have measured last."""
    known = status.gpu_time
    if held <= 0:
        return known
    known = known if known is not None else GpuTime()
    if not trains:
        return known.plus(held=held, startup=held)
    progress = status.progress if status.progress is not None else Progress()
    uneven = progress.imbalance or 0.0
    idle = min(1.0, progress.bubble if progress.bubble is not None else uneven / (1 + uneven))
    straggling = min(idle, uneven / (1 + uneven))
    saving = 0.0
    if progress.checkpoint_every_steps and progress.checkpoint_seconds and progress.steps_per_second:
        every = progress.checkpoint_every_steps / progress.steps_per_second
        saving = min(1.0 - idle, progress.checkpoint_seconds / every)
    return known.plus(
        held=held, straggling=held * straggling, idle=held * (idle - straggling), checkpoint=held * saving
    )


def accrue_pause(status: TrainingJobStatus, pause_ms: float | None) -> TrainingJobStatus:
    """The status with a pause of training, in which layers moved or the gang changed its size."""
    if not pause_ms or status.allocation is None or status.gpu_time is None:
        return status
    seconds = min(pause_ms / 1000 * status.allocation.gpus, status.gpu_time.held)
    return status.replace(gpu_time=status.gpu_time.plus(moves=seconds))


def paid_spans(context: ReconcileContext, status: TrainingJobStatus) -> tuple[tuple[Time, Time, float], ...]:
    """(from, to, part of its GPUs' price that it pays) since its cost was summed up.

    Of a GPU that two jobs share each pays half while both hold it. Each sees when the other has come from the
    other's allocation, and when it has left from ``gpuLeftAt``: so the sum is the GPU's price, whenever each
    of them is looked at.
    """
    allocation, since, now = status.allocation, status.unpaid_since, context.now
    assert allocation is not None and since is not None
    if allocation.shared_gpu is None or now <= since:
        return ((since, now, 1.0),)
    partner, sharer, left = allocation.partner, context.around.sharer, context.around.partner_left
    half = price_part(shared=True)
    if sharer is not None and sharer.job == partner and sharer.since <= since:
        return ((since, now, half),)
    spans, at = [], since
    if partner:
        end = left if left is not None and since <= left <= now else now
        end = min(end, sharer.since) if sharer is not None and sharer.since > since else end
        spans.append((since, end, half))
        at = end
    if sharer is None:
        spans.append((at, now, 1.0))
    else:
        came = min(max(at, sharer.since), now)
        spans += [(at, came, 1.0), (came, now, half)]
    return tuple(spans)


def with_sharer(
    context: ReconcileContext, before: TrainingJobStatus, after: TrainingJobStatus
) -> TrainingJobStatus:
    """``after`` with who shares the GPU from now on, or since when nobody does; ``before``: as stored."""
    was, held = before.allocation, after.allocation
    if was is not None and was.shared_gpu is not None and was.pays and (held is None or not held.pays):
        after = after.replace(gpu_left_at=context.now)
    if held is None or held.shared_gpu is None:
        return after
    partner = context.around.sharer.job if context.around.sharer is not None and held.pays else ""
    if was is None or partner == held.partner:
        return after
    paid = accrue_cost(with_status(context, after), after)
    return paid.replace(allocation=held.replace(shared_gpu=SharedGpu(partner=partner)))


def with_ended_pods(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a launch that ends with the pods that have ended or are gone: up to here they are paid.

    So does one whose job is being deleted. Others take these GPUs only once it is written, so that no GPU
    second is paid twice.
    """
    allocation = status.allocation
    if allocation is None or not (allocation.ending is not None or context.view.deleting):
        return status
    alive = {pod.name for pod in context.view.alive}
    ended = tuple(name for name in allocation.pods if name not in alive or name in allocation.ended)
    if len(ended) == len(allocation.ended):
        return status
    return accrue_cost(context, status).replace(allocation=allocation.replace(ended=ended))


def accrue_lost_steps(status: TrainingJobStatus, report: Report) -> TrainingJobStatus:
    """The status with the steps that a launch has to do again: it reports fewer than were done before.

    They cost what a step of the job has cost on average, start-ups not counted.
    """
    done = status.progress.step if status.progress is not None and status.progress.step is not None else 0
    lost = done - max(0, report.step)
    if lost <= 0:
        return status
    trained = status.cost_so_far - sum(entry.startup_cost for entry in status.pool_costs) - status.lost_cost
    time = status.gpu_time
    if time is not None:
        steps = time.held - time.startup - time.lost_steps
        time = time.plus(lost_steps=max(0.0, steps) * lost / done)
    return status.replace(
        gpu_time=time,
        lost_steps=min(status.lost_steps + lost, MOST_STEPS),
        lost_cost=status.lost_cost + max(0.0, trained) * lost / done,
    )


MOST_POOLS = 256
"""Pools whose costs a job keeps."""


def account_suspension(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status with the clock of the job's suspensions started or stopped."""
    since = status.suspended_since
    if context.hold is not None:
        return status if since is not None else status.replace(suspended_since=context.now)
    if since is None:
        return status
    seconds = status.suspended_seconds + max(0.0, seconds_since(context, since))
    return status.replace(suspended_since=None, suspended_seconds=seconds)


def accrue_isolated_time(known: Isolated | None, report: Report, speed: float) -> Isolated | None:
    """Time that the progress so far would have taken on isolated shares (Themis's t_isolated).

    The steps of ``report`` that ``known`` has not are booked at its own speed. ``speed``: steps/s on its
    isolated share / steps/s on the present GPUs; 0: not known yet.
    """
    before = known if known is not None else Isolated(seconds=0.0, step=0)
    step = max(0, report.step)
    if step < before.step:  # back to a checkpoint: what is lost counts no longer
        return Isolated(seconds=before.seconds * (step / before.step), step=step)
    rate = report.steps_per_second if report.steps_per_second is not None else 0.0
    if step == before.step or not 0 < rate * speed < math.inf:
        return known
    more = isolated_seconds(float(step - before.step), rate * speed)
    if not math.isfinite(before.seconds + more):
        return known
    return Isolated(seconds=before.seconds + more, step=step)


MOST_TEAMS = 16
"""Teams whose parts a job keeps; of more, the two oldest become one."""


def with_cost_of_last_team(context: ReconcileContext) -> TrainingJobStatus:
    """The status with its cost brought up to now where the job belongs to another team from now on."""
    status = context.view.status
    changed = status.team_costs and status.team_costs[-1].team != (context.spec.asked.entity or "")
    return accrue_cost(context, status) if changed else status


def with_team(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status with what the job has cost booked on its teams, all that is new on the last of them.

    The team that a job belonged to when a cost arose pays it. A status of an earlier version names no team:
    the present one pays for all.
    """
    team, known = context.spec.asked.entity or "", status.team_costs
    if not known and status.allocation is None and status.cost_so_far == 0:
        return status
    *earlier, last = known or (TeamPart(team=team),)
    added = status.cost_so_far - sum(part.cost for part in known)
    if added > ROUNDING * status.cost_so_far:
        last = last.replace(cost=last.cost + added)
    parts = (*earlier, last)
    if last.team != team:
        again = next((part for part in parts if part.team == team), TeamPart(team=team))
        parts = (*(part for part in parts if part.team != team), again)
    if len(parts) > MOST_TEAMS:
        first, second, *rest = parts
        parts = (second.replace(cost=first.cost + second.cost), *rest)
    return status if parts == known else status.replace(team_costs=parts)


def with_cost_for_budget(context: ReconcileContext) -> TrainingJobStatus:
    """The status of a job with a budget, its cost brought up to now."""
    status = context.view.status
    return status if context.spec.asked.budget is None else accrue_cost(context, status)


def limits_reached(context: ReconcileContext) -> tuple[Verdict, ...]:
    """Conditions that the pass knows better than the last decision: what is reached, and what is no more."""
    asked, status, found = context.spec.asked, context.view.status, list[Verdict]()
    kind = JobCondition.BUDGET_EXHAUSTED
    if budget_spent(asked, status):
        found.append(Verdict(kind, True, JobReason.BUDGET_SPENT, budget_message(asked)))
    elif _is(status, kind, JobReason.BUDGET_SPENT):
        message = "spec.budget is above what the job has cost"
        found.append(Verdict(kind, False, JobReason.BUDGET_SUFFICIENT, message))
    kind = JobCondition.DEADLINE_AT_RISK
    if deadline_passed(asked, context.now):
        found.append(Verdict(kind, True, JobReason.DEADLINE_PASSED, deadline_message(asked)))
    elif _is(status, kind, JobReason.DEADLINE_PASSED):
        found.append(Verdict(kind, False, JobReason.DEADLINE_WITHIN_REACH, "spec.deadline is in the future"))
    return tuple(found)


def _is(status: TrainingJobStatus, kind: JobCondition, reason: JobReason) -> bool:
    condition = status.condition(kind)
    return condition is not None and condition.is_true and condition.reason == reason


def seconds_to_next_limit(context: ReconcileContext) -> float:
    """Seconds until the budget is spent at the present price, a deadline passes, or the run time ends."""
    asked, status, left = context.spec.asked, context.view.status, math.inf
    allocation = status.allocation
    if status.finished:
        return left
    if asked.deadline is not None and not deadline_passed(asked, context.now):
        left = (asked.deadline - context.now).total_seconds()
    if asked.active_deadline_seconds is not None and allocation is not None:
        active = asked.active_deadline_seconds - active_seconds(status, context.now)
        left = min(left, active) if active > 0 else left
    if asked.budget is not None and allocation is not None and not budget_spent(asked, status):
        since = status.unpaid_since or context.now
        per_second = allocation.price_part * sum(
            cost(float(part.gpus), context.price_of(part.pool, since, context.now))
            for part in allocation.by_pool
        )
        per_second += data_cost_per_second(context)
        if per_second > 0:
            left = min(left, (asked.budget - status.cost_so_far) / per_second)
    return max(0.0, left)


def with_final_deadline(context: ReconcileContext, status: TrainingJobStatus) -> TrainingJobStatus:
    """The status of a job that has succeeded, with what became of its deadline."""
    asked = context.spec.asked
    if asked.deadline is None or deadline_passed(asked, context.now):
        return status
    message = f"the job was done before spec.deadline, {show(asked.deadline)}"
    return with_condition(
        context, status, JobCondition.DEADLINE_AT_RISK, False, JobReason.DEADLINE_MET, message
    )


def accrue_data(
    context: ReconcileContext, status: TrainingJobStatus, unreported: int = 0
) -> TrainingJobStatus:
    """The status with the data of the steps that it has more than were counted; call before the gang changes.

    Each pool reads its part by its GPUs. While a price is not known (an operator that has just started knows
    no pools), steps wait to be counted.
    """
    data, known, allocation = context.spec.data, status.data, status.allocation
    done = status.progress.step if status.progress is not None else 0
    # The data of steps that were lost was read twice; a hand may have written any number of them.
    read = min(done + status.lost_steps + unreported, MOST_STEPS)
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
        info = context.around.pool(part.pool)
        price = data.usd_per_step(info.data_prices, info.region)
        if price is None:
            return status
        costs[part.pool] = new * price * part.gpus / total
        gigabytes += new * data.bytes_per_step * part.gpus / total / GB if info.region != data.region else 0.0
    costs[parts[0].pool] += copied
    gigabytes += moved / GB
    region = context.around.pool(parts[0].pool).region
    if not any(costs.values()) and not gigabytes and new == 0 and known.region == region:
        return status
    return _paid(status, costs, allocation).replace(
        data=known.replace(
            region=region,
            steps=read,
            gigabytes=known.gigabytes + gigabytes,
            cost=known.cost + sum(costs.values()),
        )
    )


def data_cost_per_second(context: ReconcileContext) -> float:
    """Price per second of the gang's data at its present speed; 0: none, or it is not known."""
    data, status = context.spec.data, context.view.status
    progress, allocation = status.progress, status.allocation
    if data is None or allocation is None or progress is None or not progress.steps_per_second:
        return 0.0
    pools = {part.pool: context.around.pool(part.pool) for part in allocation.by_pool}
    each = {name: data.usd_per_step(info.data_prices, info.region) or 0.0 for name, info in pools.items()}
    return allocation.placement.mean(each) * progress.steps_per_second


def _checkpoint(context: ReconcileContext, status: TrainingJobStatus, known: DataCost) -> tuple[float, float]:
    """(bytes of a checkpoint that was copied to where the gang is now, what that cost)."""
    data, allocation = context.spec.data, status.allocation
    assert data is not None and allocation is not None
    info = context.around.pool(allocation.by_pool[0].pool)
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
