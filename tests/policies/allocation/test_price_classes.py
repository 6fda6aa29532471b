"""One GPU type at several prices: columns of their own, and nothing else changes."""

import pytest
from ballast_policies.allocation.price_classes import PriceClasses, PricedPool
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.rounds.memory import RoundMemory
from hypothesis import given
from hypothesis import strategies as st

POOLS = (
    PricedPool(pool="a100", gpu_type="a100", price=3.67, gpus=4),
    PricedPool(pool="v100", gpu_type="v100", price=2.48, gpus=8),
    PricedPool(pool="v100-spot", gpu_type="v100", price=0.74, gpus=4),
    PricedPool(pool="v100-spot-b", gpu_type="v100", price=0.74, gpus=4),
)
SPOT, ON_DEMAND = "v100 at 0.74", "v100 at 2.48"


def problem(*jobs: Job) -> Problem:
    capacity = {"a100": 4, "v100": 16}
    return Problem(
        gpu_types=("a100", "v100"), capacity=capacity, jobs=jobs, prices={"a100": 3.67, "v100": 1.61}
    )


def job(name: str, gpus: int = 1, **fields) -> Job:
    return Job(name=name, gpus=gpus, throughput={"a100": 2.0, "v100": 1.0}, **fields)


def test_pools_alike_in_type_and_price_are_one_column():
    classes = PriceClasses.of(POOLS, {})
    assert classes.gpu_type == {"a100": "a100", ON_DEMAND: "v100", SPOT: "v100"}
    assert classes.gpus == {"a100": 4, ON_DEMAND: 8, SPOT: 8}
    assert classes.of_pool["v100-spot"] == classes.of_pool["v100-spot-b"] == SPOT
    assert classes.columns_of("v100") == (SPOT, ON_DEMAND)


def test_equal_prices_change_nothing():
    """The problem is the very same, whatever the pools."""
    equal = [PricedPool(pool=p.pool, gpu_type=p.gpu_type, price=1.0, gpus=p.gpus) for p in POOLS]
    asked = problem(job("one"))
    assert PriceClasses.of(equal, {}).split(asked) is asked


def test_pools_that_are_closed_to_a_job_are_columns_that_it_has_not():
    """At one price, too; the other jobs have both, and shares are summed to those of the type."""
    pools = [
        PricedPool(pool=p.pool, gpu_type=p.gpu_type, price=1.0, gpus=p.gpus, group=(0,) * ("spot" in p.pool))
        for p in POOLS
    ]
    closed = {"picky": frozenset({"v100-spot", "v100-spot-b"})}
    classes = PriceClasses.of(pools, {})
    spot, sure = classes.of_pool["v100-spot"], classes.of_pool["v100"]
    split = classes.split(problem(job("picky", 8), job("any", 8)), closed)
    picky, both = split.jobs
    assert (set(picky.throughput), set(both.throughput)) == ({"a100", sure}, {"a100", sure, spot})
    assert (split.capacity[sure], split.capacity[spot]) == (8, 8)
    allocation = allocate("max-throughput", split)
    assert allocation.allocation["any"][spot] == pytest.approx(1.0)
    assert classes.merge(allocation).allocation["picky"]["v100"] == pytest.approx(1.0)


def test_a_pool_without_a_price_has_its_types_mean():
    pools = (*POOLS[1:], PricedPool(pool="x", gpu_type="v100", price=0.0, gpus=2))
    assert PriceClasses.of(pools, {"v100": 1.5}).price["v100 at 1.5"] == 1.5


def test_min_cost_runs_on_the_cheap_pool_of_a_type():
    """At 0.74 an hour V100s cost less a step than A100s at 3.67, at the mean of 1.61 too, at 2.48 not."""
    classes = PriceClasses.of(POOLS, {})
    allocation = allocate("min-cost", classes.split(problem(job("one", 4))))
    shares = allocation.allocation["one"]
    assert shares[SPOT] == pytest.approx(1.0)
    assert shares[ON_DEMAND] == shares["a100"] == 0.0
    assert classes.merge(allocation).allocation["one"] == pytest.approx({"a100": 0.0, "v100": 1.0})


@pytest.mark.slow
@given(st.lists(st.tuples(st.integers(1, 4), st.sampled_from([1.0, 2.0, 5.0])), min_size=1, max_size=12))
def test_levels_are_the_same_with_split_columns(wanted):
    """Fairness is counted in the same units: the level of every job, and the objective."""
    asked = problem(*(job(f"j{i}", gpus, weight=weight) for i, (gpus, weight) in enumerate(wanted)))
    classes = PriceClasses.of(POOLS, {})
    whole, split = (
        allocate("max-min-fairness", asked),
        allocate("max-min-fairness", classes.split(asked)),
    )
    assert split.objective == pytest.approx(whole.objective, rel=1e-6)
    merged = classes.merge(split)
    assert set(merged.allocation["j0"]) == {"a100", "v100"}
    for row in merged.allocation.values():
        assert sum(row.values()) <= 1 + 1e-6


def test_accounts_keep_what_a_job_is_owed_when_columns_change():
    """Split and merged again, seconds by GPU type are the same; shares too."""
    memory = RoundMemory(
        promised={"one": {"v100": 90.0, "a100": 5.0}},
        received={"one": {"v100": 30.0}},
        shares={"one": {"v100": 0.5}},
        at=7.0,
        moves=(1.0,),
    )
    classes = PriceClasses.of(POOLS, {})
    split = memory.over_columns(classes.gpu_type, classes.gpus)
    assert split.promised["one"] == pytest.approx({SPOT: 45.0, ON_DEMAND: 45.0, "a100": 5.0})
    assert split.shares["one"] == pytest.approx({SPOT: 0.25, ON_DEMAND: 0.25})
    without_gpus = memory.over_columns(classes.gpu_type, {})
    assert without_gpus.shares["one"] == pytest.approx({SPOT: 0.25, ON_DEMAND: 0.25})
    assert split.over_columns(classes.gpu_type, classes.gpus) is split
    again = split.over_columns({"v100": "v100", "a100": "a100"}, {"v100": 16, "a100": 4})
    assert again == memory
