"""The rows of the policies that read prices."""

from ballast_policies.allocation.policies import makespan
from ballast_policies.allocation.policies.cost import (
    fairness_per_dollar,
    makespan_within_budget,
    max_throughput_per_dollar,
    min_cost,
    min_cost_slo,
)
from ballast_policies.allocation.policy import Policy, Reads, SpaceSharing, Surplus

COST_POLICIES = {
    "max-throughput-per-dollar": Policy(
        summary="maximise `sum T[m, j] X[m, j] / (g_m price_j)` (Gavel's linear form of 6.4.2)",
        solve=max_throughput_per_dollar.solve,
        objective=max_throughput_per_dollar.objective,
        reads=frozenset({Reads.PRICES}),
        compares_speeds=True,
        takes_configurations=True,
        surplus=Surplus.COST,
    ),
    "min-cost": Policy(
        summary="maximise `sum_m throughput(m, X) / cost(m, X)` (6.4.2): each job on its cheapest types, "
        "shared fairly",
        solve=min_cost.solve,
        objective=min_cost.objective,
        reads=frozenset({Reads.PRICES}),
        space_sharing=SpaceSharing.NEVER,
        takes_configurations=True,
        surplus=Surplus.COST,
    ),
    "min-cost-slo": Policy(
        summary="least cost that keeps all deadlines that can be kept (6.4.3); the others are named, and "
        "run as by `min-cost`",
        solve=min_cost_slo.solve,
        objective=min_cost_slo.objective,
        reads=frozenset({Reads.PRICES, Reads.DEADLINES, Reads.STEPS}),
        names_unmet_deadlines=True,
        compares_speeds=True,
        space_sharing=SpaceSharing.NEVER,
        takes_configurations=True,
        surplus=Surplus.COST,
    ),
    "makespan-within-budget": Policy(
        summary="minimise the largest `steps_m / throughput(m, X)` at a cost of at most `budget`, of each "
        "job and of all (6.4.3)",
        solve=makespan_within_budget.solve,
        objective=makespan.objective,
        reads=frozenset({Reads.PRICES, Reads.STEPS, Reads.BUDGETS}),
        compares_speeds=True,
        space_sharing=SpaceSharing.NEVER,
        takes_configurations=True,
        surplus=Surplus.COST,
        imports=("scipy.optimize", "scipy.sparse"),
    ),
    "max-min-fairness-per-dollar": Policy(
        summary="maximise the least `throughput(m, X) cost_m / w_m`, cost_m the USD of a step on the "
        "job's cheapest GPUs: the value in dollars of what each job gets",
        solve=fairness_per_dollar.solve,
        solve_from=fairness_per_dollar.solve,
        objective=fairness_per_dollar.objective,
        reads=frozenset({Reads.PRICES}),
        space_sharing=SpaceSharing.NEVER,
        takes_configurations=True,
    ),
}
"""Name -> row, in the order of the registry."""
