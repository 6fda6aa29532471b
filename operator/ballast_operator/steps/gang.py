"""Start a launch: create the gang's pods, all or none, and write the plan when all have an address."""

from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.contract import Directive, Plan, Rank
from ballast_policies.protocol.observed import Deadline

from ballast_operator.api.conditions import JobCondition, JobReason, some_of
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.desired import (
    PodOptions,
    access_objects,
    lease_object,
    pod_group_object,
    pod_object,
    rendezvous_object,
    script_environment,
)
from ballast_operator.kube.kinds import CONFIG_MAP, LEASE, POD_GROUP
from ballast_operator.steps.accounting import accrue_cost
from ballast_operator.steps.context import (
    Apply,
    CreatePod,
    ReconcileContext,
    StepResult,
    WritePlan,
    with_condition,
)
from ballast_operator.steps.observed import seconds_left
from ballast_operator.views.pod import PodView


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
    told, status = tell_address(context, status)
    created = [creation(context, pod, at) for at, pod in enumerate(allocation.pods) if pod in missing]
    return StepResult(
        status=status,
        actions=(*told, *_rights(context), *(pod_group(context) if created else ()), *created),
        requeue_after_seconds=left,
        grants_rights=True,
    )


def write_first_plan(context: ReconcileContext, epoch: int) -> StepResult:
    """All pods have an address: the plan names them, once they have the right to read it."""
    view, allocation = context.view, context.allocation
    if rights := _rights(context):
        return StepResult(status=view.status, actions=rights, requeue_after_seconds=0.0, grants_rights=True)
    gang = {pod.name: pod for pod in view.gang}
    known = accrue_cost(context, view.status)
    known = known.replace(allocation=allocation.settled({pod.name: pod.node for pod in view.gang}))
    plan = Plan(
        job=view.name,
        epoch=epoch,
        launch=allocation.launch,
        directive=Directive.RUN,
        ranks=ranks_of(allocation, allocation.pods, gang),
        stages=context.spec.first_stages(
            allocation.gpus,
            context.assignment.layers if context.assignment is not None else None,
            _memory_by_rank(context),
            allocation.speeds,
        ),
        reason=f"launch {allocation.launch} on pool "
        + " and pool ".join(part.pool for part in allocation.by_pool),
    )
    status = with_condition(
        context,
        known,
        JobCondition.RUNNING,
        False,
        JobReason.RANKS_MEETING,
        f"{len(plan.pods)} pods run; ranks connect and load the checkpoint",
    )
    return StepResult(
        status=status, actions=(WritePlan(plan),), requeue_after_seconds=context.settings.start_seconds
    )


def _memory_by_rank(context: ReconcileContext) -> float | tuple[float, ...] | None:
    """Bytes of each GPU, of a gang in several pools by rank; None: not known."""
    assignment, allocation = context.assignment, context.allocation
    if assignment is None:
        return None
    if len(assignment.part_memory) != len(allocation.parts) or not allocation.parts:
        return assignment.memory
    by_pool = zip(allocation.by_pool, assignment.part_memory, strict=True)
    return tuple(has for part, has in by_pool for _ in range(part.gpus))


def ranks_of(
    allocation: JobAllocation, pods: Sequence[str], gang: Mapping[str, PodView], *, first: int = 0
) -> tuple[Rank, ...]:
    """The ranks of ``pods``, from ``first`` on: a rank for each GPU, those of a pod one after the other."""
    places = [(name, local_rank) for name in pods for local_rank in range(allocation.gpus_per_pod)]
    return tuple(
        Rank(
            rank=first + number,
            pod=name,
            local_rank=local_rank,
            address=gang[name].address,
            gpu_type=allocation.part_of(name).gpu_type,
            node=gang[name].node,
        )
        for number, (name, local_rank) in enumerate(places)
    )


def _rights(context: ReconcileContext) -> tuple[Apply, ...]:
    """What the launch's pods need in order to report; nothing where that is known to be there.

    No pod can be made without its service account; the launch has made it where it could. The rest is made
    beside the pods: before the API server takes a role or a binding it reads all bindings of the namespace,
    which takes seconds while it is busy. A binding comes after its role, which has to be there and the job's
    own.
    """
    view = context.view
    if not view.lacks_rights:
        return ()
    account, *access = access_objects(view)
    lease = LEASE, lease_object(view, context.settings.heartbeat_seconds)
    first = (Apply(*account),) if view.lacks_account else ()
    return (*first, *(Apply(kind, body, beside=True) for kind, body in (lease, *access)))


def pod_group(context: ReconcileContext, allocation: JobAllocation | None = None) -> tuple[Apply, ...]:
    """Its PodGroup with as many pods as the gang is to have; nothing where the launch has none.

    ``allocation``: that it has from now on; None: the one that it has.
    """
    allocation = allocation or context.allocation
    if not allocation.pod_group or not context.around.has_pod_groups:
        return ()
    return (Apply(POD_GROUP, pod_group_object(context.view, allocation)),)


def creation(context: ReconcileContext, pod: str, number: int) -> CreatePod:
    """The creation of the gang's pod with this name and number."""
    resource, settings = context.gpu_resource_of(pod), context.settings
    body = pod_object(
        context.view,
        context.spec,
        context.allocation,
        number=number,
        pod=pod,
        gpu_resource=resource,
        options=PodOptions(
            renew_seconds=settings.renew_seconds,
            save_seconds=settings.stop_seconds,
            new_node=context.new_node_of(pod),
            environment=_environment(context, number),
        ),
    )
    return CreatePod(body, resource)


def _environment(context: ReconcileContext, pod: int) -> list[dict[str, Any]]:
    if not context.spec.is_script:
        return []
    save_seconds = context.settings.stop_seconds
    view, spec, allocation = context.view, context.spec, context.allocation
    return script_environment(view, spec, allocation, pod=pod, save_seconds=save_seconds)


def tell_address(
    context: ReconcileContext, status: TrainingJobStatus
) -> tuple[tuple[Apply, ...], TrainingJobStatus]:
    """Tell the other ranks of a script where rank 0 is, once that is known: (actions, status)."""
    view, allocation = context.view, context.allocation
    first = next((pod for pod in view.gang if pod.name == allocation.pods[0]), None)
    if not context.spec.is_script or first is None or len(allocation.pods) == 1:
        return (), status
    if not first.address or first.address == allocation.master_address:
        return (), status
    told = allocation.replace(master_address=first.address)
    address = rendezvous_object(view, allocation, first.address)
    return (Apply(CONFIG_MAP, address),), status.replace(allocation=told)


def waits(context: ReconcileContext) -> str:
    """Which pods do not run yet, and why, as text to append."""
    found: dict[str, list[str]] = {}
    for pod in context.view.gang:
        if pod.reason and not pod.ready_for_plan:
            found.setdefault(f"{pod.reason} {pod.detail}".strip(), []).append(pod.name)
    return "".join(f"; {some_of(pods)}: {why}" for why, pods in found.items())
