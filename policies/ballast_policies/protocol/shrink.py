"""Pods that a gang is left with: by its trainer's proposal, the allocator's request, or as nodes go."""

import dataclasses
from collections.abc import Callable, Collection, Sequence

from ballast_policies.contract.job.pipeline import RepackConfig
from ballast_policies.contract.messages import Proposal
from ballast_policies.contract.plan import Directive, Plan
from ballast_policies.protocol.moves import Move, Wait, WaitFor, WritePlan
from ballast_policies.protocol.observed import Action, Deadline, Gang, Observed, WrittenPlan


def pods_after_drain(
    pods: Sequence[str],
    going: Collection[str],
    *,
    together: int,
    fits: Callable[[int], bool],
    lost: Collection[str] = (),
) -> tuple[str, ...]:
    """Pods that a gang can continue with once ``going`` are gone, by rank; empty: it cannot, or none goes.

    Args:
        pods: of the plan, by rank; the first, rank 0's, stays unless it is lost.
        going: names of those that go.
        together: pods of a whole position of the pipeline, which join and leave as one.
        fits: whether the job may have a gang of so many pods.
        lost: those of ``going`` that are gone already, and that the others go on in place without.
    """
    blocks = [pods[first : first + together] for first in range(0, len(pods), together)]
    kept = [block for block in blocks if not set(going) & set(block)]
    if not kept or len(kept) == len(blocks) or (kept[0] != blocks[0] and pods[0] not in lost):
        return ()
    for count in range(len(kept), 0, -1):
        if fits(count * together):
            return tuple(pod for block in kept[:count] for pod in block)
    return ()


def shrink_for_drain(seen: Observed, plan: WrittenPlan) -> Move:
    """Shrink onto the survivors, if rank 0 is one of them; else train on while there is time."""
    if plan.pods[0] in seen.survivors and are_left(seen, plan, seen.leaving):
        return WritePlan(seen.next_epoch, Directive.SHRINK, seen.survivors)
    return Wait(WaitFor.TRAINER, Deadline.NOTICE)


def are_left(seen: Observed, plan: WrittenPlan, going: Collection[str]) -> bool:
    """True if the gang can train on with its survivors, and ``going`` are none of them."""
    kept, first = seen.survivors, plan.pods[0]
    # Rank 0 leads a change of size, and is another process only where its own is gone.
    led = first in kept[:1] or not any(pod.name == first and pod.answers for pod in seen.gang_pods)
    smaller = bool(kept) and led and set(kept) <= set(plan.pods) - set(going)
    return smaller and len(set(kept)) == len(kept) and not seen.script


def asked_to_keep(seen: Observed, gang: Gang, plan: WrittenPlan) -> tuple[str, ...]:
    """Pods that the allocator asks this very gang to continue with; empty: it asks for no shrink."""
    offer = seen.offer
    if offer is None or offer.kind is not Action.KEEP or offer.launch != gang.launch:
        return ()
    if seen.script or not offer.keep or not offer.same_placement or set(plan.pods) != set(gang.pods):
        return ()
    kept = set(offer.keep)
    smaller = kept < set(plan.pods) and len(kept) == len(offer.keep) and offer.keep[0] == plan.pods[0]
    return offer.keep if smaller else ()


def named_pods_error(pods: Sequence[str], kept: Sequence[str], released: Sequence[str]) -> str:
    """Reason that a proposal's pods are not a split of the plan's ``pods``, as text; empty: they are."""
    named = sorted((*kept, *released))
    if named != sorted(pods):
        return f"the proposal names {named}, the plan's pods are {sorted(pods)}"
    if not kept or not released:
        return "a repack keeps at least one pod and releases at least one"
    if kept[0] != pods[0]:
        return f"rank 0 must stay {pods[0]}, the proposal moves it to {kept[0]}"
    return ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RepackLimits:
    """Limits of a job's spec and its launch on a repack.

    Attributes:
        repack: of the spec.
        gpus_per_pod: GPUs, and ranks, of each pod of the launch.
        ranks_per_position: ranks at each position of the pipeline.
        layers: of the model, as the spec says; None: as the plan's stages have it.
    """

    repack: RepackConfig
    gpus_per_pod: int = 1
    ranks_per_position: int = 1
    layers: int | None = None


def proposal_error(plan: Plan, proposal: Proposal, limits: RepackLimits) -> str:
    """Reason to refuse a trainer's proposal for ``plan``, with numbers; empty: it is accepted."""
    repack, each = limits.repack, limits.ranks_per_position
    kept = len(proposal.kept_pods) * limits.gpus_per_pod
    if not repack.enabled:
        return "spec.repack.enabled is false"
    if text := named_pods_error(plan.pods, proposal.kept_pods, proposal.released_pods):
        return text
    what = "pods" if limits.gpus_per_pod == 1 else "ranks"
    keeps = f"the proposal keeps {kept} {what}"
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
    if text := _stages_error(plan, proposal, kept, limits):
        return text
    try:
        plan.shrink(proposal)
    except ValueError as error:
        return str(error)
    return ""


def _stages_error(plan: Plan, proposal: Proposal, kept: int, limits: RepackLimits) -> str:
    """Reason that the proposal's stages do not partition the model over ``kept`` ranks; empty: they do."""
    stages = proposal.stages
    if not stages:
        return ""  # the trainer chooses
    highest = max(stage.rank for stage in stages)
    if highest >= kept:
        return f"a stage is on rank {highest}, but the proposal keeps {kept} ranks"
    layers, end = limits.layers, max(stage.end_layer for stage in stages)
    if layers is None:
        layers = max((stage.end_layer for stage in plan.stages), default=None)
    if layers is not None and end != layers:
        return f"the stages end at layer {end}, the model has {layers} layers"
    idle = sorted(set(range(kept)) - {stage.rank for stage in stages})
    if idle and limits.ranks_per_position == 1:
        return f"rank {idle[0]} would have no stage"
    return ""
