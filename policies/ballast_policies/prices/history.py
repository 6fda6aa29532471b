"""Prices of a log, and which of them can be true."""

import dataclasses
import math

MOST_ABOVE_ON_DEMAND = 2.0
"""Spot prices are capped at the on-demand price, which differs between regions by less than this factor."""

LEAST_OF_ON_DEMAND = 0.02
"""Below this part of the on-demand price a spot price is an error: discounts of 8 times have been seen."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One row of a log: a price from a moment on; None: not offered from then on."""

    time: float
    usd: float | None


def is_plausible(usd: float, on_demand_usd: float | None) -> bool:
    """Whether a spot price can be true: from a fiftieth to twice the on-demand price, where it is known."""
    if not (math.isfinite(usd) and usd > 0):
        return False
    return on_demand_usd is None or LEAST_OF_ON_DEMAND <= usd / on_demand_usd <= MOST_ABOVE_ON_DEMAND
