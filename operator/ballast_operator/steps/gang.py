"""Start a launch: create the gang's pods, all or none, and write the plan when all have an address."""

from ballast_policies.contract import Directive, Plan, Rank
from ballast_policies.protocol.observed import Deadline

from ballast_operator.api.conditions import JobCondition, JobReason
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
    with_condition,
)
from ballast_operator.steps.observed import seconds_left


def await_pods(context: ReconcileContext, missing: tuple[str, ...]) -> StepResult:
    """Not all pods of the gang run: create those that are ``missing``, and what they need."""
    view, allocation = context.view, context.allocation
    ready = sum(pod.ready_for_plan for pod in view.gang if pod.name in allocation.pods)
    status = with_condition(
        context,
        view.status,
        JobCondition.RUNNING,
        False,
        JobReason.PODS_STARTING,
        f"{ready} of {len(allocation.pods)} pods run" + waits(context),
    )
    left = seconds_left(context, Deadline.BIND)
    return StepResult(status=status, actions=_creations(context, missing), requeue_after_seconds=left)


def write_first_plan(context: ReconcileContext, epoch: int) -> StepResult:
    """All pods have an address: the plan names them."""
    view, allocation = context.view, context.allocation
    gang = {pod.name: pod for pod in view.gang}
    plan = Plan(
        job=view.name,
        epoch=epoch,
        launch=allocation.launch,
        directive=Directive.RUN,
        ranks=tuple(
            Rank(rank=rank, pod=name, address=gang[name].address, gpu_type=allocation.gpu_type)
            for rank, name in enumerate(allocation.pods)
        ),
        stages=context.spec.first_stages(len(allocation.pods)),
        reason=f"launch {allocation.launch} on pool {allocation.pool}",
    )
    status = with_condition(
        context,
        view.status,
        JobCondition.RUNNING,
        False,
        JobReason.RANKS_MEETING,
        f"{len(plan.ranks)} pods run; ranks connect and load the checkpoint",
    )
    return StepResult(
        status=status, actions=(WritePlan(plan),), requeue_after_seconds=context.settings.start_seconds
    )


def _creations(context: ReconcileContext, missing: tuple[str, ...]) -> tuple[Apply | CreatePod, ...]:
    view, allocation = context.view, context.allocation
    if not missing:
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
            for rank, pod in enumerate(allocation.pods)
            if pod in missing
        ),
    )


def waits(context: ReconcileContext) -> str:
    """Which pods do not run yet, and why, as text to append."""
    found = [
        f"{pod.name}: {pod.reason} {pod.detail}".strip()
        for pod in context.view.gang
        if pod.reason and not pod.ready_for_plan
    ]
    return "; " + "; ".join(found) if found else ""
