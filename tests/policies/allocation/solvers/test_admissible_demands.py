"""Which demands of a list fit together: the same as trying them one after the other."""

import numpy as np
import pytest
from ballast_policies.allocation.instance import instance
from ballast_policies.allocation.policies.cost import min_cost_slo
from ballast_policies.allocation.policies.cost.min_cost_slo import admissible_demands
from ballast_policies.allocation.solvers import linear
from hypothesis import given
from hypothesis import strategies as st

from tests.policies.allocation.families import FAMILIES
from tests.policies.allocation.problems import problems
from tests.policies.allocation.textbook import Book
from tests.support.examples import examples, first_daily


@pytest.mark.slow
@examples(80)
@given(p=problems(), parts=st.lists(st.sampled_from([0.1, 0.25, 0.5, 0.7, 1.0]), min_size=7, max_size=7))
def test_small_lists_are_accepted_as_one_linear_program_after_another_accepts_them(p, parts):
    """Ties included: parts of full speed that fill GPUs exactly."""
    book, real = Book(p), instance(p)
    demand = book.full * np.array(parts[: book.n])
    order = np.flatnonzero(demand > 0)[::-1]
    want = np.zeros(book.n, dtype=bool)
    for m in order:
        want[m] = True
        want[m] = (
            book.best(np.zeros(book.width), at_least=np.where(want, demand, 0.0) * (1 - 1e-9)) is not None
        )
    if len(order):
        assert (admissible_demands(real, demand, order) == want).all()


def fits(real, demand, jobs):
    some = np.zeros(len(demand))
    some[jobs] = demand[jobs]
    try:
        linear.maximise(real, value=np.zeros(len(real.columns)), base=some * (1 - 1e-7))
    except linear.InfeasibleError:
        return False
    return True


@pytest.mark.slow
@pytest.mark.parametrize(
    "family", first_daily(["demand 3", "like jobs", "heavy tails", "few usable types"], 2)
)
def test_hundreds_of_demands_of_which_most_do_not_fit(family):
    """What is accepted fits together; what is refused does not fit with those accepted before it."""
    real = FAMILIES[family].instance(400, types=4)
    order = np.random.default_rng(5).permutation(400)
    demand = real.fastest * np.random.default_rng(6).uniform(0.2, 1.0, 400)
    accepted = admissible_demands(real, demand, order)
    assert fits(real, demand, accepted)
    refused = np.flatnonzero(~accepted[order])
    assert 20 < len(refused) < 380
    for at in np.random.default_rng(7).choice(refused, 8, replace=False):
        before = order[:at][accepted[order[:at]]]
        assert not fits(real, demand * (1 + 1e-6), np.append(before, order[at]))


def test_no_prices_no_answer(monkeypatch):
    """Where prices are not found, the caller tries its own way."""
    monkeypatch.setattr(min_cost_slo, "least_utilization", lambda *arguments, **more: None)
    real = FAMILIES["demand 3"].instance(50)
    assert admissible_demands(real, real.fastest, np.arange(50)) is None
