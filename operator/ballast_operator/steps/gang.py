"""A gang's begin: a job waits with a reason, is launched, and gets its pods and its plan.

The launch is written into the status, the pods are created all or none, and the plan is written when all have
an address.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from ballast_policies.contract.messages import Candidate, Rank, Report, Tried
from ballast_policies.contract.plan import Directive, Plan
from ballast_policies.protocol.moves import Wait, WaitFor
from ballast_policies.protocol.observed import Cause, Deadline, Gang
from ballast_policies.rounds.gangs import types_by_rank
from ballast_policies.rounds.values import Placement, PoolPart, counted
from ballast_policies.scheduling.assignments import Assignment

from ballast_operator.api.conditions import JobCondition, JobReason, some_of
from ballast_operator.api.job_allocation import AllocationPart, JobAllocation, LaunchDegrees, SharedGpu
from ballast_operator.api.training_job_status import Decision, PlanTrial, TrainingJobStatus, TriedPlan
from ballast_operator.desired import (
    PodOptions,
    access_objects,
    lease_object,
    pod_group_name,
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
    JobCounter,
    ReconcileContext,
    StepResult,
    WritePlan,
    with_condition,
)
from ballast_operator.steps.observed import seconds_left
from ballast_operator.views.clock import show
from ballast_operator.views.pod import PodView
from ballast_operator.views.spec import JobSpec

LOOK_AGAIN_SECONDS = 5.0
"""Seconds until a job that waits for GPUs is looked at again, even if nothing is told."""

DECIDED_SOON_SECONDS = 10.0
"""Age up to which a new job's first status is left to the allocator's decision: one write for most jobs."""

ENDED_REASONS = frozenset(Cause) - {Cause.COMPLETED}
"""Reasons of Running that say why the last launch ended."""


def wait(context: ReconcileContext, waiting: Wait) -> StepResult:
    """A job without a gang waits; its condition Admitted says for what."""
    view, status, assignment = context.view, context.view.status, context.assignment
    match waiting.reason:
        case WaitFor.OLD_PODS:
            alive = ", ".join(pod.name for pod in view.alive)
            message = f"pods of an earlier launch are not gone yet: {alive}"
            status = _not_admitted(context, status, JobReason.WAITING_FOR_RELEASED_PODS, message)
            return StepResult(status=status, requeue_after_seconds=LOOK_AGAIN_SECONDS)
        case WaitFor.RESUME:
            hold = context.hold
            assert hold is not None
            return StepResult(status=_not_admitted(context, status, hold.reason, hold.message))
        case WaitFor.PAUSE:
            assert status.next_launch_at is not None
            reason, message = _why_it_pauses(context)
            message = f"{message}; the next launch is not before {show(status.next_launch_at)}"
            status = _not_admitted(context, status, reason, message)
            return StepResult(status=status, requeue_after_seconds=seconds_left(context, Deadline.PAUSE))
        case WaitFor.GPUS if assignment is not None:
            status = decided(status, assignment)
            return StepResult(status=_not_admitted(context, status, assignment.reason, assignment.why))
        case WaitFor.FREE_GPUS if assignment is not None:
            message = f"{assignment.chosen}: {context.around.shortage}"
            status = decided(status, assignment)
            status = _not_admitted(context, status, JobReason.WAITING_FOR_RELEASED_PODS, message)
            return StepResult(status=status, requeue_after_seconds=LOOK_AGAIN_SECONDS)
    if status.condition(JobCondition.ADMITTED) is None:
        soon = _decided_soon(context)
        if soon > 0:
            return StepResult(status=status, allocate=True, write_later=True, requeue_after_seconds=soon)
        text = "the allocator has not looked at the job yet"
        status = _not_admitted(context, status, JobReason.PENDING, text)
    return StepResult(status=status, allocate=True, requeue_after_seconds=LOOK_AGAIN_SECONDS)


def _decided_soon(context: ReconcileContext) -> float:
    """Seconds that are left to the allocator before a new job is told that there is no decision yet."""
    if context.view.created is None:
        return 0.0
    age = (context.now - context.view.created).total_seconds()
    return DECIDED_SOON_SECONDS - age if age >= 0 else 0.0  # clocks differ: better told too early


def _why_it_pauses(context: ReconcileContext) -> tuple[JobReason, str]:
    """(reason, message) of the pause between an early end and the next launch."""
    status = context.view.status
    running = status.condition(JobCondition.RUNNING)
    if running is not None and running.reason in (JobReason.NOT_ALLOWED, JobReason.NAME_TAKEN):
        return JobReason(running.reason), running.message
    if running is not None and running.reason == JobReason.NOT_BOUND:
        return JobReason.BACKING_OFF, running.message
    times = f"failed {status.counted_restarts} of at most {context.spec.asked.backoff_limit + 1} times"
    return JobReason.BACKING_OFF, times if running is None else f"{times}; last: {running.message}"


def decided(status: TrainingJobStatus, assignment: Assignment) -> TrainingJobStatus:
    """The status with ``lastDecision`` taken from the assignment."""
    placement, old = assignment.placement, status.last_decision
    decision = Decision(
        chosen=assignment.chosen[:1024],
        next_best=assignment.next_best[:1024],
        why=assignment.why[:1024],
        plan_id=assignment.plan_id,
        gpu_type=placement.gpu_type if placement is not None else "",
    )
    if old is not None and old.replace(plan_id=decision.plan_id) == decision:
        return status  # another round decided the same
    return status.replace(last_decision=decision)


def with_size(context: ReconcileContext) -> TrainingJobStatus:
    """The status of a gang that trains, with the decision about the size that it has now."""
    status, assignment = context.view.status, context.assignment
    if assignment is None or status.last_decision is None or assignment.placement is None:
        return status
    last = status.last_decision
    # While a gang shrinks, it has no other sizes to be told of.
    same = last.chosen == assignment.chosen[:1024] and (last.next_best or not assignment.next_best)
    if same or assignment.placement != context.allocation.placement:
        return status
    return decided(status, assignment)


def launch(context: ReconcileContext, gang: Gang) -> StepResult:
    """Write the next launch; pods follow a pass later: a crash leaves either nothing or the intent."""
    assignment = context.assignment
    assert assignment is not None and assignment.placement is not None
    placement = assignment.placement
    degrees, why_these = _degrees_on(context, placement.by_pool)
    allocation = JobAllocation(
        launch=gang.launch,
        gpu_type=placement.gpu_type,
        pool=placement.pool,
        gpus=len(placement.nodes),
        gpus_per_pod=context.spec.gpus_per_pod,
        pods=gang.pods,
        nodes=placement.nodes[:: context.spec.gpus_per_pod],
        parts=_parts(placement, gang.pods, assignment.part_speeds, context.spec.gpus_per_pod),
        degrees=degrees,
        plan_id=assignment.plan_id,
        since=context.now,
        template=context.spec.template_digest,
        pod_group=pod_group_name(context.view, context.spec) if context.around.has_pod_groups else "",
        shared_gpu=SharedGpu(partner=context.around.sharer.job if context.around.sharer is not None else "")
        if assignment.may_share
        else None,
    )
    status = decided(context.view.status, assignment)
    status = status.replace(allocation=allocation, launches=gang.launch, next_launch_at=None)
    admitted = assignment.why or assignment.chosen
    if degrees is not None:
        admitted += f"; {degrees}, {why_these}"
    status = with_condition(context, status, JobCondition.ADMITTED, True, JobReason.ASSIGNED, admitted)
    status = with_condition(
        context,
        status,
        JobCondition.RUNNING,
        False,
        JobReason.PODS_STARTING,
        f"0 of {len(gang.pods)} pods run",
    )
    account, *_ = access_objects(context.view)
    return StepResult(
        status=status,
        meanwhile=(Apply(*account),),  # it holds no GPUs
        requeue_after_seconds=0.0,
        metric_increments=tuple((JobCounter.LAUNCHES, part.pool, 1) for part in placement.by_pool),
    )


def _degrees_on(context: ReconcileContext, parts: Sequence[PoolPart]) -> tuple[LaunchDegrees | None, str]:
    """Degrees of a launch on GPUs of these pools, with the reason; None: as its spec says."""
    spec, tried, found = context.spec, _tried_on(context, parts), _candidates_on(context, context.spec, parts)
    known = None if tried is None else tried.kept_plan
    if not found:
        return None, ""
    if tried is not None and known is not None and known.divides_as(found[0]) and spec.runs(known):
        return known, f"measured fastest of {len(tried.plans)} in launch {tried.launch}"
    alone = spec.asked.planner is not None and spec.asked.planner.trial is not None and len(found) == 1
    return found[0], "the only one to try" if alone else "the shortest that these GPUs hold"


def _candidates_on(
    context: ReconcileContext, spec: JobSpec, parts: Sequence[PoolPart]
) -> tuple[LaunchDegrees, ...]:
    return spec.candidates_on(parts, None if context.assignment is None else context.assignment.memory)


def _tried_on(context: ReconcileContext, parts: Sequence[PoolPart]) -> PlanTrial | None:
    """Trials of the job on such GPUs; None: none."""
    trial = context.view.status.trial
    same = trial is not None and (trial.gpus, trial.of) == (_shape(parts), context.spec.planned_as)
    return trial if same and trial is not None and not trial.was_ignored else None


def _shape(parts: Sequence[PoolPart]) -> str:
    return " + ".join(f"{count} x {gpu_type}" for gpu_type, count in types_by_rank(parts))[:253]


def to_try(context: ReconcileContext) -> tuple[Candidate, ...]:
    """The candidates that a launch tries, the one that was launched first; none: there are not several."""
    parts, spec = context.allocation.by_pool, context.view.spec
    if spec is None or spec.asked.planner is None or spec.asked.planner.trial is None:
        return ()
    found = () if _tried_on(context, parts) is not None else _candidates_on(context, spec, parts)
    if len(found) < 2 or context.allocation.degrees != found[0]:
        return ()
    return tuple(Candidate(**{name: getattr(one, name) for name in Candidate.model_fields}) for one in found)


TRIES_NONE = "its trainer is of an older release, which tries no plans. To fix: an image of this release"
"""Reason of each plan where a job's trainer does not know them."""


def with_trial(context: ReconcileContext, status: TrainingJobStatus, report: Report) -> TrainingJobStatus:
    """The status with what the gang has tried, and with the plan that goes on."""
    allocation, candidates, known = status.allocation, context.plan.candidates, status.trial
    if allocation is None or allocation.degrees is None or report.epoch != context.plan.epoch:
        return status
    if not candidates or allocation.ending is not None:
        return status
    results = report.tried
    if not results and report.step > (report.resumed_from_step or 0):
        # Others say before their first step that they try them.
        results = (Tried(reason=TRIES_NONE),) * len(candidates)
    if len(candidates) != len(results):
        return status
    begun = known is not None and known.launch == allocation.launch
    if not begun and context.spec.asked.planner is None:
        return status  # of a new operator, which has yet to plan
    plans = tuple(
        TriedPlan(
            plan=allocation.degrees.under(candidate),
            step_seconds=one.step_seconds,
            reason=one.reason,
        )
        for candidate, one in zip(candidates, results, strict=True)
    )
    kept = report.kept if report.kept is not None and report.kept < len(plans) else None
    trial = PlanTrial(
        launch=allocation.launch,
        gpus=_shape(allocation.by_pool),
        # The planner may have been edited since, for the next launch.
        of=known.of if known is not None and begun else context.spec.planned_as,
        plans=plans,
        kept=kept,
    )
    if trial.kept_plan is not None:
        allocation = allocation.replace(degrees=trial.kept_plan)
    return status.replace(trial=trial, allocation=allocation)


def _parts(
    placement: Placement, pods: Sequence[str], speeds: Sequence[float], per_pod: int
) -> tuple[AllocationPart, ...]:
    """Parts of the gang by pool; empty: it is in one. ``speeds``: relative, of each part."""
    found, first = [], 0
    for part, speed in zip(placement.parts, speeds or (1.0,) * len(placement.parts), strict=True):
        end = first + part.gpus // per_pod
        names = tuple(pods[first:end])
        found.append(AllocationPart(pool=part.pool, gpu_type=part.gpu_type, pods=names, speed=speed))
        first = end
    return tuple(found)


def _not_admitted(
    context: ReconcileContext, status: TrainingJobStatus, reason: str, message: str
) -> TrainingJobStatus:
    status = with_condition(context, status, JobCondition.ADMITTED, False, reason, message)
    running = status.condition(JobCondition.RUNNING)
    if running is not None and not running.is_true and running.reason in ENDED_REASONS:
        return status  # why the last launch ended is worth more than "see Admitted"
    return with_condition(
        context, status, JobCondition.RUNNING, False, JobReason.NOT_ADMITTED, "see condition Admitted"
    )


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
        candidates=to_try(context),
    )
    status = with_condition(
        context,
        known,
        JobCondition.RUNNING,
        False,
        JobReason.RANKS_MEETING,
        f"{counted(len(plan.pods), 'pod', 'run')}; ranks connect and load the checkpoint",
    )
    # A script acknowledges nothing that would ask for the next pass: it runs with the plan's writing.
    again = 0.0 if view.is_script else context.settings.start_seconds
    return StepResult(status=status, actions=(WritePlan(plan),), requeue_after_seconds=again)


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
    """Rights that the launch's pods need in order to report; none where they are known to exist.

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
    resource, settings = context.pool_of(pod).pool.gpu_resource, context.settings
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
    """Pods that do not run yet, with the reasons, as text to append."""
    found: dict[str, list[str]] = {}
    for pod in context.view.gang:
        if pod.reason and not pod.ready_for_plan:
            found.setdefault(f"{pod.reason} {pod.detail}".strip(), []).append(pod.name)
    return "".join(f"; {some_of(pods)}: {why}" for why, pods in found.items())
