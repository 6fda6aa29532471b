"""Two setups side by side: who gains, who loses, what it costs."""

import dataclasses

import pytest
from ballast_policies.allocation.price_classes import PricedPool
from ballast_policies.allocation.problem import Job, Problem, ProblemError
from ballast_policies.simulator.whatif import Setup, Side, compare

PROBLEM = Problem(
    gpu_types=("a", "b"),
    capacity={"a": 1, "b": 1},
    jobs=(
        Job(name="x", throughput={"a": 40.0, "b": 10.0}),
        Job(name="y", throughput={"a": 12.0, "b": 4.0}),
        Job(name="z", throughput={"a": 100.0, "b": 50.0}),
    ),
    prices={"a": 2.0, "b": 1.0},
)


def side(policy: str = "max-min-fairness", **changes: object) -> Side:
    return Side(setup=Setup(policy=policy), problem=dataclasses.replace(PROBLEM, **changes))


NOW = side()


def test_the_same_setup_changes_nothing():
    """Every job is called the same, at the same cost."""
    found = compare(NOW, NOW)
    assert {job.verdict for job in found.jobs} == {"same"}
    assert found.cost_after == found.cost_before > 0
    # The dissertation's example of section 5.4.1 with this normalisation: 8/11.
    assert found.least_level_before == pytest.approx(8 / 11)


def test_more_gpus_raise_the_least_level():
    """Two more of the fast type: no job loses."""
    found = compare(NOW, side(capacity={"a": 3, "b": 1}))
    assert {job.verdict for job in found.jobs} == {"gains"}
    assert sum(found.jobs[0].types_after.values()) == pytest.approx(1.0)


def test_another_policy_takes_from_some_and_gives_to_others():
    """By throughput alone, one job gets all of the fast GPU."""
    found = compare(NOW, side("max-throughput"))
    assert {job.verdict for job in found.jobs} == {"gains", "loses"}
    assert found.least_level_after < found.least_level_before
    row = found.to_json()["jobs"][1]
    assert row["verdict"] == "loses"
    assert row["change"] == pytest.approx(row["after"] / row["before"] - 1)


def test_other_prices_change_the_cost_and_not_the_shares_of_a_policy_blind_to_them():
    """Twice the price is twice the cost."""
    found = compare(NOW, side(prices={"a": 4.0, "b": 2.0}))
    assert found.cost_after == pytest.approx(2 * found.cost_before)
    assert {job.verdict for job in found.jobs} == {"same"}


def test_what_cannot_be_compared_is_said():
    with pytest.raises(ProblemError, match="policy: 'fair' is not one of"):
        compare(NOW, side("fair"))


POOLS = (
    PricedPool(pool="east", gpu_type="v100", price=3.0, gpus=2, region="e"),
    PricedPool(pool="west", gpu_type="v100", price=1.0, gpus=2, region="w"),
)


@pytest.mark.parametrize(("per_step", "cost"), [(0.0, 1.0), (1.0 / 3600, 1.0), (1.0, 3.0)])
def test_the_place_is_chosen_by_gpus_and_data_and_the_cost_is_that_of_the_gpus(per_step: float, cost: float):
    """A step a second: in the west GPUs for 1 USD an hour and its data, or for 3 in the east."""
    job = Job(name="j", throughput={"v100": 1.0}, steps_remaining=1e4)
    problem = Problem(gpu_types=("v100",), capacity={"v100": 4}, prices={"v100": 2.0}, jobs=(job,))
    besides = {"j": {"east": 0.0, "west": per_step}}
    either = Side(setup=Setup(policy="min-cost"), problem=problem, pools=POOLS, usd_per_step=besides)
    found = compare(either, either)
    assert found.cost_before == found.cost_after == pytest.approx(cost)
