"""How many jobs the LPs of a box search have, from what the LPs before have led to."""

import numpy as np

from ballast_policies.allocation.solvers.boxstep.newton import unlike
from ballast_policies.allocation.solvers.boxstep.open_jobs import JITTER

LP_GROWTH_FACTOR = 3
"""An exact LP that did not prove the optimum twice gets this many times more jobs."""
DOUBTS = 2
"""Each time that this many samples did not improve the bound, samples double, up to MOST_SAMPLED jobs."""
MOST_SAMPLED = 1600
CRAWLS = 3
"""Likewise where this many exact LPs ended at a wall."""
NEWTON_FAILURES = 2
"""Newton steps that may fail to improve the bound, after which there are only LPs."""
GAP_TOLERANCE = 1e-10
"""Relative gap at which the search ends."""
LAST_TOLERANCE = 3.0 * JITTER
"""Likewise where ties were broken, or rounding errors kept PATIENCE exact LPs from the smaller gap."""
PATIENCE = 2


class LpSize:
    """How many jobs the LPs of a search have: more where those do not lead it to its end."""

    def __init__(self, jobs: int) -> None:
        self.jobs = jobs
        self.failed = self.crawled = self.spent = self._doubted = 0
        self._first, self._newton_failed = jobs, 0

    @property
    def tolerance(self) -> float:
        """The relative gap at which an exact LP ends the search."""
        return GAP_TOLERANCE if self.failed < PATIENCE else LAST_TOLERANCE

    def too_small_for(self, nearest: np.ndarray) -> bool:
        """Whether a Newton step comes first: of jobs so near (n,) to a change too many are undecided."""
        undecided = int((nearest <= 1.0).sum())
        return undecided > self.jobs and self._newton_failed < NEWTON_FAILURES and unlike(nearest)

    def after_newton_failed(self, nearest: np.ndarray) -> None:
        """Count a Newton step that did not improve the bound."""
        self._newton_failed += 1
        undecided = int((nearest <= 1.0).sum())
        if undecided <= LP_GROWTH_FACTOR * self._first:
            self.jobs = max(self.jobs, undecided)

    def after(self, *, exact: bool, better: bool, at_wall: bool) -> None:
        """Count an LP: of all undecided jobs, whether it improved the bound, ended at a wall."""
        if exact and at_wall and better:
            # Prices that have far to go, past many jobs: a wider box.
            self.crawled += 1
            self.jobs *= LP_GROWTH_FACTOR if self.crawled % CRAWLS == 0 else 1
        elif exact:
            self.failed += 1
            self.jobs *= LP_GROWTH_FACTOR if self.failed > 1 else 1
        elif not better:
            self._doubted += 1
            self.jobs *= 2 if self._doubted % DOUBTS == 0 and self.jobs < MOST_SAMPLED else 1
