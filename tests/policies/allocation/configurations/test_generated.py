"""Configurations that sources generate: the optimum of the full list, from the few in question."""

import dataclasses

import numpy as np
import pytest
from ballast_policies.allocation.gang_sizes import GangSizes
from ballast_policies.allocation.generated import GENERATES, allocate_generated
from ballast_policies.allocation.problem import Configuration, Job, Problem, ProblemError
from ballast_policies.allocation.registry import allocate

from tests.policies.allocation.configurations.instances import FAMILIES, problem_of
from tests.support.examples import first_daily

pytestmark = pytest.mark.slow


@dataclasses.dataclass(frozen=True)
class Listed:
    """A source that has them all in a list."""

    configurations: tuple[Configuration, ...]

    def best_answer(self, prices, worth, most):
        def gain(each):
            return worth * each.throughput - sum(n * prices[t] for t, n in each.gpus.items() if n)

        return max((each for each in self.configurations if each.fits(most)), key=gain, default=None)


def without_lists(problem):
    """(the problem without lists of configurations, a source for each of these jobs)."""
    sources = {job.name: Listed(job.configurations) for job in problem.jobs if job.configurations}
    jobs = tuple(dataclasses.replace(job, configurations=()) for job in problem.jobs)
    return dataclasses.replace(problem, jobs=jobs), sources


@pytest.mark.parametrize("policy", GENERATES)
@pytest.mark.parametrize("family", first_daily(FAMILIES, 4))
def test_the_optimum_is_that_of_the_full_list(policy, family):
    """Objective and levels in the same units; proven over all configurations."""
    for seed in range(200, 206):
        listed = problem_of(family, seed)
        posed, sources = without_lists(listed)
        full, found = allocate(policy, listed), allocate_generated(policy, posed, sources)
        assert found.allocation.objective == pytest.approx(full.objective, rel=1e-6, abs=1e-9)
        if full.gap is not None:
            assert found.allocation.gap <= 1e-6
        for job in listed.jobs:
            named = {c.name for c in found.configurations.get(job.name, ()) if c.throughput}
            assert named <= {c.name for c in job.configurations}
        # What is left over goes where it adds most to the levels, without weights.
        have, want = (
            sum(job.weight * answer.levels[job.name] for job in listed.jobs)
            for answer in (found.allocation, full)
        )
        if policy != "max-throughput":
            assert have == pytest.approx(want, rel=1e-5, abs=1e-7)


@dataclasses.dataclass(frozen=True)
class Modelled:
    """Any numbers of up to 64 GPUs of each of three types: 274,624 configurations, best ones by ascent."""

    speed: tuple[float, float, float]
    power: float

    def throughput(self, gpus):
        return float(np.dot(self.speed, gpus) ** self.power)

    def best_answer(self, prices, worth, most):
        """Speed counts by sums of GPUs, so only the cheapest types per speed come in, in that order."""
        order = sorted(most, key=lambda t: prices[t] / self.speed[int(t[-1])])
        best, gpus = None, dict.fromkeys(most, 0)
        for gpu_type in order:
            for _ in range(min(64, most[gpu_type])):
                gpus[gpu_type] += 1
                taken = [gpus.get(f"type-{j}", 0) for j in range(3)]
                rate = self.throughput(taken)
                gain = worth * rate - sum(prices[t] * n for t, n in gpus.items())
                if best is None or gain > best[0]:
                    best = (gain, rate, dict(gpus))
        if best is None:
            return None
        return Configuration(name=str(sorted(best[2].items())), gpus=best[2], throughput=best[1])


@pytest.mark.parametrize("policy", GENERATES)
def test_hundreds_of_thousands_of_configurations_cost_what_is_used(policy):
    """Of 12 x 274,624 configurations some dozens are looked at; the gap is proven over all."""
    draw = np.random.default_rng(3)
    types = tuple(f"type-{j}" for j in range(3))
    jobs = tuple(
        Job(name=f"job-{m}", steps_remaining=float(10 ** draw.uniform(3, 4)), weight=1.0) for m in range(12)
    )
    problem = Problem(gpu_types=types, capacity=dict(zip(types, (64, 100, 200), strict=True)), jobs=jobs)
    sources = {
        job.name: Modelled(tuple(draw.uniform(1, 5, 3)), float(draw.uniform(0.3, 0.9))) for job in jobs
    }
    found = allocate_generated(policy, problem, sources)
    assert found.allocation.gap <= 1e-6
    assert max(map(len, found.configurations.values())) < 60
    for job in jobs:
        assert set(found.allocation.allocation[job.name]) <= {c.name for c in found.configurations[job.name]}


def test_what_cannot_be_generated_is_refused():
    listed = problem_of("contended", 1)
    posed, sources = without_lists(listed)
    with pytest.raises(ProblemError, match=r"min-cost-slo.*To fix: list them"):
        allocate_generated("min-cost-slo", posed, sources)
    with pytest.raises(ProblemError, match="not one of the jobs"):
        allocate_generated("makespan", posed, {"nobody's": Listed(())})
    with pytest.raises(ProblemError, match="leave out throughput and configurations"):
        allocate_generated("makespan", listed, sources)


@pytest.mark.parametrize("policy", GENERATES)
def test_speeds_that_a_solver_takes_for_infinite(policy):
    """Steps/s times speedup beyond the limits of single numbers: speeds count relative to the fastest."""
    source = GangSizes(throughput={"t": 1e15}, speedup={"2": 1e6, "8": 2.0})
    p = Problem(gpu_types=("t",), capacity={"t": 100}, jobs=(Job(name="a", steps_remaining=10.0),))
    found = allocate_generated(policy, p, {"a": source}).allocation
    assert found.throughput["a"] == pytest.approx(1e21)
    assert found.gap is not None and found.gap <= 1e-6
