"""Texts for people on what ends a launch."""

from collections.abc import Collection

from ballast_policies.contract import Directive, ExitReason
from ballast_policies.protocol.moves import End, Why

from ballast_operator.api.conditions import some_of
from ballast_operator.api.job_allocation import NodesLeaving
from ballast_operator.steps.context import ReconcileContext
from ballast_operator.steps.gang import waits
from ballast_operator.views.clock import show
from ballast_operator.views.pod import PodView

EXITED_WELL = "every rank of the command has exited with success"
"""Reason that a script has succeeded."""


def leaving_text(leaving: NodesLeaving | None) -> str:
    """Text on the nodes that go, with the time and the source of the notice."""
    if leaving is None:
        return "a node of the gang is about to go"
    nodes, go = ("nodes", "go") if len(leaving.nodes) > 1 else ("node", "goes")
    return f"{nodes} {some_of(leaving.nodes)} {go} at {show(leaving.at)}, by {leaving.by}"


def lost_text(context: ReconcileContext, lost: Collection[str]) -> str:
    """Text on the loss of pods without which the gang goes on."""
    there, names = {pod.name: pod for pod in context.view.gang if not pod.forced}, sorted(lost)
    found = [there[name] for name in names if name in there]
    if len(found) < len(names):
        return f"deleted by someone else: {some_of(names)}"
    dead = sorted({pod.node for pod in found if not pod.node_ready})
    ended = [describe(pod) for pod in found if not pod.alive]
    return "; ".join([*([f"node {some_of(dead)} is lost"] if dead else []), *ended])


def describe(pod: PodView) -> str:
    """A pod's end, as text."""
    if pod.reason == "OOMKilled" and pod.message is None:
        # What it printed last has nothing to do with it.
        return (
            f"pod {pod.name} was killed for its memory (OOMKilled): it used more than its container's limit. "
            "To fix: raise resources.limits.memory in spec.template, or use more stages"
        )
    code = "" if pod.exit_code is None else f" with exit code {pod.exit_code}"
    said = pod.message.message if pod.message is not None else pod.detail
    reason = pod.message.reason if pod.message is not None else pod.reason
    return f"pod {pod.name} ended{code}" + (f" ({reason})" if reason else "") + (f": {said}" if said else "")


def _led(context: ReconcileContext, *pods: str) -> str:
    """Reason that the others end with pods told to go, though they may go on; as text."""
    plan = context.view.launched_plan
    if plan is None or plan.pods[0] not in pods or not context.view.resizable:
        return ""
    return "; rank 0 hosts the rendezvous, so the others do not go on in place without its pod"


def why_it_ends(context: ReconcileContext, end: End) -> str:
    """Reason that a launch has to end, with numbers and names."""
    view, settings = context.view, context.settings
    pods = [pod for pod in view.pods if pod.name in end.pods]
    quiet = view.lease.quiet_seconds if view.lease is not None else 0.0
    match end.why:
        case Why.DONE if view.is_script:
            return EXITED_WELL
        case Why.DONE if view.ended_early:
            done = f"{view.finished_step} of {context.spec.config.total_steps} steps"
            return f"the callback ended the training after {done}: {view.ended_early}"
        case Why.DONE:
            return f"{view.finished_step} of {context.spec.config.total_steps} steps are done and saved"
        case Why.SUSPENDED:
            hold = context.hold
            return hold.message if hold is not None else "the job is suspended"
        case Why.TAKEN_BACK:
            why = context.assignment.why if context.assignment is not None else ""
            return why or "the allocator took the GPUs back"
        case Why.GPUS_TAKEN:
            return (
                f"the GPUs of the launch are not free, and no pod of it was made: {context.around.shortage}"
            )
        case Why.NOT_RUNNING_IN_TIME:
            ready, gang = sum(pod.ready_for_plan for pod in view.gang), context.allocation.pods
            return (
                f"only {ready} of {len(gang)} pods ran within {context.bind_seconds:g} s, "
                f"so all are deleted{waits(context)}"
            )
        case Why.POD_FAILED:
            (pod,) = pods
            if pod.lost_peer:
                return f"{describe(pod)}; no other rank is to blame"
            if pod.message is not None and pod.message.reason is ExitReason.STOPPED:
                return describe(pod) + _led(context, pod.name)
            return describe(pod) if pod.node_ready else f"node {pod.node} is lost; {describe(pod)}"
        case Why.POD_DELETED:
            dead = ", ".join(sorted({pod.node for pod in pods if not pod.node_ready}))
            if dead:
                return f"node {dead} is lost: it is not ready, and pod {', '.join(end.pods)} is being deleted"
            return f"pod {', '.join(end.pods)} is being deleted by someone else" + _led(context, *end.pods)
        case Why.POD_MISSING:
            return lost_text(context, end.pods)
        case Why.NODE_SILENT:
            nodes = ", ".join(sorted({pod.node for pod in pods}))
            return f"node {nodes} is not ready and the job is silent"
        case Why.NOT_RENEWED:
            return f"the lease was not renewed for {quiet:.0f} s while pods run"
        case Why.NOT_STARTED:
            return f"no acknowledgement of the plan within {settings.start_seconds:g} s"
        case Why.NOT_ACKNOWLEDGED:
            plan = context.plan
            shrinks = plan.directive is Directive.SHRINK
            change, limit = (
                ("shrink", settings.shrink_seconds) if shrinks else ("growth", settings.start_seconds)
            )
            return (
                f"the {change} to {len(plan.pods)} pods (epoch {plan.epoch}) was not acknowledged within "
                f"{limit:g} s; restarting from the checkpoint"
            )
        case Why.NODE_LEAVES:
            return leaving_text(context.allocation.leaving)
        case Why.STEPS_ADDED:
            more = context.spec.config.total_steps
            return f"the {view.launched_steps} steps of its launch are done; spec.totalSteps is {more} now"
        case Why.EXITED_EARLY:
            return "every rank exited with success, but training is not done: the lease names no last step"
