"""Conditions as steps set them."""

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.steps.context import apply_allocator_conditions, with_condition
from ballast_operator.views.assignment import Advice

from tests.operator.steps.contexts import a_context, a_running_view, after, keep

ON_TIME = Advice(
    type=JobCondition.ON_TIME, value=True, reason=JobReason.DEADLINE_WITHIN_REACH, message="kept"
)


def test_a_transition_time_moves_only_when_the_truth_of_a_condition_changes():
    """A new reason or message alone keeps it."""
    first = with_condition(
        a_context(seconds=1), a_context().view.status, "Running", False, "PodsStarting", "0 of 4"
    )
    later = a_context(seconds=2)
    same = with_condition(later, first, "Running", False, "RanksMeeting", "4 of 4").condition("Running")
    assert (same.last_transition_time, same.reason) == (after(1), "RanksMeeting")
    flipped = with_condition(later, first, "Running", True, "AllRanksTrain", "").condition("Running")
    assert flipped.last_transition_time == after(2)


def test_the_allocators_conditions_are_set_and_dropped_with_its_assignment():
    """Before the first assignment they stay as they are; other conditions always do."""
    status = apply_allocator_conditions(a_context(assignment=keep(advice=(ON_TIME,))))
    assert status.is_true(JobCondition.ON_TIME)
    status = with_condition(a_context(), status, "Running", True, "AllRanksTrain", "")
    view = a_running_view(status=status)
    assert apply_allocator_conditions(a_context(view)).is_true(JobCondition.ON_TIME)
    dropped = apply_allocator_conditions(a_context(view, assignment=keep()))
    assert [condition.type for condition in dropped.conditions] == ["Running"]
