"""Settings of a simulation: the cluster, the policy, and the rules by which rounds are made."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np

from ballast_policies.allocation.problem import Problem

if TYPE_CHECKING:
    from ballast_policies.simulator.ledger import Ledger

LIST_PRICES = {"v100": 2.48, "p100": 1.46, "k80": 0.45}
"""USD per GPU hour on demand at Google Cloud, us-central1, in 2020: the default prices."""


class SettingsError(ValueError):
    """A setting is impossible; the text begins with its name."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedCluster:
    """GPUs and prices.

    Attributes:
        gpus: GPU type -> how many.
        prices: GPU type -> USD per GPU hour; missing: 0.
        gpus_per_node: GPU type -> GPUs of a node. Empty: placement has no influence on speed, as in Gavel's
            simulator; a type that is missing beside others: one node has them all.
    """

    gpus: Mapping[str, int]
    prices: Mapping[str, float] = dataclasses.field(default_factory=lambda: dict(LIST_PRICES))
    gpus_per_node: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for gpu_type, count in self.gpus.items():
            if count < 0:
                raise SettingsError(f"gpus: {gpu_type}={count} must be at least 0")
        if not sum(self.gpus.values()):
            raise SettingsError("gpus: there is none. To fix: name GPU types and numbers, as v100=36,p100=36")
        for gpu_type, price in self.prices.items():
            if not (price >= 0 and math.isfinite(price)):
                raise SettingsError(f"prices: {gpu_type}={price} must be at least 0")
        for gpu_type, count in self.gpus_per_node.items():
            if gpu_type not in self.gpus:
                raise SettingsError(f"gpus_per_node: {gpu_type} is not one of the cluster's GPU types")
            if count < 1:
                raise SettingsError(f"gpus_per_node: {gpu_type}={count} must be at least 1")


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
        """Whether they have the policy that is asked for, for these jobs."""

    def solve(self, rows: np.ndarray, posed: Callable[[], Problem]) -> tuple[Entries, float]:
        """The entries for ``rows``, and the wall seconds they took."""


MakeOwnPolicies = Callable[["Ledger", "SimulationSettings", PairRates], OwnPolicies]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How rounds are made from allocations.

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
"""The rules of the operator: every change leads to a new allocation; rounds as ``decide_round`` decides."""

WHOLE_ROUND_RULES = dataclasses.replace(BALLAST_RULES, name="whole-rounds", end_with_last_job=True)
"""The operator's priorities and accounts, decided once a round: for years of thousands of GPUs."""

RULES = {rules.name: rules for rules in (BALLAST_RULES, WHOLE_ROUND_RULES)}
"""Ballast's own; those of other simulators come from the distribution ballast-lab."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationSettings:
    """One simulation.

    Attributes:
        policy: name of the policy, as in ``ClusterPolicy.spec.objective``.
        agnostic: the heterogeneity-agnostic baseline: all GPU types count as equally fast.
        space_sharing: the policy may put two jobs on the same GPUs.
        ideal: every job gets exactly its shares at every instant (a fluid model); no rounds.
        round_seconds: length of a round.
        rules: how allocations become rounds.
        seed: of the simulation's own random choices (the order of types where rules shuffle them).
        measure: first and one past the last job (in order of arrival) of the averages; the
            simulation ends when these are done. None: all jobs.
        record_timeline: keep which job ran where and when, for plots.
        launch_seconds: from a gang's grant to its first step; its GPUs are held and idle.
        stop_seconds: added to it where another gang has to save and leave first.
        notice_seconds: how long a gang that a round stops trains until it has read that it is to stop.
        min_run_seconds, max_moves_per_hour: hysteresis, as in ``ClusterPolicy.spec.moves``; 0 and None: none.
    """

    policy: str
    agnostic: bool = False
    space_sharing: bool = False
    ideal: bool = False
    round_seconds: float = 360.0
    rules: Rules = BALLAST_RULES
    seed: int = 0
    measure: tuple[int, int] | None = None
    record_timeline: bool = False
    record_jobs: bool = True
    launch_seconds: float = 0.0
    stop_seconds: float = 0.0
    notice_seconds: float = 0.0
    min_run_seconds: float = 0.0
    max_moves_per_hour: int | None = None

    @property
    def uses_hysteresis(self) -> bool:
        """Whether hysteresis may protect running gangs from more urgent ones."""
        return self.min_run_seconds > 0 or self.max_moves_per_hour is not None

    def __post_init__(self) -> None:
        if not (self.round_seconds > 0 and math.isfinite(self.round_seconds)):
            raise SettingsError(f"round_seconds: {self.round_seconds} s must be positive")
        if self.measure is not None and not 0 <= self.measure[0] < self.measure[1]:
            raise SettingsError(
                f"measure: {self.measure[0]}:{self.measure[1]} holds no job. To fix: first:end, as 4000:5000"
            )
        for field, seconds in (
            ("launch_seconds", self.launch_seconds),
            ("stop_seconds", self.stop_seconds),
            ("notice_seconds", self.notice_seconds),
            ("min_run_seconds", self.min_run_seconds),
        ):
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise SettingsError(f"{field}: {seconds} s must be at least 0")
            if seconds and (self.ideal or self.rules.end_with_last_job):
                raise SettingsError(
                    f"{field}: {seconds:g} s: Gavel's rules and ideal shares have no launch delays. "
                    "To fix: choose the rules ballast, and no ideal shares"
                )
        if self.max_moves_per_hour is not None:
            if self.max_moves_per_hour < 0:
                raise SettingsError(f"max_moves_per_hour: {self.max_moves_per_hour} must be at least 0")
            if self.ideal or self.rules.end_with_last_job:
                raise SettingsError(
                    f"max_moves_per_hour: {self.max_moves_per_hour}: Gavel's rules and ideal shares do not "
                    "limit moves. To fix: choose the rules ballast, and no ideal shares"
                )
        if self.uses_hysteresis and self.space_sharing:
            raise SettingsError(
                "space_sharing: min_run_seconds and max_moves_per_hour belong to the operator's rounds, "
                "which place no pairs of jobs. To fix: leave space sharing out"
            )
