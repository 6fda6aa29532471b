"""Deadlines that do not all fit."""

import numpy as np
import pytest
from ballast_policies.allocation.policies.cost import min_cost_slo
from ballast_policies.allocation.registry import solve

from tests.policies.allocation.families import FAMILIES


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
    assert (real.gpus_used(answer.x) <= real.capacity * (1 + 1e-9)).all()
    assert answer.gap <= 1e-6
