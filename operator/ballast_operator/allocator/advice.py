"""Conditions that the allocator sets on each job: inputs, deadline, budget, placement."""

import math
from collections.abc import Sequence

from ballast_policies.allocation.problem import Allocation, Job
from ballast_policies.allocation.registry import find_policy
from ballast_policies.prices.options import PlacementOption, cheapest, fastest, placement_option
from ballast_policies.scheduling.assignments import two_digits
from ballast_policies.scheduling.gang_spec import job_id
from ballast_policies.scheduling.inputs import CompletedProblem
from ballast_policies.scheduling.refusals import Verdict, each_job
from ballast_policies.scheduling.state import ClusterJob

from ballast_operator.allocator.problem.admission import Admitted
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.views.job import JobView, budget_spent


def advice_by_job(
    policy: str, snapshot: Snapshot, inputs: CompletedProblem, allocation: Allocation
) -> dict[str, tuple[Verdict, ...]]:
    """Job -> its conditions, without ``InputsComplete`` where no default was ever used. Raises JobFaults."""

    def advice(row: tuple[Admitted, ClusterJob, Job]) -> tuple[Verdict, ...]:
        admitted, one, job = row
        view = admitted.view
        limited = job.deadline is not None or admitted.spec.asked.budget is not None
        options = placement_options(snapshot, one) if limited else ()
        return (
            *_inputs_complete(policy, inputs.job_defaults.get(job.name, ()), view),
            *deadline_advice(policy, job, allocation, options),
            *limit_advice(policy, snapshot, one, view, allocation, options),
            *_placement_advice(snapshot, one),
        )

    rows = list(zip(snapshot.admitted, snapshot.jobs, inputs.problem.jobs, strict=True))
    told = each_job(rows, advice, lambda row: row[0].key)
    found = {job.name: said for job, said in zip(snapshot.jobs, told, strict=True)}
    found |= {job_id(one.view.key): refused_advice(snapshot, one.view) for one in snapshot.refused}
    return {name: said for name, said in found.items() if said}


def _inputs_complete(policy: str, defaults: Sequence[str], view: JobView) -> tuple[Verdict, ...]:
    kind = JobCondition.INPUTS_COMPLETE
    if defaults:
        message = f"{policy} needs {'; '.join(defaults)}. To fix: set the field"
        return (Verdict(kind, False, JobReason.DEFAULTS_USED, message),)
    if view.status.condition(kind) is None:
        return ()
    return (Verdict(kind, True, JobReason.COMPLETE, f"{policy} uses no default for it"),)


def _more_nodes_than_needed(snapshot: Snapshot, job: ClusterJob) -> str:
    """Number of nodes of the gang, as text, if fewer of its pool would hold it; empty: they would not."""
    placement = job.placement
    if placement is None or placement.parts:
        return ""
    count, gpus = len(set(placement.nodes)), len(placement.nodes)
    sizes, asks = snapshot.capacity.node_sizes, job.asks
    fewest = sizes.in_pool(placement.pool, gpus, per_pod=asks.per_pod, barred=asks.barred)
    if fewest is None or count <= fewest:
        return ""
    text = f"it is on {count} nodes, {fewest} would hold it"
    gang = job.spread
    if gang is None or gang.speed >= gang.packed_speed:
        return text
    # By two digits: speeds change as the job trains, and each change is a write.
    return f"{text}: {gang.speed:.2g} steps/s there, {gang.packed_speed:.2g} on {fewest}"


def _placement_advice(snapshot: Snapshot, job: ClusterJob) -> tuple[Verdict, ...]:
    """The job's condition ``Consolidated``; nothing where it is, or holds no GPUs."""
    text = _more_nodes_than_needed(snapshot, job)
    if not text:
        return ()
    return (Verdict(JobCondition.CONSOLIDATED, False, JobReason.ON_MORE_NODES, text),)


def deadline_advice(
    policy: str, job: Job, allocation: Allocation, options: Sequence[PlacementOption]
) -> tuple[Verdict, ...]:
    """The job's condition ``OnTime``; nothing where it has no deadline or the policy reads none.

    A policy that was replaced by the fallback has not looked at deadlines: then there is no condition either.
    """
    if job.deadline is None or allocation.policy != policy:
        return ()
    if not find_policy(policy).names_unmet_deadlines:
        return ()
    kind = JobCondition.ON_TIME
    if job.name not in allocation.unmet_deadlines:
        message = f"{policy} gives the job the GPUs that its deadline needs"
        return (Verdict(kind, True, JobReason.DEADLINE_WITHIN_REACH, message),)
    if job.deadline <= 0:
        message = "spec.deadline has passed; the job continues without one. To fix: set a later spec.deadline"
        return (Verdict(kind, False, JobReason.DEADLINE_PASSED, message),)
    speed, best = max(job.throughput.values(), default=0.0), fastest(options)
    seconds = (job.steps_remaining or 0.0) / speed if speed > 0 else math.inf
    if best is not None:
        seconds = best.seconds
    if seconds > job.deadline:
        needed = "GPUs that can run it"
        if math.isfinite(seconds):
            needed = f"{in_two_digits(seconds)} on its fastest GPUs"
        message = (
            f"the remaining steps need {needed} and spec.deadline is in {in_two_digits(job.deadline)}; "
            "the job continues without a deadline. To fix: set a later spec.deadline, or lower totalSteps"
        )
        return (Verdict(kind, False, JobReason.DEADLINE_OUT_OF_REACH, message),)
    message = (
        "jobs with earlier deadlines need the same GPUs; the job continues without a deadline. "
        "To fix: set a later spec.deadline, or add nodes"
    )
    return (Verdict(kind, False, JobReason.DEADLINE_CONTENDED, message),)


def in_two_digits(seconds: float) -> str:
    """A duration by two digits: it changes as time passes, and each change is a write."""
    for unit, length in (("days", 86_400.0), ("h", 3600.0), ("min", 60.0)):
        if seconds >= 2 * length:
            return f"{two_digits(seconds / length)} {unit}"
    return f"{two_digits(seconds)} s"


LATE_AGAIN = 0.95
"""A deadline at risk by the job's speed remains so until the job needs less than this part of the time."""

UNKNOWN = (
    "nothing can be forecast before a speed of the job is measured. "
    "To fix: state spec.throughput, or let it run"
)


def limit_advice(
    policy: str,
    snapshot: Snapshot,
    job: ClusterJob,
    view: JobView,
    allocation: Allocation,
    options: tuple[PlacementOption, ...],
) -> tuple[Verdict, ...]:
    """The job's conditions about its deadline and its budget; nothing where it has neither."""
    assert view.spec is not None
    asked = view.spec.asked
    team = refused_advice(snapshot, view)
    found = []
    if job.job.deadline is not None:
        met = None
        if allocation.policy == policy and find_policy(policy).names_unmet_deadlines:
            met = job.name not in allocation.unmet_deadlines
        at_risk, reason, message = _deadline(job, view, options, met=met)
        found.append(Verdict(JobCondition.DEADLINE_AT_RISK, at_risk, reason, message))
    if team:
        found += team
    elif asked.budget is not None and not budget_spent(asked, view.status):
        reason, message = _budget(job, view, asked.budget, options)
        found.append(Verdict(JobCondition.BUDGET_EXHAUSTED, False, reason, message))
    return tuple(found)


def refused_advice(snapshot: Snapshot, view: JobView) -> tuple[Verdict, ...]:
    """The condition of a job whose team has spent its budget; nothing where it has not."""
    budget = snapshot.budgets.get(view.spec.asked.entity or "") if view.spec is not None else None
    if budget is None or not budget.spent:
        return ()
    return (Verdict(JobCondition.BUDGET_EXHAUSTED, True, JobReason.TEAM_BUDGET_SPENT, budget.message),)


def placement_options(snapshot: Snapshot, job: ClusterJob) -> tuple[PlacementOption, ...]:
    """The rest of the job in every pool that it may use, with each size; none where no speed is known."""
    if job.name in snapshot.unmeasured:
        return ()
    steps, found = job.job.steps_remaining or 0.0, []
    for pool in snapshot.usable_pools:
        if pool.pool in job.closed_pools:
            continue
        speed = job.job.throughput.get(pool.gpu_type, 0.0)
        sizes = {job.job.gpus: speed}
        if job.elastic is not None:
            sizes = dict(job.elastic.speeds.get(pool.gpu_type, {}))
        for gpus, rate in sizes.items():
            one = placement_option(
                pool.pool,
                pool.gpu_type,
                gpus=gpus,
                price_per_gpu_hour=pool.price,
                steps=steps,
                speed=rate if pool.gpus >= gpus else 0.0,
                usd_per_step=job.usd_per_step.get(pool.pool, 0.0),
            )
            if one is not None:
                found.append(one)
    return tuple(found)


def _deadline(
    job: ClusterJob, view: JobView, options: tuple[PlacementOption, ...], *, met: bool | None
) -> tuple[bool, JobReason, str]:
    """(at risk, reason, message); ``met``: what the policy says, None where it does not look at deadlines."""
    left = job.job.deadline or 0.0
    if left <= 0:
        return True, JobReason.DEADLINE_PASSED, "spec.deadline has passed. To fix: set a later spec.deadline"
    best = fastest(options)
    if best is None:
        return False, JobReason.SPEED_UNKNOWN, UNKNOWN
    told = f"spec.deadline is in {in_two_digits(left)}; {_forecast(job, options, left)}"
    later = "To fix: set a later spec.deadline"
    if best.seconds > left:
        message = f"{told}. {later}, or lower totalSteps"
        return True, JobReason.DEADLINE_OUT_OF_REACH, message
    if met is False:
        message = f"{told}; jobs with earlier deadlines need the same GPUs. {later}, or add nodes"
        return True, JobReason.DEADLINE_CONTENDED, message
    known = view.status.condition(JobCondition.DEADLINE_AT_RISK)
    was_late = known is not None and known.is_true and known.reason == JobReason.DEADLINE_SPEED_TOO_LOW
    here = _present(job)
    if met is None and here is not None and here > (LATE_AGAIN * left if was_late else left):
        message = (
            f"where it runs it needs {in_two_digits(here)}; {told}. {later}, raise spec.weight, or use the "
            "policy min-cost-slo, which reads deadlines"
        )
        return True, JobReason.DEADLINE_SPEED_TOO_LOW, message
    return False, JobReason.DEADLINE_WITHIN_REACH, told


def _present(job: ClusterJob) -> float | None:
    """Seconds to the job's last step where it runs; None: it does not run, or its speed is not known."""
    held = job.placement
    if held is None:
        return None
    speed = job.speed(held)
    return (job.job.steps_remaining or 0.0) / speed if speed > 0 else None


def _budget(
    job: ClusterJob, view: JobView, budget: float, options: tuple[PlacementOption, ...]
) -> tuple[JobReason, str]:
    if not options:
        return JobReason.SPEED_UNKNOWN, UNKNOWN
    time = job.job.deadline
    time = time if time is not None and time > 0 else float("inf")
    least = cheapest(options, within_seconds=time) or cheapest(options)
    if least is None or least.cost is None:
        message = "no pool that the job may use has a price. To fix: set nodePools[].pricePerGpuHour"
        return JobReason.PRICE_UNKNOWN, message
    spent = view.status.cost_so_far
    told = f"{two_digits(budget - spent)} of {budget:.10g} are left; {_forecast(job, options, time)}"
    if spent + least.cost > budget:
        needed = two_digits(1.05 * (spent + least.cost))
        message = f"{told}. To fix: raise spec.budget to about {needed}, or lower totalSteps"
        return JobReason.BUDGET_TOO_SMALL, message
    return JobReason.BUDGET_SUFFICIENT, told


def _forecast(job: ClusterJob, options: tuple[PlacementOption, ...], within_seconds: float) -> str:
    """Time and cost that are left, cheapest and fastest, by two digits: each change is a write."""
    steps = job.job.steps_remaining or 0.0
    parts = [f"the remaining steps, about {two_digits(steps)},"]
    least, best = cheapest(options), fastest(options)
    in_time = cheapest(options, within_seconds=within_seconds)
    if least is not None:
        parts.append(f"{_as_text(least)} at the cheapest")
    if in_time is not None and in_time != least:
        parts.append(f"and {_as_text(in_time)} at the cheapest before the deadline")
    if best is not None and best not in (least, in_time):
        parts.append(f"{'and ' if least is not None else ''}{_as_text(best)} at the fastest")
    return " ".join(parts)


def _as_text(one: PlacementOption) -> str:
    price = "" if one.cost is None else f"cost {two_digits(one.cost)} and "
    return f"{price}take {in_two_digits(one.seconds)} on {one.gpus} x {one.gpu_type} of pool {one.pool}"
