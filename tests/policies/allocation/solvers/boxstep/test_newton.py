"""The model of the dual around given prices foretells what prices do to the GPUs in use."""

import numpy as np
import pytest
from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.boxstep import box_search
from ballast_policies.allocation.solvers.boxstep.newton import newton_step, price_model, unlike
from ballast_policies.allocation.solvers.crossover import Box, closeness
from ballast_policies.allocation.solvers.dense_program import dense_rows

JOBS, TYPES = 20_000, 4


@pytest.fixture(scope="module")
def rows():
    """Unlike jobs, each with a worth on each type and a demand of up to half its speed."""
    draw = np.random.default_rng(7)
    first, place = np.divmod(np.arange(JOBS * TYPES), TYPES)
    return dense_rows(
        first=first,
        place=place,
        width=TYPES,
        rates=draw.uniform(0.3, 1.0, JOBS * TYPES),
        gpus=np.ones(JOBS),
        value=draw.uniform(0.0, 1.0, JOBS * TYPES),
        base=draw.uniform(0.0, 0.15, JOBS),
        slope=np.zeros(JOBS),
        capacity=np.full(TYPES, JOBS / 6),
        gain=0.0,
    )


def test_the_gpus_in_use_change_with_prices_as_the_hessian_says(rows):
    """At other prices in the box, within a tenth."""
    prices = np.array([0.5, 0.55, 0.6, 0.65])
    at, box = respond(rows, prices, 0.0), Box(prices=np.full(TYPES, 0.02), t=1e-9)
    hessian = price_model(rows, at, box, closeness(rows, at, box)).hessian
    change = np.array([0.01, -0.01, 0.015, 0.0])
    fewer = at.used(rows) - respond(rows, prices + change, 0.0).used(rows)
    assert fewer == pytest.approx(hessian @ change, abs=0.1 * np.abs(fewer).max())


def test_a_step_ends_near_the_best_prices(rows):
    """From prices that are 5 % wrong, the GPUs left or missing fall to a fifth."""
    found = box_search.BoxSearch(rows).run(respond(rows, np.full(TYPES, 0.5), 0.0), lp_jobs=400, part=0.3)
    wrong = found.prices * np.array([1.05, 0.95, 1.05, 1.0])
    at, box = respond(rows, wrong, 0.0), Box(prices=0.1 * wrong, t=1e-9)
    step = newton_step(rows, at, box, closeness(rows, at, box))
    missing = [np.abs(rows.capacity - each.used(rows)).max() for each in (at, step.after)]
    assert not step.at_wall and step.gain > 0
    assert missing[1] <= missing[0] / 5


def test_jobs_that_change_at_the_same_prices_have_no_smooth_model():
    """Forty kinds of jobs are told from unlike ones."""
    near = np.random.default_rng(1).uniform(0.0, 2.0, 5000)
    assert unlike(near)
    assert not unlike(near[np.arange(5000) % 40])
