"""Water filling, one level: max-min fairness to the end (dissertation section 5.4.3).

The lexicographic maximum of the levels l_m = gpus_m throughput(m, X) / (w_m throughput(m, X_equal)): the
least is as large as can be (as in ``max_min_fairness``), then the next least, and so on. Stage by
stage (see ``water_levels``):

    maximise_X  min_{m not frozen}  (l_m(X) - l_m(previous))  subject to  l_m(X) >= l_m(previous) for all m.

The result is Pareto efficient: no job can get more unless another gets less. Objective: the least level.
"""

from ballast_policies.allocation.fairness.teams import flat
from ballast_policies.allocation.fairness.water_levels import fill
from ballast_policies.allocation.instance import Instance
from ballast_policies.allocation.policies.max_min_fairness import objective
from ballast_policies.allocation.policy import Answer

__all__ = ["objective", "solve"]


def solve(instance: Instance) -> Answer:
    """Shares that fill all levels in turn."""
    return fill(instance, flat(instance)).answer
