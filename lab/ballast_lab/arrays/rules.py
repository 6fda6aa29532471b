"""Rules that make rounds of shares on arrays, and the settings of such a simulation."""

import dataclasses
from collections.abc import Callable
from typing import Protocol

import numpy as np
from ballast_policies.allocation.problem import Problem
from ballast_policies.simulator.ledger import Ledger
from ballast_policies.simulator.settings import SettingsError, SimulationSettings

Entries = tuple[np.ndarray, np.ndarray, np.ndarray]
"""Job rows, partner rows (-1: alone), (entries, k) shares."""

PairRates = Callable[[int, int, int], tuple[float, float]]
"""(row, other row, column of a GPU type) -> steps/s of both on the same GPUs."""


class OwnPolicies(Protocol):
    """The policies of rules that answer some themselves, with what they remember of one simulation.

    Attributes:
        status: of their answers, as a solver's.
    """

    status: str

    def answers(self, rows: np.ndarray) -> bool:
        """True if they have the policy that is asked for, for these jobs."""

    def solve(self, rows: np.ndarray, posed: Callable[[], Problem]) -> tuple[Entries, float]:
        """The entries for ``rows``, and the wall seconds they took."""


MakeOwnPolicies = Callable[[Ledger, "ArraySettings", PairRates], OwnPolicies]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """Rules by which allocations become rounds.

    Attributes:
        name: for reports.
        least_seconds_between_solves: least time between an allocation and the next one that an arrival
            or a completion asks for.
        by_type: serve one GPU type after the other, each by priority; else all claims by priority.
        shuffle_types: with ``by_type``: in a new random order each round, where the policy is
            heterogeneity-agnostic.
        deficits: ties go to the job whose shares were realised worst before the last allocation.
        whole_steps: a job does floor(steps/s x round) steps in a round; a job slower than one step a round
            does the fraction, so that it ends.
        end_with_last_job: the next round begins when the last job of this one is done, if that is sooner.
        keeps_accounts: time promised and received is kept, and slowly forgotten, when shares
            change; else every allocation begins a new account.
        newcomers_block: a job that has no share yet may be granted idle GPUs, which then stay idle.
        own_policies: makes the policies that the rules answer themselves; None: all are the operator's.
    """

    name: str
    least_seconds_between_solves: float
    by_type: bool
    shuffle_types: bool
    deficits: bool
    whole_steps: bool
    end_with_last_job: bool
    keeps_accounts: bool
    newcomers_block: bool
    own_policies: MakeOwnPolicies | None = None


BALLAST_RULES = Rules(
    name="ballast",
    least_seconds_between_solves=0.0,
    by_type=False,
    shuffle_types=False,
    deficits=False,
    whole_steps=False,
    end_with_last_job=False,
    keeps_accounts=True,
    newcomers_block=False,
)
"""The operator's priorities, for what its rounds do not do: pairs of jobs on the same GPUs, ideal shares."""

WHOLE_ROUND_RULES = dataclasses.replace(BALLAST_RULES, name="whole-rounds", end_with_last_job=True)
"""The operator's priorities and accounts, decided once a round: for years of thousands of GPUs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ArraySettings(SimulationSettings):
    """One simulation on arrays.

    Attributes:
        space_sharing: the policy may put two jobs on the same GPUs.
        ideal: every job gets exactly its shares at every instant (a fluid model); no rounds.
        rules: how allocations become rounds.
        seed: of the simulation's own random choices (the order of types where rules shuffle them).
    """

    space_sharing: bool = False
    ideal: bool = False
    rules: Rules = BALLAST_RULES
    seed: int = 0

    def __post_init__(self) -> None:
        SimulationSettings.__post_init__(self)
        without_costs = self.ideal or self.rules.end_with_last_job
        for field in ("launch_seconds", "stop_seconds", "notice_seconds", "min_run_seconds"):
            if without_costs and getattr(self, field):
                raise SettingsError(
                    f"{field}: {getattr(self, field):g} s: Gavel's rules and ideal shares have no launch "
                    "delays. To fix: choose the rules ballast, and no ideal shares"
                )
        if without_costs and self.max_moves_per_hour is not None:
            raise SettingsError(
                f"max_moves_per_hour: {self.max_moves_per_hour}: Gavel's rules and ideal shares do not "
                "limit moves. To fix: choose the rules ballast, and no ideal shares"
            )
        if self.min_run_seconds > 0 or self.max_moves_per_hour is not None:
            raise SettingsError(
                "space_sharing: min_run_seconds and max_moves_per_hour belong to the operator's rounds, "
                "which place no pairs of jobs. To fix: leave space sharing out"
            )
