"""What-if counts what steps cost besides their GPUs, under policies that read prices."""

import pytest
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.simulator.whatif import Setup, compare

POOLS = (
    PricedPool(pool="east", gpu_type="v100", price=3.0, gpus=2, region="e"),
    PricedPool(pool="west", gpu_type="v100", price=1.0, gpus=2, region="w"),
)


@pytest.mark.parametrize(("per_step", "cost"), [(0.0, 1.0), (1.0 / 3600, 1.0), (1.0, 3.0)])
def test_the_place_is_chosen_by_gpus_and_data_and_the_cost_is_that_of_the_gpus(per_step: float, cost: float):
    """A step a second: in the west GPUs for 1 USD an hour and its data, or for 3 in the east."""
    job = Job(name="j", throughput={"v100": 1.0}, steps_remaining=1e4)
    problem = Problem(gpu_types=("v100",), capacity={"v100": 4}, prices={"v100": 2.0}, jobs=(job,))
    side = Setup(policy="min-cost")
    found = compare(problem, side, side, POOLS, {"j": {"east": 0.0, "west": per_step}})
    assert found.cost_before == found.cost_after == pytest.approx(cost)
