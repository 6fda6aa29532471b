"""What a gang needs and is gone is written again."""

import dataclasses

from ballast_operator.kube.kinds import LEASE, ROLE, ROLE_BINDING, SERVICE_ACCOUNT
from ballast_operator.settings import JobSettings
from ballast_operator.steps.context import Apply, WritePlan
from ballast_operator.steps.running import LOOK_SECONDS, recreate_owned_objects
from ballast_policies.contract import Ack

from tests.operator.steps.contexts import LeaseView, a_context, a_running_view


def lease(quiet_seconds):
    return LeaseView(ack=Ack(epoch=1, step=0), quiet_seconds=quiet_seconds)


def test_a_gang_that_has_all_it_needs_gets_nothing():
    """No write in a pass of a healthy job."""
    view = dataclasses.replace(a_running_view(lease=lease(0.0)), plan_intact=True)
    assert recreate_owned_objects(a_context(view)) == ()


def test_a_deleted_lease_is_written_again():
    """Rank 0 renews it, and does not create it."""
    view = dataclasses.replace(a_running_view(lease=None), plan_intact=True)
    (action,) = recreate_owned_objects(a_context(view))
    assert isinstance(action, Apply)
    assert action.kind is LEASE


def test_a_plan_that_somebody_changed_is_written_as_it_was():
    """With its epoch."""
    view = dataclasses.replace(a_running_view(lease=lease(0.0)), plan_intact=False)
    (action,) = recreate_owned_objects(a_context(view))
    assert isinstance(action, WritePlan)
    assert action.plan == view.plan


def test_a_silent_trainer_gets_its_service_account_and_role_again():
    """It may have lost the right to renew its lease; a trainer that renews has it."""
    quiet = max(LOOK_SECONDS, 2 * JobSettings().renew_seconds)
    view = dataclasses.replace(a_running_view(lease=lease(quiet)), plan_intact=True)
    actions = recreate_owned_objects(a_context(view))
    assert [action.kind for action in actions if isinstance(action, Apply)] == [
        SERVICE_ACCOUNT,
        ROLE,
        ROLE_BINDING,
    ]
