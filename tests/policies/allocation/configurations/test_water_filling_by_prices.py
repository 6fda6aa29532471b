"""Water filling of elastic jobs in prices: the levels of one linear program for each level."""

import numpy as np
import pytest
from ballast_policies.allocation.fairness import water_levels
from ballast_policies.allocation.fairness.teams import flat, tree
from ballast_policies.allocation.fairness.water_levels import fill, fill_by_programs
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.registry import solve
from ballast_policies.allocation.solvers import methods

from tests.policies.allocation.configurations.families import FAMILIES as LARGE
from tests.policies.allocation.configurations.instances import FAMILIES, problem_of
from tests.support.examples import first_daily, first_fast

ROOTS = {"water-filling": flat, "hierarchical": tree}


@pytest.mark.slow
@pytest.mark.parametrize("policy", ROOTS)
@pytest.mark.parametrize("family", first_daily(FAMILIES, 4))
def test_levels_are_those_of_one_program_for_each_level(policy, family, monkeypatch):
    """Small random problems, gangs beside elastic jobs and nested teams included."""
    monkeypatch.setattr(methods, "STAGES", 0)
    for seed in range(100, 110):
        real = instance(problem_of(family, seed))
        root = ROOTS[policy](real)
        expected, found = fill_by_programs(real, root), fill(real, root)
        x = found.answer.x
        assert (real.gpus_used(x) <= real.capacity * (1 + 1e-9)).all()
        assert (real.time_used(x) <= 1 + 1e-9).all()
        levels = real.level_scale * real.throughput(x)
        assert levels == pytest.approx(found.levels, rel=1e-6, abs=1e-6 * max(1.0, levels.max(initial=0)))
        if (expected.answer.gap or 0.0) <= 1e-6:
            assert found.levels == pytest.approx(expected.levels, rel=1e-6, abs=1e-7)


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", first_fast(["demand 5", "demand 0.25", "noisy", "beside gangs", "two types"], 2)
)
def test_hundreds_of_elastic_jobs_are_certified_without_a_program_of_all(name, monkeypatch):
    """Also where GPUs idle, which took one linear program a level."""

    def by_programs(*_):
        raise AssertionError("one linear program for each level")

    monkeypatch.setattr(water_levels, "fill_by_programs", by_programs)
    real = LARGE[name].drawn(200)()
    answer = solve("water-filling", real)
    assert answer.gap <= 1e-6
    least = solve("max-min-fairness", real).objective
    assert answer.objective == pytest.approx(least, rel=1e-6)
    assert (real.gpus_used(answer.x) <= real.capacity * (1 + 1e-9)).all()
    # No job that is not at full speed has a configuration on GPUs that are idle.
    idle = real.capacity - real.gpus_used(answer.x) > 1e-6 * real.capacity
    slow = real.throughput(answer.x) < real.fastest * (1 - 1e-6)
    column, kind, _ = real.columns.entries()
    full = np.zeros(len(real.columns), dtype=bool)
    np.logical_or.at(full, column, ~idle[kind])
    waits = slow & (real.time_used(answer.x) < 1 - 1e-6)
    assert not (~full & waits[real.columns.first]).any()
