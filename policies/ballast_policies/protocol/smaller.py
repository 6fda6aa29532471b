"""Which pods a gang becomes smaller by: its trainer's proposal, the allocator's request, nodes that leave."""

from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.moves import Move, Wait, WaitFor, WritePlan
from ballast_policies.protocol.observed import (
    Deadline,
    Gang,
    Observed,
    OfferKind,
    ProposedShrink,
    WrittenPlan,
)


def leave(seen: Observed, plan: WrittenPlan) -> Move:
    """Shrink onto the survivors, if there are some; else train on while there is time."""
    kept, going = seen.survivors, set(seen.leaving)
    smaller = bool(kept) and kept[0] == plan.pods[0] and set(kept) <= set(plan.pods) - going
    if smaller and len(set(kept)) == len(kept) and not seen.script:
        return WritePlan(seen.next_epoch, Directive.SHRINK, kept)
    return Wait(WaitFor.TRAINER, Deadline.NOTICE)


def asked_to_keep(seen: Observed, gang: Gang, plan: WrittenPlan) -> tuple[str, ...]:
    """Pods that the allocator asks this very gang to continue with; empty: it asks for no shrink."""
    offer = seen.offer
    if offer is None or offer.kind is not OfferKind.KEEP or offer.launch != gang.launch:
        return ()
    if seen.script or not offer.keep or not offer.same_placement or set(plan.pods) != set(gang.pods):
        return ()
    kept = set(offer.keep)
    smaller = kept < set(plan.pods) and len(kept) == len(offer.keep) and offer.keep[0] == plan.pods[0]
    return offer.keep if smaller else ()


def misfit(plan: WrittenPlan, proposal: ProposedShrink) -> str:
    """Why a proposal does not fit the plan's pods, as text; empty: it does."""
    named = sorted((*proposal.kept, *proposal.released))
    if named != sorted(plan.pods):
        return f"the proposal names {named}, the plan's pods are {sorted(plan.pods)}"
    if not proposal.kept or not proposal.released:
        return "a repack keeps at least one pod and releases at least one"
    if proposal.kept[0] != plan.pods[0]:
        return f"rank 0 must stay {plan.pods[0]}, the proposal moves it to {proposal.kept[0]}"
    return ""
