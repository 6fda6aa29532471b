"""A job without GPUs waits with a reason, or is launched."""

import dataclasses

import pytest
from ballast_operator.api.conditions import JobReason
from ballast_operator.steps.decide import take_step
from ballast_operator.steps.waiting import LOOK_AGAIN_SECONDS, decided

from tests.operator.steps.contexts import (
    a_context,
    after,
    an_idle_view,
    conditions,
    keep,
    place,
    release,
)

WAITS = {
    "no assignment yet": ({}, {"assignment": None}, "Pending"),
    "the assignment answers another launch": ({}, {"assignment": place(launches=5)}, "Pending"),
    "the allocator keeps a gang that has ended since": ({}, {"assignment": keep(launches=0)}, "Pending"),
    "no GPUs this round": (
        {},
        {"assignment": release(launches=0, reason=JobReason.WAITING_FOR_CAPACITY)},
        "WaitingForCapacity",
    ),
    "its GPUs are not free yet": (
        {},
        {"assignment": place(), "shortage": "0 of 4"},
        "WaitingForReleasedPods",
    ),
    "suspended": ({}, {"assignment": place(), "spec": {"suspend": True}}, "Suspended"),
    "pausing after a failure": ({"next_launch_at": after(31)}, {"assignment": place()}, "BackingOff"),
}


@pytest.mark.parametrize(("status", "context", "want"), WAITS.values(), ids=WAITS.keys())
def test_a_job_waits_with_the_reason(status, context, want):
    """No launch is written."""
    view = an_idle_view()
    view = dataclasses.replace(view, status=view.status.replace(**status))
    result = take_step(a_context(view, **context))
    assert result.status.allocation is None
    assert conditions(result)["Admitted"] == (False, want)


@pytest.mark.parametrize(
    ("age", "writes", "again"),
    [
        (0.0, False, 10.0),
        (9.0, False, 1.0),
        (10.0, True, LOOK_AGAIN_SECONDS),
        (-1.0, True, LOOK_AGAIN_SECONDS),
    ],
)
def test_a_new_job_is_not_told_that_there_is_no_decision_yet(age, writes, again):
    """The decision, which it asks for, writes its first status; one that is late is not waited for."""
    view = an_idle_view(created=after(1 - age))
    result = take_step(a_context(view, assignment=None))
    assert result.allocate
    assert result.write_later is not writes
    assert ("Admitted" in conditions(result)) is writes
    assert result.requeue_after_seconds == again


def test_a_job_that_waits_again_is_told_at_once():
    """Its status says something else, which no longer holds."""
    view = an_idle_view(created=after(0), status=an_idle_view().status.replace(next_launch_at=after(9)))
    result = take_step(a_context(view, assignment=place()))
    assert not result.write_later
    assert conditions(result)["Admitted"] == (False, "BackingOff")


def test_a_job_that_pauses_names_its_last_failure():
    """The reason is read where the wait is read."""
    status = an_idle_view().status.replace(next_launch_at=after(31))
    status = status.with_condition("Running", False, "UserError", "no layer 9", now=after(0), generation=1)
    result = take_step(a_context(an_idle_view(status=status), assignment=place()))
    (admitted,) = [c for c in result.status.conditions if c.type == "Admitted"]
    assert "failed 0 of at most 4 times; last: no layer 9; the next launch is not before" in admitted.message


def test_why_the_last_launch_ended_is_kept_while_the_job_waits():
    """It is worth more than "see condition Admitted"."""
    view = an_idle_view()
    status = view.status.with_condition(
        "Running", False, "UserError", "ValueError: boom", now=after(0), generation=1
    )
    view = dataclasses.replace(view, status=status)
    waiting = release(launches=0, reason=JobReason.WAITING_FOR_CAPACITY)
    running = take_step(a_context(view, assignment=waiting)).status.condition("Running")
    assert running.message == "ValueError: boom"


def test_a_decision_that_another_round_repeats_is_not_written_again():
    """Only the round's name differs."""
    first = decided(an_idle_view().status, place(plan_id="round-1"))
    assert (first.last_decision.chosen, first.last_decision.gpu_type) == ("4 x v100 of pool v100", "v100")
    assert decided(first, place(plan_id="round-2")) is first
    assert decided(first, place(plan_id="round-2", why="another")).last_decision.plan_id == "round-2"
