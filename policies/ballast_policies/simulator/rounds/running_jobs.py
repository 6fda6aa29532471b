"""The jobs that run by a grant, with their speeds: alone, spread over nodes, or in pairs."""

import numpy as np

from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.rounds.by_shares import Grant
from ballast_policies.simulator.rounds.nodes import Nodes
from ballast_policies.simulator.solving import ShareSolver


def running_jobs(
    grant: Grant, ledger: Ledger, solver: ShareSolver, nodes: Nodes | None
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows, columns, steps/s, and part of the price, of all jobs that run, the partners last."""
    paired = grant.partner >= 0
    rates = ledger.rate[grant.job, grant.column]
    slowdown = np.ones(len(rates)) if nodes is None else nodes.slowdown(grant)
    rates = rates * slowdown
    if not paired.any():
        return grant.job, grant.column, rates, np.ones(len(rates))
    shared = np.array(
        [
            solver.shared_rates(first, second, column)
            for first, second, column in zip(
                grant.job[paired].tolist(),
                grant.partner[paired].tolist(),
                grant.column[paired].tolist(),
                strict=True,
            )
        ]
    )
    shared *= slowdown[paired][:, None]
    rates[paired] = shared[:, 0]
    part = np.where(paired, 0.5, 1.0)
    return (
        np.concatenate([grant.job, grant.partner[paired]]),
        np.concatenate([grant.column, grant.column[paired]]),
        np.concatenate([rates, shared[:, 1]]),
        np.concatenate([part, np.full(len(shared), 0.5)]),
    )
