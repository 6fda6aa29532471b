"""The jobs that can get no more when a stage of water filling ends, and whether their shares are unique."""

import numpy as np

from ballast_policies.allocation.fairness.stage_jobs import PricedJobs, StageJobs
from ballast_policies.allocation.solvers.best_response import respond
from ballast_policies.allocation.solvers.job_classes import equal_rows

SAME = 1e-9
"""Speeds, and reduced costs as a part of prices, that differ by less count as equal."""
MOST_TIED = 300
"""Kinds of jobs with a choice that are checked together; with more, shares count as not unique."""


class TiedError(Exception):
    """Jobs that stopped may use the open types in several ways, and the stages to come depend on which."""


def stopped_jobs(
    stage: StageJobs, program: PricedJobs, prices: np.ndarray, s: float, X: np.ndarray
) -> np.ndarray:
    """(n,) jobs that cannot rise without types that have a price, where their shares are unique.

    Raises:
        TiedError: the shares of some are not unique.
    """
    closed = prices > 0
    if closed.all():
        return np.ones(len(X), dtype=bool)
    stopped = np.zeros(len(X), dtype=bool)
    stopped[program.jobs] = True
    priced = stage.columns.on(closed)
    open_rates = np.where(priced, 0.0, stage.rates)
    free = open_rates.max(axis=1)
    tied = (free > 0) & ((open_rates >= free[:, None] * (1 - SAME)).sum(axis=1) > 1)
    resting = np.where(priced, 0.0, X).sum(axis=1) > SAME
    if (stopped & tied & resting).any() or not _unique(stage, program, prices[closed]):
        raise TiedError("jobs that stop may use the other types in several ways")
    # Jobs that may be on several open types at full speed wait for a later stage to place them.
    stopped |= (stage.demand(s) >= free * (1 - SAME)) & ~tied
    return stopped


def _unique(stage: StageJobs, program: PricedJobs, prices: np.ndarray) -> bool:
    """Whether jobs that may use three types or more (free ones count as one) have no choice after all.

    At optimal prices they may use columns without a reduced cost only; speed, time and the GPUs of the
    limiting types are given. In GPUs of all jobs of the same speeds that is a system of equations, with one
    solution if its columns are independent. Which of these jobs has which GPUs does not matter to others.
    """
    rows = program.rows
    if not len(rows):
        return True
    at = respond(rows, prices, 0.0)
    used = at.reduced_costs(rows.rates) <= SAME * rows.gpus[:, None] * prices.max()
    several = np.flatnonzero(used.sum(axis=1) > 2)
    if not len(several):
        return True
    parts = [stage.rates[program.jobs[several]], used[several]]
    if rows.use is not None:
        parts += [each.T[several] for each in rows.use]
    several = several[equal_rows(np.concatenate(parts, axis=1))[1]]
    if len(several) > MOST_TIED:
        return False
    group, place = np.nonzero(used[several])
    here, k = np.arange(len(group)), len(prices)
    system = np.zeros((2 * len(several) + k + 1, len(group)))
    system[group, here] = rows.rates[several[group], place]
    system[len(several) + group, here] = 1.0
    if rows.use is None:
        system[2 * len(several) + place, here] = 1.0
    else:
        system[2 * len(several) : -1, here] = rows.use[:, place, several[group]]
    return bool(np.linalg.matrix_rank(system[:-1]) == len(group))
