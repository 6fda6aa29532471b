"""Least cost, and least cost beside deadlines."""

import numpy as np
import pytest
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policies.cost import min_cost_slo
from ballast_policies.allocation.registry import allocate, solve

from tests.policies.allocation.families import FAMILIES
from tests.policies.allocation.problems import problem, random_problem, within_limits


def test_gpus_of_one_type_do_not_idle_because_another_type_is_short():
    """Ten jobs crowd one type; the job on the other type runs all of the time."""
    p = problem([[4.0, 1.0]] * 10 + [[1.0, 4.0]], [1, 1], prices=[1.0, 1.0])
    answer = allocate("min-cost", p)
    assert answer.throughput["job-10"] == pytest.approx(4.0)
    assert sum(answer.allocation[f"job-{m}"]["type-0"] for m in range(10)) == pytest.approx(1.0)


def test_types_that_are_equally_cheap_share_their_jobs():
    """Two pools of one type at one price: three jobs, each with two thirds of its time over both."""
    p = problem([[2.0, 2.0, 1.0]] * 3, [1, 1, 1], prices=[1.0, 1.0, 5.0])
    answer = allocate("min-cost", p)
    assert [answer.throughput[f"job-{m}"] for m in range(3)] == pytest.approx([4 / 3] * 3)


@pytest.mark.parametrize("contention", [0.5, 1.0, 2.0, 10.0])
def test_large_instances_are_at_the_least_cost(contention):
    """The bound is the cost of every job on its cheapest type."""
    p = instance(random_problem(5, 2000, 6, contention=contention))
    assert solve("min-cost", p).gap <= 1e-9


@pytest.mark.parametrize("family", ["hasty deadlines, demand 10", "like jobs"])
def test_the_same_deadlines_are_kept_as_one_after_the_other(monkeypatch, family):
    """By prices, and by bisection with linear programs; at the same cost."""
    real = FAMILIES[family].instance(60, types=3)
    by_prices = solve("min-cost-slo", real)
    monkeypatch.setattr(min_cost_slo, "admissible_demands", lambda *arguments: None)
    one_by_one = solve("min-cost-slo", real)
    assert by_prices.unmet_deadlines == one_by_one.unmet_deadlines
    assert by_prices.objective == pytest.approx(one_by_one.objective, rel=1e-6)


@pytest.mark.slow
def test_thousands_of_deadlines_of_which_most_do_not_fit():
    """Those that are kept are kept, within the GPUs, at a proven least cost."""
    real = FAMILIES["hasty deadlines, demand 10"].instance(3000)
    answer = solve("min-cost-slo", real)
    late = np.isin(np.array(real.names), answer.unmet_deadlines)
    kept = ~np.isnan(real.deadlines) & ~late
    assert late.sum() > 500
    assert kept.sum() > 100
    assert (real.throughput(answer.x) * real.deadlines >= real.steps() * (1 - 1e-5))[kept].all()
    within_limits(real, answer.x)
    assert answer.gap <= 1e-6
