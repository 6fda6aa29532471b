"""Jobs that state their speed by numbers of GPUs: the best configuration at any prices, without a list."""

import math

import numpy as np
import pytest
from ballast_policies.allocation.gang_sizes import MOST_LISTED, MOST_SIZES, GangSizes
from ballast_policies.allocation.problem import Configuration, ProblemError
from ballast_policies.contract.errors import ContractError

from tests.support.examples import first_daily


def drawn(random):
    """(a job, GPUs of each type): any sizes or some, measured or by its pipeline, mixed or not."""
    types = [f"type-{j}" for j in range(random.integers(1, 4))]
    speeds = {t: float(random.choice([0.0, random.uniform(0.1, 5)], p=[0.2, 0.8])) for t in types}
    stated = {}
    if random.random() < 0.5:
        stated["microbatches"] = int(random.integers(1, 40))
        if random.random() < 0.5:
            stated["sizes"] = tuple(random.integers(1, 12, 3).tolist())
    else:
        stated["speedup"] = {str(n): float(n ** random.uniform(0.2, 1.1)) for n in random.integers(2, 12, 3)}
    job = GangSizes(throughput=speeds, mixed=bool(random.random() < 0.6), **stated)
    return job, {t: int(random.integers(0, 7)) for t in types}


def gain(each, prices, worth):
    return worth * each.throughput - sum(prices[t] * n for t, n in each.gpus.items())


def brute_force(job, most):
    """All numbers of GPUs within ``most`` that the job may have, with their speed by the formula."""
    found = {}
    for gpus in np.ndindex(*(n + 1 for n in most.values())):
        taken = {t: n for t, n in zip(most, gpus, strict=True) if n}
        total = sum(gpus)
        if not total or any(job.throughput[t] == 0 for t in taken) or (len(taken) > 1 and not job.mixed):
            continue
        if job.sizes is not None and total not in job.sizes:
            continue
        if job.speedup is not None:
            if total > 1 and str(total) not in job.speedup:
                continue
            times = 1.0 if total == 1 else job.speedup[str(total)]
        else:
            times = total * job.microbatches / (job.microbatches + total - 1)
        speed = times / total * sum(job.throughput[t] * n for t, n in taken.items())
        found[frozenset(taken.items())] = speed
    return found


@pytest.mark.parametrize("seed", first_daily(range(150), 30))
def test_the_best_answer_is_the_best_of_all_configurations(seed):
    """Of all that the formula allows, at random prices, some of them 0."""
    random = np.random.default_rng([7, seed])
    job, most = drawn(random)
    want = brute_force(job, most)
    listed = job.listed(most)
    assert {frozenset(each.gpus.items()): each.throughput for each in listed} == pytest.approx(want)
    assert len({each.name for each in listed}) == len(listed)
    for _ in range(5):
        prices = {t: float(random.choice([0.0, random.uniform(0, 3)])) for t in most}
        worth = float(10 ** random.uniform(-2, 2))
        answer = job.best_answer(prices, worth, most)
        if not want:
            assert answer is None
            continue
        assert answer in listed
        best = max(gain(each, prices, worth) for each in listed)
        assert math.isclose(gain(answer, prices, worth), best, rel_tol=1e-9, abs_tol=1e-9 * worth)


def test_a_long_pipeline_spends_its_time_in_the_bubble():
    """Eight microbatches on eight GPUs take fifteen turns: 8 * 8 / 15 times the speed of one GPU."""
    (eight,) = [
        each
        for each in GangSizes(throughput={"v100": 2.0}, microbatches=8).listed({"v100": 8})
        if each.total == 8
    ]
    assert eight == Configuration.of_one_type("v100", 8, 2.0 * 8 * 8 / 15)


@pytest.mark.parametrize(
    ("fields", "want"),
    [
        ({"throughput": {}, "microbatches": 1}, "there is no GPU type"),
        ({"throughput": {"v100": -1.0}, "microbatches": 1}, "-1 is not at least 0"),
        ({}, "neither is given"),
        ({"speedup": {"two": 1.9}}, "'two' is not a number of GPUs"),
        ({"speedup": {"0": 1.9}}, "'0' is not a number of GPUs"),
        ({"speedup": {"2": 0.0}}, "0 is not above 0"),
        ({"speedup": {"1": 2.0}}, "2 is not 1"),
        ({"microbatches": 2, "sizes": ()}, "there is none"),
        ({"microbatches": 2, "sizes": (1,) * (MOST_SIZES + 1)}, "are more than"),
        ({"speedup": {"2": 1.9}, "sizes": (1, 4)}, "speedup does not have 4 GPUs"),
    ],
)
def test_impossible_values_are_refused_with_the_reason(fields, want):
    """Each problem names its field."""
    with pytest.raises(ContractError, match=want):
        GangSizes(**{"throughput": {"v100": 1.0}, **fields})


def test_too_many_sizes_are_not_looked_at_one_by_one():
    """A pipeline on any number of a hundred thousand GPUs has to list the numbers that count."""
    job = GangSizes(throughput={"v100": 1.0}, microbatches=4)
    with pytest.raises(ProblemError, match="To fix: list some"):
        job.best_answer({"v100": 1.0}, 1.0, {"v100": 100_000})
    assert job.listed({"v100": 100_000}) is None
    assert job.listed({"v100": MOST_LISTED}) is not None
    assert job.listed({"v100": MOST_LISTED + 1}) is None


def test_large_gangs_of_many_types_are_listed_without_looking_at_smaller_ones():
    """Of all GPUs of eight types there is one gang; 64 of each are 65 ** 8 numbers."""
    types = dict.fromkeys("abcdefgh", 64)
    job = GangSizes(throughput=dict.fromkeys(types, 1.0), microbatches=4, sizes=(512,))
    assert [each.gpus for each in job.listed(types)] == [types]
    fewer = GangSizes(throughput=dict.fromkeys(types, 1.0), microbatches=4, sizes=(511, 512, 513))
    assert sorted(each.total for each in fewer.listed(types)) == [511] * 8 + [512]
    assert fewer.listed({**types, "h": 100}) is None
