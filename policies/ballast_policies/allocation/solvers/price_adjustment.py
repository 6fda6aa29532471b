"""Price adjustment: prices of the GPU types to about a thousandth, raised where GPUs are short, else lowered.

Each job answers prices with its cheapest way to meet its demand (``best_response``). Prices then change by
the logarithm of the demand for a type relative to the mean of all types, with a separate step
length for each type: longer while it keeps its direction, half where it turns (as the step lengths of
Rprop, Riedmiller and Braun 1993). A sample of some thousand jobs stands for all. At every step the demands
go to the s that the prices allow at most, so prices never answer demands far from those that can be met. Any
prices prove a bound; here they need not be exact.
"""

import dataclasses
from typing import Protocol

import numpy as np

from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.dense_program import Rows

STEPS = 30
FIRST_STEP = 0.3
LONGER, SHORTER = 1.4, 0.5
SHORTEST, LONGEST = 0.05, 2.0
LEAST_PART, GREATEST_PART = 0.01, 4.0
"""The demand for a type, relative to the mean, counts as at least and at most this."""


class Demands(Protocol):
    """Demands that grow with s, from 0 to ``end``."""

    @property
    def end(self) -> float:
        """The greatest s."""
        ...

    def demand(self, s: float) -> np.ndarray:
        """(n,) at ``s``."""
        ...

    def root(self, level: np.ndarray, cut: float) -> float:
        """The s at which level . demand(s) = cut, about; ``end`` where it is not reached."""
        ...


def adjusted_prices(rows: Rows, demands: Demands) -> tuple[float, np.ndarray]:
    """(s, prices): about how far the demands can go, and (k,) prices that prove it, worth 1 with all GPUs.

    Args:
        rows: jobs, or a sample with ``gpus`` counted for all that they stand for; ``lift`` is the number of
            GPUs of each type and -``capacity`` what others hold; every type has some.
        demands: of the rows.
    """
    size = rows.lift
    prices = 1.0 / size / len(size)
    best, best_prices = s, _ = demands.end, prices
    step, before = np.full(len(size), FIRST_STEP), np.zeros(len(size))
    for _ in range(STEPS):
        asked = dataclasses.replace(rows, base=demands.demand(s))
        at = respond(asked, prices, 0.0)
        s = demands.root(at.level, float(at.time.sum() + prices @ (size + rows.capacity)))
        if s < best:
            best, best_prices = s, prices
        part = (at.used(rows) - rows.capacity) / size
        mean = float(prices @ (part * size))
        pull = np.log(np.clip(part / mean, LEAST_PART, GREATEST_PART)) if mean > 0 else np.zeros(len(size))
        step = np.clip(np.where(pull * before > 0, LONGER * step, SHORTER * step), SHORTEST, LONGEST)
        before = pull
        prices = prices * np.exp(step * pull)
        prices = prices / (prices @ size)
    return best, best_prices
