"""Newton's direction for duals of few prices that entropy smooths (``nash_prices``, ``queues.prices``)."""

import numpy as np


def newton_direction(gradient: np.ndarray, hessian: np.ndarray) -> tuple[np.ndarray, float]:
    """Newton's direction of a convex function of k prices.

    Args:
        gradient: (k,).
        hessian: (k, k), scaled to a diagonal of ones before it is solved: prices may differ by magnitudes.

    Returns:
        (changes of the prices (k,), by how much the function falls along them at first).
    """
    unit = 1.0 / np.sqrt(np.maximum(np.diag(hessian), 1e-300))
    system = hessian * unit[:, None] * unit + 1e-12 * np.eye(len(gradient))
    change = -np.linalg.solve(system, gradient * unit) * unit
    return change, float(-gradient @ change)
