"""Jobs with one usable GPU type are merged in programs of worth; the answers stay those of each job apart."""

import numpy as np
import pytest
from ballast_policies.allocation.solvers import linear
from ballast_policies.allocation.solvers.boxstep import box_search, boxstep, one_type

from tests.policies.allocation.solvers.boxstep.test_boxstep import cluster, simplex, slopes

TIES_BROKEN = box_search.LAST_TOLERANCE
"""The gap that the search allows itself where jobs tie."""


@pytest.mark.parametrize("part", [0.0, 0.9, 1.0])
@pytest.mark.parametrize("contention", [0.8, 4.0])
def test_merged_jobs_of_one_type_have_the_optimum_and_each_its_demand(part, contention, monkeypatch):
    """A GPU of its only type is worth the same to every such job, so hundreds of them tie."""
    problem = cluster(7, jobs=2500, unusable=0.85, contention=contention)
    columns, merged = problem.columns, []

    def watched(rows, fewest):
        found = one_type.merged_by_type(rows, fewest)
        merged.append(0 if found is None else len(found.merged))
        return found

    monkeypatch.setattr(boxstep, "merged_by_type", watched)
    value = columns.gpus * columns.rate_first / problem.fastest[columns.first]
    base = part * slopes(problem) * linear.maximise(problem, slope=slopes(problem)).t
    # Without demands the program goes to a simpler method; one demand keeps it here.
    base[0] = max(base[0], 1e-6 * problem.fastest[0])
    found = linear.maximise(problem, value=value, base=base)
    best = simplex(monkeypatch, problem, value=value, base=base)
    assert max(merged) > 500
    assert value @ found.x == pytest.approx(value @ best.x, rel=TIES_BROKEN)
    assert found.bound - value @ found.x <= TIES_BROKEN * found.bound
    assert (problem.throughput(found.x) >= base * (1 - 1e-8)).all()
    assert (problem.gpus_used(found.x) <= problem.capacity * (1 + 1e-12)).all()


def test_jobs_whose_worths_differ_stay_apart(monkeypatch):
    """What a GPU is worth to each is drawn at random: there is nothing to merge."""
    problem = cluster(8, jobs=2500, unusable=0.85)
    value = problem.columns.gpus * np.random.default_rng(0).uniform(0.5, 1.0, len(problem.columns))
    base = 0.5 * slopes(problem) * linear.maximise(problem, slope=slopes(problem)).t
    found = linear.maximise(problem, value=value, base=base)
    assert value @ found.x == pytest.approx(
        value @ simplex(monkeypatch, problem, value=value, base=base).x, rel=1e-8
    )
