"""Policies that read prices count what a step costs besides its GPUs."""

import dataclasses
import random

import pytest
from ballast_policies.allocation.price_classes import PriceClasses, PricedPool
from ballast_policies.allocation.problem import Configuration, Job, Problem, ProblemError
from ballast_policies.allocation.registry import allocate

from tests.support.examples import first_daily

COST_POLICIES = ("min-cost", "min-cost-slo", "makespan-within-budget", "max-throughput-per-dollar")
POOLS = (
    PricedPool(pool="east", gpu_type="v100", price=3.0, gpus=4, region="us-east-1"),
    PricedPool(pool="west", gpu_type="v100", price=1.0, gpus=4, region="us-west-2"),
)


def problem(*jobs: Job) -> Problem:
    return Problem(gpu_types=("v100",), capacity={"v100": 8}, prices={"v100": 2.0}, jobs=jobs)


def shares(policy: str, posed: Problem, of_west: float, pools=POOLS) -> dict[str, float]:
    """Pool -> share of the time of the job there, at ``of_west`` USD for the data of a step in the west."""
    classes = PriceClasses.of(pools, {})
    asked = classes.split(posed, None, {"job": {"east": 0.0, "west": of_west}})
    row = allocate(policy, asked).allocation["job"]
    pool_of = {column: pool for pool, column in classes.of_pool.items()}
    found = dict.fromkeys(("east", "west"), 0.0)
    for name, share in row.items():
        found[pool_of[name.rpartition(" in ")[2]]] += share
    return found


@pytest.mark.parametrize("policy", COST_POLICIES)
def test_the_cheaper_gpus_are_left_where_the_data_costs_more_than_they_save(policy: str):
    """A step takes a second: GPUs save 2 USD an hour, so the data may cost 2/3600 USD a step."""
    job = Job(name="job", throughput={"v100": 1.0}, steps_remaining=3600.0, deadline=7200.0, budget=2.5)
    job = job if policy in ("makespan-within-budget",) else dataclasses.replace(job, budget=None)
    cheap = shares(policy, problem(job), 0.0)
    dear = shares(policy, problem(job), 3.0 / 3600)
    if policy == "makespan-within-budget":
        # 1 USD in the west, or 4 with the data; 3 in the east: its budget of 2.5 counts as the least, 3.
        assert cheap["west"] > 0.2
        assert dear["west"] == pytest.approx(0.0, abs=1e-6)
    else:
        assert cheap["east"] == pytest.approx(0.0, abs=1e-6)
        assert dear["west"] == pytest.approx(0.0, abs=1e-6)
        assert dear["east"] > 0.4


def test_a_configuration_reads_its_data_by_its_gpus():
    """One with half its GPUs in the far region pays for half of the data."""
    pools = (POOLS[0], dataclasses.replace(POOLS[1], gpu_type="p100"))
    both = Configuration(name="both", gpus={"v100": 1, "p100": 1}, throughput=1.0)
    posed = Problem(
        gpu_types=("v100", "p100"),
        capacity={"v100": 4, "p100": 4},
        prices={"v100": 3.0, "p100": 1.0},
        jobs=(Job(name="job", configurations=(both,), steps_remaining=3600.0),),
    )
    asked = PriceClasses.of(pools, {}).split(posed, None, {"job": {"west": 0.5}})
    assert asked.jobs[0].configurations[0].usd_per_step == 0.25
    # USD of 3600 steps: 4 for the GPUs' hour, 900 for data.
    assert allocate("min-cost", asked).objective == pytest.approx(904.0)


@pytest.mark.parametrize("seed", first_daily(range(20), 5))
def test_no_other_place_would_have_been_cheaper(seed: int):
    """Random prices, speeds and data: min-cost leaves each job where a step costs least in all."""
    rng = random.Random(seed)
    types = ("a", "b", "c")
    pools = [
        PricedPool(pool=f"{t}{n}", gpu_type=t, price=rng.uniform(0.1, 4), gpus=8, region=f"r{n}")
        for t in types
        for n in range(rng.randint(1, 3))
    ]
    jobs = tuple(
        Job(name=f"j{n}", gpus=rng.choice((1, 2)), throughput={t: rng.uniform(0.1, 3) for t in types})
        for n in range(3)
    )
    costs = {
        job.name: {pool.pool: rng.choice((0.0, rng.expovariate(2000))) for pool in pools} for job in jobs
    }
    capacity = {t: sum(pool.gpus for pool in pools if pool.gpu_type == t) for t in types}
    prices = {pool.gpu_type: pool.price for pool in pools}
    posed = Problem(gpu_types=types, capacity=capacity, prices=prices, jobs=jobs)
    classes = PriceClasses.of(pools, {})
    found = allocate("min-cost", classes.split(posed, None, costs))
    for job in jobs:
        steps = {
            pool.pool: pool.price * job.gpus / job.throughput[pool.gpu_type] / 3600
            + costs[job.name][pool.pool]
            for pool in pools
        }
        least = min(steps, key=steps.__getitem__)
        used = {column for column, share in found.allocation[job.name].items() if share > 1e-9}
        assert used == {classes.of_pool[least]}


def test_what_costs_nothing_changes_nothing():
    """Without data costs the problem is the same object as before, column for column."""
    posed = problem(Job(name="job", throughput={"v100": 1.0}))
    classes = PriceClasses.of([dataclasses.replace(pool, region="") for pool in POOLS], {})
    assert classes.split(posed, None, {}) == classes.split(posed)
    assert classes.split(posed, None, {"job": {"east": 0.0, "west": 0.0}}) == classes.split(posed)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("usd_per_step.v100", {"v100": usd}) for usd in (-1.0, float("nan"), float("inf"))),
        ("throughput.v100", {"v100": -1.0}),
        ("gpus", 0),
        ("weight", 0.0),
        ("weight", float("nan")),
        ("steps_remaining", -5.0),
        ("budget", -1.0),
    ],
)
def test_an_impossible_job_is_refused_with_its_field(field, value):
    fields = {"throughput": {"v100": 1.0}} | {field.partition(".")[0]: value}
    with pytest.raises(ProblemError, match=rf"jobs\[a\]\.{field}: "):
        Job(name="a", **fields)
