"""Cost, suspensions and isolated time, summed up over a job's life."""

import pytest
from ballast_operator.api.training_job_status import Isolated
from ballast_operator.steps.context import with_status
from ballast_operator.steps.costs.accounting import account_suspension, accrue_cost, accrue_isolated_time
from ballast_operator.views.assignment import GangPools, PoolInfo

from tests.operator.steps.contexts import a_context, a_report, after, an_idle_view


def at_price(per_hour: float) -> GangPools:
    return GangPools(first=PoolInfo(price_per_hour=per_hour))


def test_a_gang_costs_its_gpus_times_hours_times_price():
    """Four GPUs for an hour at 2.5; a second call at the same time adds nothing."""
    context = a_context(seconds=3600, pools=at_price(2.5))
    once = accrue_cost(context, context.view.status)
    assert once.cost_so_far == pytest.approx(10.0)
    assert accrue_cost(context, once).cost_so_far == pytest.approx(10.0)


def test_a_job_without_gpus_costs_nothing():
    """The status is returned as it was."""
    idle = a_context(an_idle_view(), pools=at_price(2.5))
    assert accrue_cost(idle, idle.view.status) == idle.view.status


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
