"""Whether a repack that the trainer proposes may be carried out, and why not."""

from ballast_policies.contract import Proposal
from ballast_policies.protocol.observed import ProposedShrink, WrittenPlan
from ballast_policies.protocol.smaller import misfit

from ballast_operator.steps.context import ReconcileContext


def refusal(context: ReconcileContext, proposal: Proposal) -> str:
    """Why the proposal cannot be accepted, with numbers; empty: it can."""
    plan, spec, repack = context.plan, context.spec, context.spec.config.repack
    per_pod = context.allocation.gpus_per_pod
    kept = len(proposal.kept_pods) * per_pod
    if not repack.enabled:
        return "spec.repack.enabled is false"
    written = WrittenPlan(plan.epoch, plan.launch, plan.directive, plan.pods)
    proposed = ProposedShrink(proposal.epoch, proposal.kept_pods, proposal.released_pods)
    if text := misfit(written, proposed):
        return text
    each = spec.ranks_per_position
    keeps = f"the proposal keeps {kept} pods" if per_pod == 1 else f"the proposal keeps {kept} ranks"
    ranks_each = f" with {each} ranks each" if each > 1 else ""
    if kept % each:
        return f"{keeps}, not a multiple of the {each} at each pipeline position"
    if kept < repack.min_stages * each:
        return f"{keeps}, below spec.repack.minStages={repack.min_stages}{ranks_each}"
    target = repack.target_stages
    if target is not None and kept != target * each:
        return f"{keeps}, spec.repack.targetStages={target}{ranks_each}"
    limit = proposal.step_seconds_before * (1 + repack.max_slowdown)
    if not proposal.step_seconds_after <= limit:
        return (
            f"a step would take {proposal.step_seconds_after:.4g} s instead of "
            f"{proposal.step_seconds_before:.4g} s, above the {limit:.4g} s that "
            f"spec.repack.maxSlowdown={repack.max_slowdown:g} allows"
        )
    if text := _stages_problem(context, proposal, kept):
        return text
    try:
        plan.shrink(proposal)
    except ValueError as error:
        return str(error)
    return ""


def _stages_problem(context: ReconcileContext, proposal: Proposal, kept: int) -> str:
    """Why the proposal's stages do not partition the model over the ``kept`` ranks; empty: they do."""
    stages = proposal.stages
    if not stages:
        return ""  # the trainer chooses
    highest = max(stage.rank for stage in stages)
    if highest >= kept:
        return f"a stage is on rank {highest}, but the proposal keeps {kept} ranks"
    layers, end = _layers(context), max(stage.end_layer for stage in stages)
    if layers is not None and end != layers:
        return f"the stages end at layer {end}, the model has {layers} layers"
    idle = sorted(set(range(kept)) - {stage.rank for stage in stages})
    if idle and context.spec.ranks_per_position == 1:
        return f"rank {idle[0]} would have no stage"
    return ""


def _layers(context: ReconcileContext) -> int | None:
    """Layers of the model, by the spec or, where it says nothing, by the plan in force; None: not known."""
    if context.spec.layers is not None:
        return context.spec.layers
    return max((stage.end_layer for stage in context.plan.stages), default=None)
