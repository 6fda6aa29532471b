"""What a job pays for data that is read in another region than where it is stored."""

import pytest
from ballast_operator.api.training_job_status import Progress
from ballast_operator.steps.accounting import accrue_data, data_cost_per_second
from ballast_operator.steps.context import with_status
from ballast_operator.views.assignment import GangPools, PoolInfo
from ballast_policies.prices.egress import GB, NO_DATA_PRICES, DataPrices, JobData

from tests.operator.steps.contexts import a_context

PRICES = DataPrices({("east", "west"): 0.02})
DATA = JobData(region="east", bytes_per_step=GB / 2, checkpoint_bytes=3 * GB)


def in_region(region, prices=PRICES):
    return GangPools(first=PoolInfo(region=region, data_prices=prices))


def at_step(step, region="west", status=None, *, data=DATA, prices=PRICES, **progress):
    """The job after ``step`` steps, on GPUs in ``region``."""
    context = a_context(spec={"data": data}, pools=in_region(region, prices))
    status = (status or context.view.status).replace(progress=Progress(step=step, **progress))
    return with_status(context, status), status


def test_steps_in_another_region_pay_by_the_gigabyte():
    """From when the data was first stated: 100 steps of half a GB at 0.02; the same steps count once."""
    context, status = at_step(50)
    first = accrue_data(context, status)
    assert (first.data.steps, first.data.cost, first.cost_so_far) == (50, 0.0, 0.0)
    context, status = at_step(150, status=first)
    once = accrue_data(context, status)
    assert once.data.gigabytes == pytest.approx(50.0)
    assert once.cost_so_far == once.data.cost == pytest.approx(1.0)
    assert [(entry.pool, entry.data_cost) for entry in once.pool_costs] == [("v100", pytest.approx(1.0))]
    context = with_status(context, once)
    assert accrue_data(context, once) == once


def test_data_in_the_region_of_the_gpus_is_free():
    """Steps are counted, nothing is paid."""
    context, status = at_step(0, "east")
    context, status = at_step(100, "east", accrue_data(context, status))
    done = accrue_data(context, status)
    assert (done.data.steps, done.data.cost, done.data.gigabytes) == (100, 0.0, 0.0)


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
    assert data_cost_per_second(a_context(spec={"data": DATA}, pools=in_region("west"))) == 0.0
