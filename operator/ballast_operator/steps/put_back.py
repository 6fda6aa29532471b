"""What a running gang needs and someone has deleted or changed: it is written again."""

from ballast_operator.desired.access import access_objects
from ballast_operator.desired.lease import lease_object
from ballast_operator.kube.kinds import LEASE
from ballast_operator.steps.context import Action, Apply, ReconcileContext, WritePlan

LOOK_SECONDS = 15.0
"""How often a gang that trains is looked at, whatever it tells."""


def missing_objects(context: ReconcileContext) -> tuple[Action, ...]:
    """Lease and plan where they are gone; the service account and its role where the trainer is silent."""
    view = context.view
    actions: list[Action] = []
    if view.lease is None:
        actions.append(Apply(LEASE, lease_object(view, context.settings.heartbeat_seconds)))
    elif view.listens and view.lease.quiet_seconds >= max(LOOK_SECONDS, 2 * context.settings.renew_seconds):
        actions += [Apply(kind, body) for kind, body in access_objects(view)]
    if not view.plan_intact:
        actions.append(WritePlan(context.plan))
    return tuple(actions)
