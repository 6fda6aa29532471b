"""A failed launch is told apart by cause."""

import dataclasses
import datetime

import pytest
from ballast_operator.steps.decide import take_step
from ballast_operator.steps.failure import describe
from ballast_operator.views.lease import LeaseView
from ballast_policies.contract import Ack, Directive, ExitCode, ExitReason, TerminationMessage
from ballast_policies.protocol.cause import Cause

from tests.operator.steps.contexts import NOW, PODS, a_context, a_pod, a_running_view, with_pod
from tests.operator.views.builders import a_plan

FAILED = TerminationMessage(reason=ExitReason.FAILED, message="ValueError: boom")
QUIET = LeaseView(ack=Ack(epoch=1, step=0), quiet_seconds=61.0)
AN_END = {"phase": "Failed", "exit_code": 1}


def peer_lost(rank, *, ended_at=None, **lease):
    view = a_running_view(lease=LeaseView(ack=Ack(epoch=1, step=0), **lease))
    return with_pod(view, rank, phase="Failed", exit_code=int(ExitCode.PEER_LOST), ended_at=ended_at)


CASES = {
    "every rank trains": (a_running_view(), None),
    "the model raises": (with_pod(a_running_view(), 2, **AN_END, message=FAILED), Cause.USER_ERROR),
    "out of memory": (with_pod(a_running_view(), 2, phase="Failed", reason="OOMKilled"), Cause.USER_ERROR),
    "evicted": (with_pod(a_running_view(), 2, **AN_END, disrupted=True), Cause.POD_LOST),
    "deleted by someone else": (with_pod(a_running_view(), 2, leaving=True), Cause.POD_LOST),
    "gone without a trace": (
        dataclasses.replace(a_running_view(), pods=a_running_view().pods[:3]),
        Cause.POD_LOST,
    ),
    "its node died": (
        with_pod(a_running_view(), 2, **AN_END, disrupted=True, node_ready=False),
        Cause.NODE_LOST,
    ),
    "its node is silent and so is the job": (
        with_pod(a_running_view(lease=QUIET), 2, node_ready=False),
        Cause.NODE_LOST,
    ),
    "pods run and the lease is not renewed": (a_running_view(lease=QUIET), Cause.HUNG),
    "a rank lost its peer, the other's end is not seen yet": (
        with_pod(a_running_view(), 2, phase="Failed", exit_code=int(ExitCode.PEER_LOST)),
        None,
    ),
    "a rank lost its peer, and the next renewal may still come": (peer_lost(2, quiet_seconds=29.0), None),
    "a rank lost its peer, and no renewal comes": (peer_lost(2, quiet_seconds=31.0), Cause.PEER_LOST),
    "a rank lost its peer, and the lease is given up": (
        peer_lost(2, quiet_seconds=11.0, released=True),
        Cause.PEER_LOST,
    ),
    "the rank that renews lost its peer": (peer_lost(0, quiet_seconds=11.0), Cause.PEER_LOST),
    "the rank that renews lost its peer a moment ago": (
        peer_lost(0, quiet_seconds=25.0, ended_at=NOW - datetime.timedelta(seconds=3)),
        None,
    ),
    "the lease says that it lasts longer": (
        a_running_view(lease=dataclasses.replace(QUIET, duration_seconds=90.0)),
        None,
    ),
    "the lease says that it lasts for years": (
        a_running_view(lease=dataclasses.replace(QUIET, duration_seconds=1e9, quiet_seconds=601.0)),
        Cause.HUNG,
    ),
    "a pod that the shrink released ends": (
        with_pod(
            a_running_view(plan=a_plan(PODS[:2], epoch=2, directive=Directive.SHRINK), epoch=2),
            3,
            **AN_END,
        ),
        None,
    ),
    "a pod that is still to join fails": (
        dataclasses.replace(
            a_running_view(plan=a_plan(PODS[:3])),
            status=a_running_view().status.replace(
                allocation=a_running_view().status.allocation.replace(joining=(PODS[3],), first_newcomer=3)
            ),
            pods=(*a_running_view().pods[:3], a_pod(PODS[3], 3, **AN_END)),
        ),
        None,
    ),
}


def cause(context):
    ending = take_step(context).status.allocation.ending
    return None if ending is None else ending.cause


@pytest.mark.parametrize(("view", "want"), CASES.values(), ids=CASES.keys())
def test_a_launch_fails_by(view, want):
    """None: it has not failed, or the first cause is still waited for."""
    assert cause(a_context(view)) == want


def test_a_plan_that_is_never_acknowledged_is_a_hung_start():
    """After start_seconds; before that it is waited for."""
    view = a_running_view(lease=None)
    assert cause(a_context(view, seconds=299)) is None
    assert cause(a_context(view, seconds=301)) is Cause.HUNG


def test_an_end_is_described_by_pod_exit_code_reason_and_message():
    """What the trainer said comes before what the kubelet says."""
    pod = a_pod("job-1-2", 2, **AN_END, message=FAILED, reason="Error")
    assert describe(pod) == f"pod job-1-2 ended with exit code 1 ({ExitReason.FAILED}): ValueError: boom"


def test_a_pod_that_was_killed_for_its_memory_is_told_so_and_not_by_its_last_line():
    """The kernel kills it between two lines of its log."""
    pod = a_pod("job-1-2", 2, phase="Failed", exit_code=137, reason="OOMKilled", detail="INFO step 3 done")
    assert describe(pod) == (
        "pod job-1-2 was killed for its memory (OOMKilled): it used more than its container's limit. "
        "To fix: raise resources.limits.memory in spec.template, or use more stages"
    )
