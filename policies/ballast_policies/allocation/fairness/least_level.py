"""The core of max-min policies: the least level is the largest possible, and no GPU stays idle."""

import numpy as np

from ballast_policies.allocation.answer import Answer
from ballast_policies.allocation.fairness.idle_capacity import fill_idle_capacity
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.solvers import linear
from ballast_policies.allocation.start import WarmStart


def raise_least_level(instance: Instance, slope: np.ndarray, start: WarmStart | None = None) -> Answer:
    """Maximise t with ``throughput(m, X) >= slope_m t``, as one LP; ties as in ``idle_capacity``.

    Args:
        instance: the instance.
        slope: (n,) steps/s of each job at level 1; 0: the job does not count.
        start: an earlier answer to begin from.
    """
    raised = linear.maximise(instance, slope=slope, start=start)
    return Answer(
        x=fill_idle_capacity(instance, raised.x, slope * raised.t, raised),
        solver=raised.solver,
        start=raised.start,
        bound=raised.bound,
        shadow_prices=raised.shadow_prices,
    )
