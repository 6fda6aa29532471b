"""A search for prices ends with a proven answer also where rounding keeps it from the smallest gap."""

import pytest
from ballast_policies.allocation.solvers import linear
from ballast_policies.allocation.solvers.boxstep import box_search

from tests.policies.allocation.solvers.boxstep.test_boxstep import cluster, simplex, slopes

FEW_PROGRAMS = 25
"""Small programs of the searches together, of 150 rounds each at most."""


@pytest.fixture
def programs(monkeypatch):
    """The number of small programs, where none reaches the smallest gap."""
    solved = []
    lp_of = box_search.lp_of

    def counted(*arguments):
        solved.append(1)
        return lp_of(*arguments)

    monkeypatch.setattr(box_search, "GAP_TOLERANCE", -1.0)
    monkeypatch.setattr(box_search, "lp_of", counted)
    return solved


@pytest.mark.slow
def test_a_gap_that_rounding_does_not_allow_ends_the_search_at_the_next_larger(monkeypatch, programs):
    """Not all 150 rounds of the same program: a few, and the answer is proven to 3e-7."""
    problem = cluster(3, contention=20.0)
    found = linear.maximise(problem, slope=slopes(problem))
    assert len(programs) <= FEW_PROGRAMS
    assert found.bound - found.t <= box_search.LAST_TOLERANCE * found.bound
    assert found.t == pytest.approx(simplex(monkeypatch, problem, slope=slopes(problem)).t, rel=1e-6)


@pytest.mark.slow
def test_a_search_of_too_much_work_ends_in_one_program_of_the_cheap_columns(monkeypatch):
    """After its bound on the jobs in small programs, whose answer is the proven optimum all the same."""
    monkeypatch.setattr(box_search, "MOST_JOBS", 0)
    problem = cluster(3, contention=20.0)
    found = linear.maximise(problem, slope=slopes(problem))
    assert found.bound - found.t <= 1e-6 * found.bound
    assert found.t == pytest.approx(simplex(monkeypatch, problem, slope=slopes(problem)).t, rel=1e-6)
