"""The choice among Gavel's own versions, and the answer as shares."""

import dataclasses
import functools
import time
from collections.abc import Callable

import numpy as np
from ballast_policies.allocation.problem import Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.simulator.ledger import Ledger

from ballast_lab.arrays.rules import ArraySettings, Entries, PairRates, Rules
from ballast_lab.gavel import fairness
from ballast_lab.gavel.allox import AlloX
from ballast_lab.gavel.fifo import Fifo
from ballast_lab.gavel.gandiva import Gandiva

INTERIOR = ("finish-time-fairness", "makespan")
"""Policies of which there is an own version where the middle of the optimum is asked for."""


class GavelPolicies:
    """Gavel's AlloX, FIFO and Gandiva with what they remember, and its LPs as its solver answers them.

    Args:
        ledger: the jobs.
        settings: of the simulation.
        shared_rates: speeds of two jobs on the same GPUs.
        interior: of all optimal shares the middle ones, as Gavel's interior-point solver returns them;
            else a vertex, as HiGHS does where Gavel is made to use that.
    """

    status = "as Gavel"

    def __init__(
        self,
        ledger: Ledger,
        settings: ArraySettings,
        shared_rates: PairRates,
        *,
        interior: bool = False,
    ) -> None:
        self._ledger, self._settings, self._shared_rates = ledger, settings, shared_rates
        self._interior = interior
        self._fifo = Fifo(
            ledger,
            agnostic=settings.agnostic,
            space_sharing=settings.space_sharing,
            seed=settings.seed,
            shared_rates=shared_rates,
        )
        self._allox = AlloX(ledger)
        self._gandiva = Gandiva(ledger, seed=settings.seed, shared_rates=shared_rates)

    def answers(self, rows: np.ndarray) -> bool:
        """True if there is an own version of the policy that is asked for, for these jobs."""
        policy, settings = self._settings.policy, self._settings
        if policy in ("fifo", "gandiva", "max-min-fairness"):
            return True
        if policy == "allox":
            return bool((self._ledger.gpus[rows] == 1).all())
        return self._interior and policy in INTERIOR and not settings.space_sharing

    def solve(self, rows: np.ndarray, posed: Callable[[], Problem]) -> tuple[Entries, float]:
        """The entries for ``rows``, and the wall seconds they took."""
        started = time.perf_counter()
        entries = self._entries(rows, posed)
        return entries, time.perf_counter() - started

    def _entries(self, rows: np.ndarray, posed: Callable[[], Problem]) -> Entries:
        settings, ledger = self._settings, self._ledger
        if settings.policy == "allox":
            return self._allox.solve(rows)
        if settings.policy == "fifo":
            return self._fifo.solve(rows)
        if settings.policy == "gandiva":
            return self._gandiva.solve(rows)
        if settings.policy == "max-min-fairness" and settings.space_sharing:
            return fairness.paired(ledger, rows, self._shared_rates, interior=self._interior)
        if settings.policy == "max-min-fairness":
            shares = fairness.least_attained_service(
                ledger, rows, agnostic=settings.agnostic, interior=self._interior
            )
        elif settings.policy == "makespan":
            shares = fairness.makespan(ledger, rows, least=allocate("makespan", posed()).objective)
        else:
            shares = fairness.finish_time(ledger, rows, posed(), agnostic=settings.agnostic)
        return rows, np.full(len(rows), -1), shares


GAVEL_RULES = Rules(
    name="gavel",
    least_seconds_between_solves=1920.0,
    by_type=True,
    shuffle_types=True,
    deficits=True,
    whole_steps=True,
    end_with_last_job=True,
    keeps_accounts=False,
    newcomers_block=True,
    own_policies=GavelPolicies,
)
"""The rules of Gavel's simulator, for comparison with its published figures."""

PUBLISHED_RULES = dataclasses.replace(
    GAVEL_RULES, name="published", own_policies=functools.partial(GavelPolicies, interior=True)
)
"""Gavel's simulator with the solver of its published curves."""
