"""What the job's conditions tell about the trainer's messages."""

import dataclasses

import pytest
from ballast_operator.api.conditions import JobCondition
from ballast_operator.steps.running import CLIENT_SECONDS, with_refused_messages, with_reporting
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack

from tests.operator.steps.contexts import NOW, PODS, a_context, a_running_view, after
from tests.operator.views.builders import a_plan, a_spec, a_view

READABLE, REPORTING = JobCondition.MESSAGES_READABLE, JobCondition.REPORTING


def refusing(text):
    return LeaseView(ack=Ack(epoch=1, step=0), refused=text)


def test_a_refused_message_is_named_and_a_readable_one_takes_it_back():
    """Without a refusal there is no condition at all."""
    context = a_context(a_running_view(lease=refusing("")))
    status = context.view.status
    assert with_refused_messages(context, status) is status
    context = a_context(a_running_view(lease=refusing("report.loss: NaN is not a number")))
    refused = with_refused_messages(context, status)
    condition = refused.condition(READABLE)
    assert not condition.is_true
    assert "report.loss" in condition.message
    again = with_refused_messages(a_context(a_running_view(lease=refusing(""))), refused)
    assert again.is_true(READABLE)


def test_a_long_refusal_fits_into_a_condition():
    """The API server takes 32 KiB; people read a line."""
    context = a_context(a_running_view(lease=refusing("x" * 5000)))
    assert len(with_refused_messages(context, context.view.status).condition(READABLE).message) == 1024


@pytest.mark.parametrize(
    ("throughput", "counts"),
    [({"v100": 3.0}, "as stated in spec.throughput"), ({}, "spec.throughput does not have v100")],
)
def test_a_script_without_the_client_is_told_what_it_loses(throughput, counts):
    """Once it has had the time to connect, and with the way to repair it."""
    spec = a_spec(throughput=throughput)
    view = a_view(pods=PODS, plan=a_plan(PODS), spec=spec)
    view = dataclasses.replace(view, plan_written=NOW)
    early = a_context(view, seconds=CLIENT_SECONDS - 1)
    assert with_reporting(early, view.status).condition(REPORTING) is None
    late = dataclasses.replace(early, now=after(CLIENT_SECONDS))
    condition = with_reporting(late, view.status).condition(REPORTING)
    assert not condition.is_true
    assert counts in condition.message
    assert "To fix:" in condition.message


def test_a_script_with_the_client_reports():
    """From its first acknowledgement on."""
    context = a_context(a_running_view(epoch=1))
    assert with_reporting(context, context.view.status).is_true(REPORTING)
