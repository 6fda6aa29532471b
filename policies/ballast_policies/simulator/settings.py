"""What is simulated: the cluster, the policy, and the rules of the mechanism."""

import dataclasses
import math
from collections.abc import Mapping

LIST_PRICES = {"v100": 2.48, "p100": 1.46, "k80": 0.45}
"""USD per GPU hour on demand at Google Cloud, us-central1, in 2020: the default prices."""


class SettingsError(ValueError):
    """A setting is impossible; the text names it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
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
                raise SettingsError(f"--cluster: {gpu_type}={count} must be at least 0")
        if not sum(self.gpus.values()):
            raise SettingsError("--cluster: there is no GPU in it. To fix: --cluster v100=36,p100=36,k80=36")
        for gpu_type, price in self.prices.items():
            if not (price >= 0 and math.isfinite(price)):
                raise SettingsError(f"--prices: {gpu_type}={price} must be at least 0")
        for gpu_type, count in self.gpus_per_node.items():
            if gpu_type not in self.gpus:
                raise SettingsError(f"--gpus-per-node: {gpu_type} is not in --cluster")
            if count < 1:
                raise SettingsError(f"--gpus-per-node: {gpu_type}={count} must be at least 1")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """How allocations become rounds.

    Attributes:
        name: for reports.
        least_seconds_between_solves: an arrival or completion leads to a new allocation no sooner than
            so long after the last one.
        by_type: serve one GPU type after the other, each by priority; else all claims by priority.
        shuffle_types: with ``by_type``: in a new random order each round, where the policy is blind to types.
        deficits: ties go to the job whose shares were realised worst before the last allocation.
        whole_steps: a job does floor(steps/s x round) steps in a round; a job slower than one step a round
            does the fraction, so that it ends.
        end_with_last_job: the next round begins when the last job of this one is done, if that is sooner.
        account_goes_on: what was promised and received is kept, and slowly forgotten, when shares
            change; else every allocation begins a new account.
        gavels_policies: AlloX, FIFO, Gandiva and max-min fairness as in Gavel; else as the operator has them.
        interior: with ``gavels_policies``: of all optimal shares the middle ones, as Gavel's interior-point
            solver returns them; else a vertex, as HiGHS does where Gavel is made to use that.
        newcomers_block: a job that has no share yet may be chosen for idle GPUs, and they idle.
    """

    name: str
    least_seconds_between_solves: float
    by_type: bool
    shuffle_types: bool
    deficits: bool
    whole_steps: bool
    end_with_last_job: bool
    account_goes_on: bool
    gavels_policies: bool
    interior: bool
    newcomers_block: bool


GAVEL_RULES = Rules(
    name="gavel",
    least_seconds_between_solves=1920.0,
    by_type=True,
    shuffle_types=True,
    deficits=True,
    whole_steps=True,
    end_with_last_job=True,
    account_goes_on=False,
    gavels_policies=True,
    interior=False,
    newcomers_block=True,
)
"""What Gavel's simulator does, to be compared with its published figures."""

PUBLISHED_RULES = dataclasses.replace(GAVEL_RULES, name="published", interior=True)
"""Gavel's simulator with the solver of its published curves."""

BALLAST_RULES = Rules(
    name="ballast",
    least_seconds_between_solves=0.0,
    by_type=False,
    shuffle_types=False,
    deficits=False,
    whole_steps=False,
    end_with_last_job=False,
    account_goes_on=True,
    gavels_policies=False,
    interior=False,
    newcomers_block=False,
)
"""What the operator does: every change leads to a new allocation; rounds are as ``decide_round`` decides."""

WHOLE_ROUND_RULES = dataclasses.replace(BALLAST_RULES, name="whole-rounds", end_with_last_job=True)
"""The operator's priorities and accounts, decided once a round: for years of thousands of GPUs."""

RULES = {rules.name: rules for rules in (GAVEL_RULES, PUBLISHED_RULES, BALLAST_RULES, WHOLE_ROUND_RULES)}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One simulation.

    Attributes:
        policy: name of the policy, as in ``ClusterPolicy.spec.objective``.
        agnostic: the policy takes all GPU types for equally fast.
        space_sharing: the policy may put two jobs on the same GPUs.
        ideal: every job gets exactly its shares at every moment; no rounds.
        round_seconds: length of a round.
        rules: how allocations become rounds.
        seed: of the simulation's own random choices (the order of types where rules shuffle them).
        measure: first and one past the last job (in order of arrival) of the averages; the
            simulation ends when these are done. None: all jobs.
        record_timeline: keep who ran where when, for plots.
        launch_seconds: from a gang's grant to its first step; its GPUs are held and do nothing.
        notice_seconds: for so long a gang that a round stops trains on: until it has read that it is to stop.
        min_run_seconds, max_moves_per_hour: hysteresis, as in ``ClusterPolicy.spec.moves``; 0 and None: none.
        stop_seconds: how much later that is where the gang before it has to save and leave.
    """

    policy: str
    agnostic: bool = False
    space_sharing: bool = False
    ideal: bool = False
    round_seconds: float = 360.0
    rules: Rules = GAVEL_RULES
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
    def restful(self) -> bool:
        """Whether running gangs may be left alone although others are more urgent."""
        return self.min_run_seconds > 0 or self.max_moves_per_hour is not None

    def __post_init__(self) -> None:
        if not (self.round_seconds > 0 and math.isfinite(self.round_seconds)):
            raise SettingsError(f"--round: {self.round_seconds} s must be positive")
        if self.measure is not None and not 0 <= self.measure[0] < self.measure[1]:
            raise SettingsError(
                f"--measure: {self.measure[0]}:{self.measure[1]} holds no job. To fix: first:end, "
                "as 4000:5000"
            )
        for option, seconds in (
            ("--launch-seconds", self.launch_seconds),
            ("--stop-seconds", self.stop_seconds),
            ("--notice-seconds", self.notice_seconds),
            ("--min-run-seconds", self.min_run_seconds),
        ):
            if not (seconds >= 0 and math.isfinite(seconds)):
                raise SettingsError(f"{option}: {seconds} s must be at least 0")
            if seconds and (self.ideal or self.rules.end_with_last_job):
                raise SettingsError(
                    f"{option}: {seconds:g} s: Gavel's rules and ideal shares know of no starts. "
                    "To fix: --rules ballast, without --ideal"
                )
        if self.max_moves_per_hour is not None:
            if self.max_moves_per_hour < 0:
                raise SettingsError(f"--max-moves-per-hour: {self.max_moves_per_hour} must be at least 0")
            if self.ideal or self.rules.end_with_last_job:
                raise SettingsError(
                    "--max-moves-per-hour: Gavel's rules and ideal shares move as they like. "
                    "To fix: --rules ballast, without --ideal"
                )
        if self.restful and self.space_sharing:
            raise SettingsError(
                "--min-run-seconds, --max-moves-per-hour: the operator's rounds, which know them, have no "
                "pairs. To fix: leave --space-sharing out"
            )
