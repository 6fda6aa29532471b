"""What a running gang reports becomes its status."""

import dataclasses

import pytest
from ballast_operator.steps.context import WritePlan
from ballast_operator.steps.decide import take_step
from ballast_operator.steps.running import progress
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack, Directive
from ballast_policies.protocol.cause import Cause

from tests.operator.steps.contexts import (
    PROPOSAL,
    a_context,
    a_report,
    a_running_view,
    after,
    keep,
)

ACKNOWLEDGED = Ack(epoch=1, step=0)


def reporting(**changes):
    return a_running_view(lease=LeaseView(ack=ACKNOWLEDGED, report=a_report(**changes)))


def test_progress_has_the_report_the_percentage_and_the_expected_end():
    """50 of 100 steps at 5 steps/s: ten seconds to go."""
    found = progress(a_context(seconds=10), a_report(imbalance=0.25, checkpoint_step=40))
    assert (found.step, found.percent, found.eta) == (50, 50, after(20))
    assert (found.steps_per_second, found.loss, found.imbalance) == (5.0, 2.0, 0.25)
    assert found.checkpoint_step == 40


def test_the_validation_loss_stays_until_the_next_evaluation():
    """Reports of a new launch have none until it evaluates."""
    first = take_step(a_context(reporting(validation_loss=1.5, validation_step=40))).status
    assert (first.progress.validation_loss, first.progress.validation_step) == (1.5, 40)
    second = take_step(a_context(dataclasses.replace(reporting(), status=first), seconds=5)).status
    assert (second.progress.validation_loss, second.progress.validation_step) == (1.5, 40)


@pytest.mark.parametrize(
    ("report", "want"),
    [
        ({"loss": float("nan")}, {"loss": None}),
        ({"bubble": 1.0000001}, {"bubble": 1.0}),
        ({"validation_loss": float("inf"), "validation_step": 50}, {"validation_loss": None}),
        ({"checkpoint_step": 51}, {"checkpoint_step": 50}),
        ({"step": -1}, {"step": 0}),
        ({"steps_per_second": 0.0}, {"eta": None}),
    ],
    ids=[
        "loss is not a number",
        "rounded above 1",
        "validation loss is infinite",
        "checkpoint ahead",
        "negative step",
        "at a standstill",
    ],
)
def test_a_reported_number_outside_its_range_is_brought_into_it(report, want):
    """The status is valid whatever the trainer reports, even what no report can be read with."""
    found = progress(a_context(), a_report().model_copy(update=report))
    assert {name: getattr(found, name) for name in want} == want


def test_a_rebalance_is_listed_once_and_completed_by_later_reports():
    """The imbalance after it is measured later; the entry keeps its time."""
    first = reporting(rebalances=1, last_rebalance_step=40, imbalance_before=0.5)
    status = take_step(a_context(first, seconds=5)).status
    second = reporting(rebalances=1, last_rebalance_step=40, imbalance_before=0.5, imbalance_after=0.1)
    result = take_step(a_context(dataclasses.replace(second, status=status), seconds=9))
    (entry,) = result.status.rebalances
    assert (entry.step, entry.time) == (40, after(5))
    assert (entry.imbalance_before, entry.imbalance_after) == (0.5, 0.1)
    assert "imbalance 0.500 -> 0.100" in result.status.condition("Rebalanced").message


def test_a_report_of_a_later_epoch_than_the_plan_is_left_alone():
    """It belongs to a plan that this pass does not see yet."""
    assert take_step(a_context(reporting(epoch=2))).status.progress is None


def test_a_proposal_is_answered_before_the_gang_grows():
    """A shrink that is proposed and GPUs that are offered in the same pass: the shrink is planned."""
    view = a_running_view(lease=LeaseView(ack=ACKNOWLEDGED, proposal=PROPOSAL))
    (action,) = take_step(a_context(view, assignment=keep(extra_nodes=("m",)))).actions
    assert isinstance(action, WritePlan) and action.plan.directive is Directive.SHRINK


def test_ranks_that_exit_with_success_before_the_last_step_end_the_launch():
    """A user error, once the last step has had time to be announced."""
    view = a_running_view(lease=LeaseView(ack=ACKNOWLEDGED, quiet_seconds=11.0))
    view = dataclasses.replace(
        view, pods=tuple(dataclasses.replace(pod, phase="Succeeded", exit_code=0) for pod in view.pods)
    )
    ending = take_step(a_context(view)).status.allocation.ending
    assert ending.cause is Cause.USER_ERROR and "names no last step" in ending.message
