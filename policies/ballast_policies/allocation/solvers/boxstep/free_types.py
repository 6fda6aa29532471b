"""GPU types without a price: which of them jobs take to whom they cost the same, nothing.

Where one type alone limits, as where one gang fills a pool, all other prices are 0, and thousands of jobs tie
between the other types. Prices so small that they change the bound by less than the search's tolerance decide
for them; here such prices are looked for that load these types alike.
"""

import numpy as np

from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.dense_program import Rows, stratified

SMALL = 1e-11
"""The new prices, as a part of the usual one."""
NONE = 1e-9
"""A price below this part of the usual one is none."""
SAMPLE = 5000
STEPS, STEP = 40, 0.3
"""Prices change by this power of a load relative to the median."""
LEAST_LOAD = 0.1
"""A type's load counts as at least this part of it."""


def balanced_prices(rows: Rows, prices: np.ndarray, t: float, usual: float) -> np.ndarray | None:
    """``prices`` (k,) with small ones where there were none; None: the answers to them do not fit there.

    Args:
        rows: the program.
        prices: at which jobs tie.
        t: the demands are those at t.
        usual: the price of a GPU, about.
    """
    left = rows.capacity - rows.lift * t
    free = (prices <= NONE * usual) & (left > 0)
    if not free.any() or free.all():
        return None
    chosen, weight = stratified(rows.gpus, np.zeros(len(rows), dtype=np.intp), np.arange(len(rows)), SAMPLE)
    some = rows.take(chosen, capacity=rows.capacity, lift=rows.lift).standing_for(weight)
    found, highest = prices.copy(), SMALL * usual
    found[free] = np.clip(highest * np.median(left[free]) / left[free], 0.01 * highest, highest)
    for _ in range(STEPS):
        load = respond(some, found, t).used(some)[free] / left[free]
        if load.max() <= 1.0 and (respond(rows, found, t).used(rows)[free] <= left[free]).all():
            return found
        load = np.maximum(load, LEAST_LOAD)
        found[free] *= (load / np.median(load)) ** STEP
        found[free] *= highest / found[free].max()
    return None
