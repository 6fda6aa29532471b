"""The best plan over every shape, placement and partition, with a bound."""

from ballast_policies.planning.planners.best.search import BestPlans, plan_best

__all__ = ["BestPlans", "plan_best"]
