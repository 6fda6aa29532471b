"""Start a launch: create the gang's pods, all or none, and write the plan when all have an address."""

from ballast_policies.contract import Directive, Plan, Rank
from ballast_policies.contract.limits import MOST_EPOCH

from ballast_operator.api.cause import Cause
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import JobAllocation
from ballast_operator.desired.access import access_objects
from ballast_operator.desired.lease import lease_object
from ballast_operator.desired.pod import pod_object
from ballast_operator.kube.kinds import LEASE
from ballast_operator.steps.context import (
    Apply,
    CreatePod,
    ReconcileContext,
    StepResult,
    WritePlan,
    seconds_since,
    with_condition,
)
from ballast_operator.steps.failure import find_failure
from ballast_operator.steps.stopping import begin_termination
from ballast_operator.views.job import JobView


def start_gang(context: ReconcileContext) -> StepResult:
    """One pass of a launch whose plan is not written yet."""
    view = context.view
    allocation = context.allocation
    failure = find_failure(context)
    if failure is not None:
        return begin_termination(context, *failure)
    gang = {pod.name: pod for pod in view.gang}
    ready = [gang[name] for name in allocation.pods if name in gang and gang[name].ready_for_plan]
    late = seconds_since(context, allocation.since) - context.settings.bind_seconds
    if len(ready) < len(allocation.pods):
        if late >= 0:
            return begin_termination(context, Cause.NOT_BOUND, _not_bound(context, allocation, len(ready)))
        status = with_condition(
            context,
            view.status,
            JobCondition.RUNNING,
            False,
            JobReason.PODS_STARTING,
            f"{len(ready)} of {len(allocation.pods)} pods run" + _waits(context),
        )
        return StepResult(status=status, actions=_missing(context, allocation), requeue_after_seconds=-late)
    plan = Plan(
        job=view.name,
        epoch=_last_epoch(view) + 1,
        launch=allocation.launch,
        directive=Directive.RUN,
        ranks=tuple(
            Rank(rank=rank, pod=pod.name, address=pod.address, gpu_type=allocation.gpu_type)
            for rank, pod in enumerate(ready)
        ),
        stages=context.spec.first_stages(len(ready)),
        reason=f"launch {allocation.launch} on pool {allocation.pool}",
    )
    status = with_condition(
        context,
        view.status,
        JobCondition.RUNNING,
        False,
        JobReason.RANKS_MEETING,
        f"{len(ready)} pods run; ranks connect and load the checkpoint",
    )
    return StepResult(
        status=status, actions=(WritePlan(plan),), requeue_after_seconds=context.settings.start_seconds
    )


def _last_epoch(view: JobView) -> int:
    """The last plan's; where it is lost, the last one that the trainer has heard of."""
    if view.plan is not None:
        return view.plan.epoch
    heard = (view.lease.ack, view.lease.report) if view.lease is not None else ()
    return min(max((message.epoch for message in heard if message is not None), default=0), MOST_EPOCH - 1)


def _missing(context: ReconcileContext, allocation: JobAllocation) -> tuple[Apply | CreatePod, ...]:
    view = context.view
    there = {pod.name for pod in view.gang}
    absent = [(rank, pod) for rank, pod in enumerate(allocation.pods) if pod not in there]
    if not absent:
        return ()
    objects = [*access_objects(view), (LEASE, lease_object(view))]
    return (
        *(Apply(kind, body) for kind, body in objects),
        *(
            CreatePod(
                pod_object(
                    view, context.spec, allocation, rank=rank, pod=pod, gpu_resource=context.gpu_resource
                )
            )
            for rank, pod in absent
        ),
    )


def _waits(context: ReconcileContext) -> str:
    waits = [
        f"{pod.name}: {pod.reason} {pod.detail}".strip()
        for pod in context.view.gang
        if pod.reason and not pod.ready_for_plan
    ]
    return "; " + "; ".join(waits) if waits else ""


def _not_bound(context: ReconcileContext, allocation: JobAllocation, ready: int) -> str:
    return (
        f"only {ready} of {len(allocation.pods)} pods ran within {context.settings.bind_seconds:g} s, "
        f"so all are deleted{_waits(context)}"
    )
