"""Which prices of a log can be true."""

import math

import pytest
from ballast_policies.prices.offers import is_plausible


@pytest.mark.parametrize("usd", [0.0, -1.0, math.nan, math.inf])
def test_what_is_no_price_is_never_plausible(usd):
    """Whatever the on-demand price."""
    assert not is_plausible(usd, None)
    assert not is_plausible(usd, 1.0)
