"""Seconds per step of a synchronous pipeline, predicted from its ranks' loads.

For GPipe and 1F1B with m microbatches, rank r's load per microbatch t_r = load_r / m, and e_i the
seconds of communication at boundary i per microbatch (AMP, equation 10; with equal t it is the
(p - 1) / m bubble of PipeDream-Flush):

    T = (m - 1) max_r t_r + sum_r t_r + sum_i e_i

It takes a rank's forward and backward for one task, and so overestimates uneven stages by up to
6 % (``benchmarks/planning/schedules.py``); ``schedules.simulate`` plays the schedule instead.
"""

from collections.abc import Sequence

import numpy as np


def predict_step_seconds(
    loads: Sequence[float] | np.ndarray,
    microbatches: int,
    *,
    boundary_seconds: Sequence[float] = (),
    fixed_seconds: float = 0.0,
) -> float:
    """Predicted seconds per step.

    Args:
        loads: seconds per step of each rank's own work (all microbatches), shape (p,).
        microbatches: m >= 1.
        boundary_seconds: transfer per microbatch at each of the p - 1 boundaries.
        fixed_seconds: what each step takes besides, e.g. the optimizer.
    """
    per_microbatch = np.asarray(loads, dtype=float) / microbatches
    steady = (microbatches - 1) * per_microbatch.max()
    return float(steady + per_microbatch.sum() + sum(boundary_seconds) + fixed_seconds)
