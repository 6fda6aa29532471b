"""The solver, asked once for each question."""

import logging

from ballast_policies.allocation.problem import Problem

from ballast_operator.allocator.solving.solver import Solve, Solver
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.api.policy_conditions import PolicyReason
from ballast_operator.metrics import Metrics

logger = logging.getLogger(__name__)


class LastAnswer:
    """Keeps the last answer for as long as it holds."""

    def __init__(self, solver: Solver, metrics: Metrics) -> None:
        self._solver = solver
        self._metrics = metrics
        self._last: tuple[tuple[object, object], Solve] | None = None

    async def solve(
        self,
        policy: ClusterPolicy,
        problem: Problem,
        *,
        structure: object,
        values: object,
        within_round: bool,
    ) -> Solve:
        """The policy's allocation; the last one again where nothing has changed.

        Args:
            policy: in force.
            problem: what it is asked.
            structure: equal where the last answer may hold; see ``SolveRequest``.
            values: equal where it does.
            within_round: values that have changed are taken up at the round's end.
        """
        if self._last is not None:
            (last_structure, last_values), last = self._last
            if structure == last_structure and (within_round or values == last_values):
                return last
        name = policy.spec.objective.policy
        solve = await self._solver.solve(
            name,
            problem,
            limit_seconds=policy.spec.solver.time_limit_seconds,
            options={"agnostic": policy.spec.objective.heterogeneity_agnostic},
        )
        self._metrics.solve_seconds.labels(name).observe(solve.seconds)
        if solve.outcome is PolicyReason.OPTIMAL:
            self._last = ((structure, values), solve)
        else:
            self._metrics.solve_fallbacks.labels(solve.outcome).inc()
            self._last = None
        logger.info("solved jobs=%d: %s", len(problem.jobs), solve.message)
        return solve
