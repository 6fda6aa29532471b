"""Cost, suspensions and isolated time, summed up over a job's life."""

import pytest
from ballast_operator.api.training_job_status import GpuTime, Isolated, Progress
from ballast_operator.observation.status_changes import progress_alone
from ballast_operator.steps.accounting import (
    account_suspension,
    accrue_cost,
    accrue_isolated_time,
    accrue_lost_steps,
    accrue_pause,
)
from ballast_operator.steps.context import with_status
from ballast_operator.views.assignment import GangPools, PoolInfo

from tests.operator.steps.contexts import a_context, a_report, after, an_idle_view


def at_price(per_hour: float) -> GangPools:
    return GangPools(first=PoolInfo(price_per_hour=per_hour))


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


def test_suspended_time_is_summed_up_when_the_job_resumes():
    """The clock starts with spec.suspend and is added to the total when it is unset."""
    suspended = a_context(seconds=10, spec={"suspend": True})
    status = account_suspension(suspended, suspended.view.status)
    assert status.suspended_since == after(10)
    resumed = a_context(seconds=25)
    status = account_suspension(resumed, status.replace(suspended_seconds=5.0))
    assert (status.suspended_since, status.suspended_seconds) == (None, 20.0)


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


def training(seconds):
    """A context after so many seconds in which all ranks trained."""
    context = a_context(seconds=seconds)
    status = context.view.status.with_condition(
        "Running", True, "AllRanksTrain", "4 ranks train", now=context.now, generation=1
    )
    return with_status(context, status)


def measured(context, **figures):
    """The context's status after these figures were reported."""
    return context.view.status.replace(progress=Progress(step=100, steps_per_second=2.0, **figures))


def test_goodput_is_what_of_the_gpus_time_was_not_lost_for_a_named_cause():
    """Four GPUs for 100 s: 20 % uneven, 10 % idle besides, 5 s of every 50 for checkpoints."""
    context = training(seconds=100)
    figures = {"imbalance": 0.25, "bubble": 0.3, "checkpoint_seconds": 5.0, "checkpoint_every_steps": 100}
    time = accrue_cost(context, measured(context, **figures)).gpu_time
    parts = (time.held, time.straggling, time.idle, time.checkpoint, time.startup)
    assert parts == pytest.approx((400.0, 80.0, 40.0, 40.0, 0.0))
    assert time.goodput == pytest.approx(0.6)
    paused = accrue_pause(accrue_cost(context, measured(context, **figures)), 5000.0)
    assert (paused.gpu_time.moves, paused.gpu_time.goodput) == (20.0, pytest.approx(0.55))


def test_time_before_all_ranks_train_is_not_productive():
    """Nor while they leave."""
    starting = a_context(seconds=50)
    time = accrue_cost(starting, starting.view.status).gpu_time
    assert (time.held, time.startup, time.goodput) == (200.0, 200.0, 0.0)


def test_lost_steps_are_lost_time():
    """A launch that begins 25 steps before the 100 that were done lost a quarter of the time that trained."""
    context = a_context(seconds=100)
    status = measured(context).replace(gpu_time=GpuTime(held=500.0, startup=100.0, goodput=0.8))
    time = accrue_lost_steps(status, a_report(step=75)).gpu_time
    assert (time.lost_steps, time.goodput) == (100.0, pytest.approx(0.6))


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
    """It is not zero, it is not known."""
    idle = a_context(an_idle_view())
    assert accrue_pause(accrue_cost(idle, idle.view.status), 10.0).gpu_time is None
