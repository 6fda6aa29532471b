"""Repack: check the proposal, write the smaller plan, delete the released pods once it is acknowledged."""

from ballast_policies.contract import Proposal

from ballast_operator.api.cause import Cause
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.training_job_status import Repacking, Survivor
from ballast_operator.steps.accounting import accrue_cost
from ballast_operator.steps.acknowledgement import await_acknowledgement
from ballast_operator.steps.context import (
    ReconcileContext,
    StepResult,
    WritePlan,
    with_condition,
)
from ballast_operator.steps.stopping import deletions

KEPT_REPACKS = 20
"""How many entries ``status.repacks`` keeps, newest last."""


def open_proposal(context: ReconcileContext) -> Proposal | None:
    """The trainer's proposal, if it is about the plan in force and has not been answered."""
    view = context.view
    plan, lease = view.launched_plan, view.lease
    if plan is None or lease is None or lease.proposal is None or not view.acknowledged:
        return None
    return lease.proposal if lease.proposal.epoch == plan.epoch else None


def refusal(context: ReconcileContext, proposal: Proposal) -> str:
    """Why the proposal cannot be accepted, with numbers; empty: it can."""
    plan, spec = context.plan, context.spec
    pods, kept = [rank.pod for rank in plan.ranks], len(proposal.kept_pods)
    repack = spec.config.repack
    if not repack.enabled:
        return "spec.repack.enabled is false"
    named = sorted((*proposal.kept_pods, *proposal.released_pods))
    if named != sorted(pods):
        return f"the proposal names {named}, the plan's pods are {sorted(pods)}"
    if proposal.kept_pods[0] != pods[0]:
        return f"rank 0 must stay {pods[0]}, the proposal moves it to {proposal.kept_pods[0]}"
    each = spec.ranks_per_position
    pods_each = f" with {each} pods each" if each > 1 else ""
    if kept % each:
        return f"the proposal keeps {kept} pods, not a multiple of the {each} at each pipeline position"
    if kept < repack.min_stages * each:
        return f"the proposal keeps {kept} pods, below spec.repack.minStages={repack.min_stages}{pods_each}"
    target = repack.target_stages
    if target is not None and kept != target * each:
        return f"the proposal keeps {kept} pods, spec.repack.targetStages={target}{pods_each}"
    limit = proposal.step_seconds_before * (1 + repack.max_slowdown)
    if not proposal.step_seconds_after <= limit:
        return (
            f"a step would take {proposal.step_seconds_after:.4g} s instead of "
            f"{proposal.step_seconds_before:.4g} s, above the {limit:.4g} s that "
            f"spec.repack.maxSlowdown={repack.max_slowdown:g} allows"
        )
    return _stages_problem(context, proposal)


def _stages_problem(context: ReconcileContext, proposal: Proposal) -> str:
    """Why the proposal's stages do not partition the model over the pods that stay; empty: they do."""
    stages, kept = proposal.stages, len(proposal.kept_pods)
    if not stages:
        return ""  # the trainer chooses
    highest = max(stage.rank for stage in stages)
    if highest >= kept:
        return f"a stage is on rank {highest}, but the proposal keeps {kept} pods"
    layers, end = _layers(context), max(stage.end_layer for stage in stages)
    if layers is not None and end != layers:
        return f"the stages end at layer {end}, the model has {layers} layers"
    idle = sorted(set(range(kept)) - {stage.rank for stage in stages})
    if idle and context.spec.ranks_per_position == 1:
        return f"rank {idle[0]} would have no stage"
    return ""


def _layers(context: ReconcileContext) -> int | None:
    """Layers of the model, by the spec or, where it says nothing, by the plan in force; None: not known."""
    if context.spec.config.model.layers is not None:
        return context.spec.config.model.layers
    return max((stage.end_layer for stage in context.plan.stages), default=None)


def answer_proposal(context: ReconcileContext, proposal: Proposal) -> StepResult:
    """Accept a proposal by writing the next plan, or refuse it."""
    status, shrunk = context.view.status, None
    why_not = refusal(context, proposal)
    if not why_not:
        try:
            shrunk = context.plan.shrink(proposal)
        except ValueError as error:
            why_not = str(error)
    if shrunk is None:
        message = f"proposal of step {proposal.step} refused: {why_not}"
        status = with_condition(
            context, status, JobCondition.REPACKED, False, JobReason.PROPOSAL_REFUSED, message
        )
        return StepResult(status=status)
    message = f"releasing {', '.join(proposal.released_pods)}: {proposal.reason}"
    status = with_condition(context, status, JobCondition.REPACKED, False, JobReason.REPACKING, message)
    return StepResult(
        status=status, actions=(WritePlan(shrunk),), requeue_after_seconds=context.settings.shrink_seconds
    )


def continue_shrink(context: ReconcileContext) -> StepResult:
    """One pass of a planned shrink: wait for the acknowledgement, delete the released pods, record it."""
    view, settings, plan, allocation = context.view, context.settings, context.plan, context.allocation
    assert view.plan_written is not None
    waiting = await_acknowledgement(
        context, plan, change="shrink", seconds=settings.shrink_seconds, cause=Cause.SHRINK_TIMEOUT
    )
    if waiting is not None:
        return waiting
    if view.released:
        actions = deletions(context, view.released, since=view.plan_written)
        return StepResult(status=view.status, actions=actions, requeue_after_seconds=settings.exit_seconds)
    node_of = allocation.node_of
    released = tuple(pod for pod in node_of if plan.rank_of(pod) is None)
    shrunk = allocation.with_pods({rank.pod: node_of[rank.pod] for rank in plan.ranks})
    entry = _record(context, released)
    status = accrue_cost(context, view.status)
    status = status.replace(allocation=shrunk, repacks=(*status.repacks, entry)[-KEPT_REPACKS:])
    message = f"{', '.join(released)} released at step {entry.step}; {len(shrunk.pods)} pods continue"
    status = with_condition(context, status, JobCondition.REPACKED, True, JobReason.PODS_RELEASED, message)
    return StepResult(
        status=status,
        allocate=True,
        requeue_after_seconds=0.0,
        metric_increments=(("repacks", "", 1), ("released_gpus", "", len(released))),
    )


def _record(context: ReconcileContext, released: tuple[str, ...]) -> Repacking:
    """The entry of ``status.repacks``."""
    view, plan, lease = context.view, context.plan, context.view.lease
    ack = lease.ack if lease is not None else None
    proposal = lease.proposal if lease is not None else None
    uids = {pod.name: pod.uid for pod in view.kept}
    entry = Repacking(
        epoch=plan.epoch,
        time=context.now.replace(microsecond=0),
        released_pods=released,
        survivors=tuple(
            Survivor(name=rank.pod, uid=uids[rank.pod]) for rank in plan.ranks if rank.pod in uids
        ),
        step=max(0, ack.step) if ack is not None else 0,
        pause_ms=max(0.0, ack.pause_ms) if ack is not None and ack.pause_ms is not None else None,
    )
    if proposal is None or proposal.epoch != plan.epoch - 1:
        return entry
    return entry.replace(
        step_seconds_before=max(0.0, proposal.step_seconds_before),
        step_seconds_after=max(0.0, proposal.step_seconds_after),
        reason=proposal.reason[:1024],
    )
