"""The least that a job can cost when all prices and preemptions are known, as a lower bound.

On a grid of reviews, a path chooses for every slot one offer or none; entering an offer takes the start-up,
which is paid and trains nothing.  The cheapest path with enough steps is bounded from below by its dual

    max over lambda of  lambda S - max over paths of (lambda steps(path) - USD(path)),

the inner maximum by dynamic programming (Viterbi), which is exact.  Quotas and other jobs are not looked at.
"""

import numpy as np

MULTIPLIERS = 24
"""Values of lambda tried at once, twice: over the whole range, then around the best."""


def least_usd(
    *,
    steps: float,
    steps_per_slot: np.ndarray,
    usd_per_slot: np.ndarray,
    startup_slots: float,
) -> float:
    """A lower bound in USD for the cheapest path with ``steps`` steps.

    Args:
        steps: to do.
        steps_per_slot: (T, K) of each offer in each slot; 0 where no machine can be had.
        usd_per_slot: (T, K).
        startup_slots: length of a start-up, in slots.

    Returns:
        0 where no path has enough steps at any price: there is no such bound then.
    """
    useful = steps_per_slot > 0
    if not useful.any():
        return 0.0
    per_step = usd_per_slot[useful] / steps_per_slot[useful]
    low, high = 0.5 * float(per_step.min()), 4.0 * float(per_step.max())
    bound = 0.0
    for _ in range(3):
        tried = np.geomspace(low, high, MULTIPLIERS)
        values = tried * steps - _best_paths(tried, steps_per_slot, usd_per_slot, startup_slots)
        best = int(np.argmax(values))
        bound = max(bound, float(values[best]))
        low, high = float(tried[max(best - 1, 0)]), float(tried[min(best + 1, MULTIPLIERS - 1)])
    return bound


def _best_paths(
    multipliers: np.ndarray, steps: np.ndarray, usd: np.ndarray, startup_slots: float
) -> np.ndarray:
    """(L,) the most that lambda steps - USD can be over all paths, for each lambda.

    A start-up longer than a slot costs the steps of several slots, all taken at the entry.
    """
    slots, offers = steps.shape
    idle = np.zeros(len(multipliers))
    running = np.full((len(multipliers), offers), -np.inf)
    for t in range(slots):
        worth = multipliers[:, None] * steps[t]
        best = np.maximum(idle, running.max(axis=1))
        entered = best[:, None] - startup_slots * worth
        running = np.maximum(running, entered) + worth - usd[t]
        running[:, steps[t] <= 0] = -np.inf
        idle = best
    best_of_all: np.ndarray = np.maximum(idle, running.max(axis=1))
    return best_of_all
