"""Budgets and deadlines as a pass sees them: what is reached, and when it has to look again."""

import math

import pytest
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.costs import OnLimit
from ballast_operator.steps.accounting import (
    limits_reached,
    seconds_to_next_limit,
    with_cost_for_budget,
    with_final_deadline,
)
from ballast_operator.steps.context import with_condition, with_status

from tests.operator.steps.contexts import a_context, after, an_idle_view
from tests.operator.steps.costs.test_accounting import at_price

DEADLINE = after(100)


def found(context):
    """Type -> (value, reason) of what the pass knows better than the last decision."""
    return {advice.type: (advice.value, advice.reason) for advice in limits_reached(context)}


def with_cost(context, cost):
    return with_status(context, context.view.status.replace(cost_so_far=cost))


def test_only_a_job_with_a_budget_has_its_cost_brought_up_to_now():
    """Four GPUs for an hour at 2.5; without a budget a pass writes no cost of its own."""
    budgeted = a_context(seconds=3600, pools=at_price(2.5), spec={"budget": 100.0})
    assert with_cost_for_budget(budgeted).cost_so_far == pytest.approx(10.0)
    free = a_context(seconds=3600, pools=at_price(2.5))
    assert with_cost_for_budget(free) == free.view.status


def test_a_budget_that_is_spent_is_said_and_one_that_was_raised_is_taken_back():
    """The condition's reason says which; a budget that was never spent changes no condition."""
    spec = {"budget": 10.0, "on_budget_exhausted": OnLimit.CONTINUE}
    assert found(a_context(spec=spec)) == {}
    spent = with_cost(a_context(spec=spec), 10.0)
    kind = JobCondition.BUDGET_EXHAUSTED
    assert found(spent) == {kind: (True, JobReason.BUDGET_SPENT)}
    told = with_condition(spent, spent.view.status, kind, True, JobReason.BUDGET_SPENT, "spent")
    raised = with_status(a_context(spec={**spec, "budget": 20.0}), told)
    assert found(raised) == {kind: (False, JobReason.BUDGET_SUFFICIENT)}


def test_a_deadline_that_has_passed_is_said_and_a_later_one_takes_it_back():
    """The moment itself counts as passed."""
    kind = JobCondition.DEADLINE_AT_RISK
    assert found(a_context(seconds=99, spec={"deadline": DEADLINE})) == {}
    passed = a_context(seconds=100, spec={"deadline": DEADLINE})
    assert found(passed) == {kind: (True, JobReason.DEADLINE_PASSED)}
    told = with_condition(passed, passed.view.status, kind, True, JobReason.DEADLINE_PASSED, "passed")
    later = with_status(a_context(seconds=100, spec={"deadline": after(200)}), told)
    assert found(later) == {kind: (False, JobReason.DEADLINE_WITHIN_REACH)}


def test_the_next_limit_is_the_earlier_of_budget_and_deadline():
    """Four GPUs at 3600 an hour cost 4 a second: 40 more are spent in ten seconds."""
    context = a_context(seconds=1, pools=at_price(3600.0), spec={"budget": 40.0, "deadline": DEADLINE})
    assert seconds_to_next_limit(context) == pytest.approx(10.0)
    late = a_context(seconds=95, pools=at_price(0.0), spec={"budget": 40.0, "deadline": DEADLINE})
    assert seconds_to_next_limit(late) == pytest.approx(5.0)
    assert seconds_to_next_limit(a_context()) == math.inf
    idle = a_context(an_idle_view(), pools=at_price(3600.0), spec={"budget": 40.0})
    assert seconds_to_next_limit(idle) == math.inf


def test_a_job_that_is_done_before_its_deadline_says_so():
    """Once the deadline has passed nothing is added."""
    early = a_context(seconds=99, spec={"deadline": DEADLINE})
    condition = with_final_deadline(early, early.view.status).condition(JobCondition.DEADLINE_AT_RISK)
    assert condition is not None
    assert (condition.is_true, condition.reason) == (False, JobReason.DEADLINE_MET)
    late = a_context(seconds=100, spec={"deadline": DEADLINE})
    assert with_final_deadline(late, late.view.status) == late.view.status
