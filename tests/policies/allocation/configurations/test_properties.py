"""What holds for jobs with configurations, whatever the instance."""

import dataclasses
import pickle

import numpy as np
import pytest
from ballast_policies.allocation.price_classes import PriceClasses, PricedPool
from ballast_policies.allocation.problem import Configuration, Job, Pair, Problem, ProblemError
from ballast_policies.allocation.registry import POLICIES, allocate, greedy
from ballast_policies.contract.errors import ContractError

from tests.policies.allocation.configurations.instances import FAMILIES, problem_of
from tests.policies.allocation.textbook import Book
from tests.support.examples import first_fast

ELASTIC = [family for family in FAMILIES if "gangs" not in family.split()]
SEEDS = range(6)
GANG_ONLY = [name for name, row in POLICIES.builtin.items() if not row.takes_configurations]


def equal_weights(problem):
    jobs = tuple(dataclasses.replace(job, weight=1.0) for job in problem.jobs)
    return dataclasses.replace(problem, jobs=jobs)


def configurations(**sizes):
    """Named by size, of v100: n4=3.0 is four GPUs at 3 steps/s."""
    return tuple(
        Configuration(name=name, gpus={"v100": int(name[1:])}, throughput=speed)
        for name, speed in sizes.items()
    )


def cluster(*jobs, v100=8, k80=0):
    return Problem(gpu_types=("v100", "k80"), capacity={"v100": v100, "k80": k80}, jobs=jobs)


@pytest.mark.parametrize("family", first_fast(ELASTIC, 3))
def test_no_job_is_slower_than_on_its_part_of_every_type(family):
    """With equal weights no job is slower than on its own 1/n of every type, used in its best shapes."""
    for seed in SEEDS:
        problem = equal_weights(problem_of(family, seed))
        book = Book(problem)
        if not book.runs.any():
            continue
        for policy in ("max-min-fairness", "water-filling"):
            answer = allocate(policy, problem)
            assert answer.objective >= 1 - 1e-8
            speed = np.array([answer.throughput[job.name] for job in problem.jobs])
            assert (speed >= book.equal * (1 - 1e-7)).all()
        rho = allocate(
            "finish-time-fairness",
            dataclasses.replace(
                problem,
                jobs=tuple(
                    dataclasses.replace(job, elapsed=0.0, isolated_elapsed=0.0) for job in problem.jobs
                ),
            ),
        )
        assert rho.objective <= 1 + 1e-8


def test_sharing_incentive_beside_gangs():
    """Where gangs are as large as their part of the cluster or larger, no job loses by sharing with them."""
    gang = Job(name="gang", throughput={"v100": 1.0, "k80": 0.4}, gpus=4)
    elastic = Job(name="elastic", configurations=configurations(n1=1.0, n2=1.7, n4=3.0))
    problem = cluster(gang, elastic, dataclasses.replace(gang, name="gang-2"), v100=8, k80=4)
    alone, together = allocate("isolated", problem), allocate("max-min-fairness", problem)
    for name, speed in alone.throughput.items():
        assert together.throughput[name] >= speed * (1 - 1e-8)
    assert alone.levels == pytest.approx({"gang": 4.0, "elastic": 4.0, "gang-2": 4.0})


def test_two_elastic_jobs_share_a_pool_side_by_side():
    """Each on half of the GPUs, where taking turns on all of them would be slower."""
    jobs = [Job(name=n, configurations=configurations(n2=1.0, n4=1.8, n8=3.0)) for n in ("one", "two")]
    answer = allocate("max-min-fairness", cluster(*jobs))
    assert answer.allocation["one"] == pytest.approx({"n2": 0.0, "n4": 1.0, "n8": 0.0})
    assert answer.throughput == pytest.approx({"one": 1.8, "two": 1.8})


def test_gpus_held_without_use_are_given_to_those_who_can_use_them():
    """A job at its level in a larger size than that takes: the idle fill sees through it."""
    slow = Job(name="slow", configurations=configurations(n1=1.0, n8=1.0))
    fast = Job(name="fast", configurations=configurations(n1=1.0, n7=5.0))
    assert allocate("max-min-fairness", cluster(slow, fast)).throughput["fast"] == pytest.approx(5.0)


def test_a_job_that_fits_nowhere_gets_nothing_and_takes_nothing():
    """Its configurations are larger than the cluster."""
    problem = cluster(
        Job(name="huge", configurations=configurations(n9=9.0)),
        Job(name="small", configurations=configurations(n1=1.0)),
    )
    for policy in POLICIES.builtin:
        if policy not in GANG_ONLY:
            answer = allocate(policy, problem)
            assert answer.throughput["huge"] == answer.levels["huge"] == 0.0
            assert answer.allocation["huge"] == {"n9": 0.0}


@pytest.mark.parametrize("family", FAMILIES)
def test_the_greedy_fallback_fits(family):
    """It knows configurations, and never exceeds time or GPUs."""
    for seed in SEEDS:
        problem = problem_of(family, seed)
        book, answer = Book(problem), greedy(problem)
        A, b = book.limits()
        assert (A @ book.shares(answer) <= b + 1e-9).all()
        assert any(answer.throughput.values()) == book.runs.any()


@pytest.mark.parametrize("policy", GANG_ONLY)
def test_policies_for_gangs_refuse_configurations(policy):
    """With the job's name and what to change."""
    problem = cluster(Job(name="one", configurations=configurations(n1=1.0)))
    with pytest.raises(ProblemError, match=rf"jobs\[one\]\.configurations: {policy} .* To fix: "):
        allocate(policy, problem)


def test_what_has_no_meaning_over_configurations_is_refused():
    """Agnostic baselines, functions of one's own, and pairs."""
    job = Job(name="one", configurations=configurations(n1=1.0))
    with pytest.raises(ProblemError, match=r"To fix: .*leave agnostic out"):
        allocate("max-min-fairness", cluster(job), agnostic=True)
    with pytest.raises(ProblemError, match="To fix: "):
        allocate("math:sqrt", cluster(job))
    with pytest.raises(ProblemError, match="'one' has configurations"):
        Problem(
            gpu_types=("v100",),
            capacity={"v100": 1},
            jobs=(job, Job(name="two", throughput={"v100": 1.0})),
            pairs=(Pair(jobs=("one", "two"), throughput={"v100": (1.0, 1.0)}),),
        )


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"gpus": {"v100": 1.5}}, "gpus.v100: 1.5 is not"),
        ({"gpus": {"v100": float("nan")}}, "gpus.v100: nan is not"),
        ({"throughput": float("nan")}, "throughput: nan must be"),
        ({"throughput": float("inf")}, "throughput: inf must be"),
    ],
)
def test_impossible_configurations_are_refused(fields, want):
    """By values that JSON does not have; ``test_allocate.py`` has the others."""
    with pytest.raises(ContractError, match=want):
        Configuration(**{"name": "x", "gpus": {"v100": 1}, "throughput": 1.0, **fields})


def test_pools_at_several_prices_are_columns_of_their_own_for_configurations_too():
    """A configuration is on the GPUs of one price of each type; its shares are summed in the end."""
    pools = (
        PricedPool(pool="spot", gpu_type="v100", price=0.5, gpus=4),
        PricedPool(pool="on-demand", gpu_type="v100", price=2.0, gpus=8),
        PricedPool(pool="k80", gpu_type="k80", price=0.4, gpus=4),
    )
    shapes = (
        *configurations(n4=4.0, n8=6.0),
        Configuration(name="both", gpus={"v100": 4, "k80": 4}, throughput=5.0),
    )
    asked = cluster(Job(name="one", configurations=shapes), v100=12, k80=4)
    classes = PriceClasses.of(pools, {})
    split = classes.split(asked)
    assert [each.name for each in split.jobs[0].configurations] == [
        "n4 in v100 at 0.5",
        "n4 in v100 at 2.0",
        "n8 in v100 at 0.5",
        "n8 in v100 at 2.0",
        "both in v100 at 0.5 and k80",
        "both in v100 at 2.0 and k80",
    ]
    cheapest = allocate("min-cost", split)
    assert cheapest.allocation["one"]["n4 in v100 at 0.5"] == pytest.approx(1.0)
    assert classes.merge(cheapest).allocation["one"] == pytest.approx({"n4": 1.0, "n8": 0.0, "both": 0.0})
    assert classes.merge(allocate("max-throughput", split)).allocation["one"]["n8"] == pytest.approx(1.0)
    without_k80 = PriceClasses.of(pools[:2], {})
    assert without_k80.merge(cheapest).allocation == classes.merge(cheapest).allocation


def test_a_configuration_is_a_value():
    """It can be compared, hashed and pickled."""
    one = Configuration(name="x", gpus={"a": 1, "b": 2}, throughput=1.0)
    assert pickle.loads(pickle.dumps(one)) == one
    assert {one, Configuration(name="x", gpus={"b": 2, "a": 1}, throughput=1.0)} == {one}
    assert one.total == 3
    assert one.fits({"a": 1, "b": 2})
    assert not one.fits({"a": 1})
