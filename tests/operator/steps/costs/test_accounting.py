"""A job's cost, time and goodput over its life, its budget and deadline, and the team that pays."""

import math

import pytest
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.costs import DataLocation, OnLimit, TeamPart
from ballast_operator.api.job_allocation import PoolCost
from ballast_operator.api.training_job_status import GpuTime, Isolated, Progress, progress_alone
from ballast_operator.steps.accounting import (
    MOST_POOLS,
    MOST_TEAMS,
    account_suspension,
    accrue_cost,
    accrue_data,
    accrue_isolated_time,
    accrue_lost_steps,
    accrue_pause,
    data_cost_per_second,
    limits_reached,
    seconds_to_next_limit,
    with_cost_for_budget,
    with_cost_of_last_team,
    with_final_deadline,
    with_team,
)
from ballast_operator.steps.context import with_condition, with_status
from ballast_operator.views.assignment import PoolInfo
from ballast_policies.prices.egress import NO_DATA_PRICES, DataPrices
from ballast_policies.protocol.observed import Cause

from tests.operator.steps.contexts import a_context, a_report, after, an_idle_view, with_ending
from tests.operator.views.builders import a_pool


def at_price(per_hour: float) -> dict[str, PoolInfo]:
    return {"v100": a_pool(per_hour)}


def test_what_time_alone_adds_to_a_status_waits_for_the_next_write():
    """Cost, active time and what GPUs were held for change with every look; none of it is written at once."""
    context = a_context(seconds=3600, pools=at_price(2.5))
    later = accrue_cost(context, context.view.status)
    assert later.active_seconds == 3600.0
    assert progress_alone(context.view.status, later)


def test_time_without_a_price_is_not_paid_when_there_is_one():
    """The GPU time is summed up at no cost, so that a price that is set later counts from then on."""
    unpriced = a_context(seconds=100, pools=at_price(0.0))
    status = accrue_cost(unpriced, unpriced.view.status)
    assert (status.cost_so_far, status.cost_at) == (0.0, after(100))
    assert [entry.gpu_seconds for entry in status.pool_costs] == [400.0]
    priced = a_context(with_status(unpriced, status).view, seconds=136, pools=at_price(100.0))
    assert accrue_cost(priced, status).cost_so_far == pytest.approx(4 * 36 / 3600 * 100)


def test_a_job_keeps_the_costs_of_a_bounded_number_of_pools():
    """That which it is in stays."""
    context = a_context(seconds=3600, pools=at_price(2.5))
    others = tuple(PoolCost(pool=f"p{number}", gpu_type="v100", cost=1.0) for number in range(MOST_POOLS))
    status = accrue_cost(context, context.view.status.replace(pool_costs=others))
    assert [entry.pool for entry in status.pool_costs] == [*(entry.pool for entry in others[1:]), "v100"]


def test_all_suspensions_of_a_job_are_summed_up():
    """Each from when it was suspended until it is not."""
    status = a_context().view.status
    for seconds, suspend in ((10, True), (20, True), (40, False), (50, False), (100, True), (120, False)):
        context = a_context(seconds=seconds, spec={"suspend": suspend})
        status = account_suspension(context, status)
        assert (status.suspended_since is not None) == suspend
    assert status.suspended_seconds == 30.0 + 20.0


@pytest.mark.parametrize(
    ("known", "step", "speed", "want"),
    [
        (None, 50, 0.5, Isolated(seconds=20.0, step=50)),
        (Isolated(seconds=20.0, step=50), 60, 0.5, Isolated(seconds=24.0, step=60)),
        (Isolated(seconds=20.0, step=50), 25, 0.5, Isolated(seconds=10.0, step=25)),
        (Isolated(seconds=20.0, step=50), 60, 0.0, Isolated(seconds=20.0, step=50)),
    ],
    ids=["first report", "ten steps more", "back to a checkpoint", "isolated speed not known"],
)
def test_isolated_time_follows_the_progress(known, step, speed, want):
    """Steps / (measured steps/s x isolated speed); steps lost to a checkpoint are taken off again."""
    assert accrue_isolated_time(known, a_report(step=step), speed) == want


def training(seconds, **context):
    """A context after so many seconds in which all ranks trained."""
    context = a_context(seconds=seconds, **context)
    status = context.view.status.with_condition(
        "Running", True, "AllRanksTrain", "4 ranks train", now=context.now, generation=1
    )
    return with_status(context, status)


def measured(context, **figures):
    """The context's status after these figures were reported."""
    return context.view.status.replace(progress=Progress(step=100, steps_per_second=2.0, **figures))


def test_goodput_is_what_of_the_gpus_time_was_not_lost_for_a_named_cause():
    """Four GPUs for 100 s: 20 % uneven, 10 % idle besides, 5 s of every 50 for checkpoints. No start-up."""
    context = training(seconds=100, pools=at_price(36.0))
    figures = {"imbalance": 0.25, "bubble": 0.3, "checkpoint_seconds": 5.0, "checkpoint_every_steps": 100}
    status = accrue_cost(context, measured(context, **figures))
    (paid,) = status.pool_costs
    assert (paid.cost, paid.startup_cost) == (pytest.approx(4.0), 0.0)
    time = status.gpu_time
    parts = (time.held, time.straggling, time.idle, time.checkpoint, time.startup)
    assert parts == pytest.approx((400.0, 80.0, 40.0, 40.0, 0.0))
    assert time.goodput == pytest.approx(0.6)
    paused = accrue_pause(status, 5000.0)
    assert (paused.gpu_time.moves, paused.gpu_time.goodput) == (20.0, pytest.approx(0.55))


def test_time_before_all_ranks_train_is_not_productive():
    """Nor while they leave."""
    starting = a_context(seconds=50, pools=at_price(36.0))
    leaving = training(seconds=50, pools=at_price(36.0))
    allocation = with_ending(leaving.view, Cause.PREEMPTED).status.allocation
    for context, status in (
        (starting, starting.view.status),
        (leaving, leaving.view.status.replace(allocation=allocation)),
    ):
        paid = accrue_cost(context, status)
        assert [(entry.cost, entry.startup_cost) for entry in paid.pool_costs] == [(pytest.approx(2.0),) * 2]
        time = paid.gpu_time
        assert (time.held, time.startup, time.goodput) == (200.0, 200.0, 0.0)


def test_lost_steps_are_lost_time():
    """A launch that begins 25 steps before the 100 that were done lost a quarter of the time that trained.

    And of what that has cost, without start-ups and without what was lost before.
    """
    context = a_context(seconds=100)
    paid = PoolCost(pool="v100", gpu_type="v100", cost=10.0, startup_cost=2.0)
    status = measured(context).replace(
        gpu_time=GpuTime(held=500.0, startup=100.0, goodput=0.8), cost_so_far=10.0, pool_costs=(paid,)
    )
    once = accrue_lost_steps(status, a_report(step=75))
    assert (once.gpu_time.lost_steps, once.gpu_time.goodput) == (100.0, pytest.approx(0.6))
    assert (once.lost_steps, once.lost_cost) == (25, pytest.approx(8.0 / 4))
    again = accrue_lost_steps(once, a_report(step=50))
    assert again.gpu_time.lost_steps == pytest.approx(100.0 + 300.0 / 2)
    assert (again.lost_steps, again.lost_cost) == (75, pytest.approx(2.0 + 6.0 / 2))
    assert accrue_lost_steps(again, a_report(step=100)) == again


@pytest.mark.parametrize(
    "figures",
    [
        {"imbalance": 1e300},
        {"bubble": 1.0, "checkpoint_seconds": 1e9, "checkpoint_every_steps": 1},
        {"imbalance": 5.0, "bubble": 0.0},
        {},
    ],
    ids=str,
)
def test_goodput_is_a_part_whatever_trainers_report(figures):
    """Between none and all of the time; pauses longer than the time are no more than it."""
    context = training(seconds=10)
    status = accrue_pause(accrue_cost(context, measured(context, **figures)), 1e12)
    assert status.gpu_time.goodput == 0.0
    assert status.gpu_time.moves == 40.0
    assert 0.0 <= accrue_cost(context, measured(context, **figures)).gpu_time.goodput <= 1.0


def test_a_job_that_holds_nothing_has_no_goodput():
    idle = a_context(an_idle_view())
    assert accrue_pause(accrue_cost(idle, idle.view.status), 10.0).gpu_time is None


PRICES = DataPrices({("east", "west"): 0.02})
DATA = DataLocation(region="east", read_per_step="512Mi", checkpoint_size="3Gi")


def in_region(region, prices=PRICES):
    return {"v100": a_pool(region=region, data_prices=prices)}


def at_step(step, region="west", status=None, *, data=DATA, prices=PRICES, **progress):
    """The job after ``step`` steps, on GPUs in ``region``."""
    context = a_context(spec={"data_location": data}, pools=in_region(region, prices))
    status = (status or context.view.status).replace(progress=Progress(step=step, **progress))
    return with_status(context, status), status


def test_steps_wait_to_be_counted_while_their_price_is_not_known():
    """They are paid once it is."""
    context, status = at_step(0)
    known = accrue_data(context, status)
    context, status = at_step(100, status=known, prices=NO_DATA_PRICES)
    assert accrue_data(context, status) == status
    context, status = at_step(100, status=known)
    assert accrue_data(context, status).cost_so_far == pytest.approx(1.0)


def test_a_checkpoint_is_paid_when_a_launch_is_in_another_region():
    """Three GB at 0.02, once; before the first checkpoint there is nothing to copy."""
    context, status = at_step(0, "east")
    context, status = at_step(0, "east", accrue_data(context, status))
    here = accrue_data(context, status)
    assert here.data.region == "east"
    context, status = at_step(0, "west", here, checkpoint_step=0)
    assert accrue_data(context, status).cost_so_far == 0.0
    context, status = at_step(0, "west", here, checkpoint_step=5)
    moved = accrue_data(context, status)
    assert (moved.cost_so_far, moved.data.region) == (pytest.approx(0.06), "west")


def test_what_data_costs_a_second_follows_the_reported_speed():
    """Ten steps a second of half a GB at 0.02; 0 without a report."""
    context, _ = at_step(10, steps_per_second=10.0)
    assert data_cost_per_second(context) == pytest.approx(0.1)
    assert data_cost_per_second(a_context(spec={"data_location": DATA}, pools=in_region("west"))) == 0.0


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


PRICED = at_price(2.5)


def context_of(team: str | None, status=None, *, hours: float = 1.0):
    context = a_context(seconds=3600 * hours, pools=PRICED, spec={} if team is None else {"entity": team})
    return context if status is None else with_status(context, status)


def booked(status) -> dict[str, float]:
    return {part.team: pytest.approx(part.cost) for part in status.team_costs}


def test_what_an_earlier_version_has_written_is_the_present_teams():
    """It did not say whose it was; a job without GPUs and cost says nothing yet."""
    context = context_of("vision")
    assert booked(with_team(context, context.view.status.replace(cost_so_far=7.0))) == {"vision": 7.0}
    idle = a_context(an_idle_view())
    assert with_team(idle, idle.view.status) == idle.view.status


def test_a_job_that_goes_from_team_to_team_keeps_a_bounded_list():
    """No cost is lost."""
    context = context_of("0")
    status = context.view.status
    for number in range(3 * MOST_TEAMS):
        context = context_of(str(number), status, hours=1 + number)
        status = with_team(context, with_cost_of_last_team(context))
    assert len(status.team_costs) == MOST_TEAMS
    assert sum(part.cost for part in status.team_costs) == pytest.approx(status.cost_so_far)
    assert status.team_costs[-1] == TeamPart(team=str(3 * MOST_TEAMS - 1))
