"""The settings of a replay."""

import dataclasses
import math
from collections.abc import Mapping

from ballast_policies.prices.choice import Preferences
from ballast_policies.prices.hazard import RestartCosts
from ballast_policies.simulator.settings import SettingsError

POLICIES = {
    "min-cost": "where its steps are cheapest, deadlines not read",
    "min-cost-slo": "where its steps are cheapest of what keeps its deadline",
    "max-throughput-per-dollar": "as min-cost: alone, the most steps per dollar are the cheapest steps",
    "on-demand": "the cheapest on-demand machines that keep its deadline",
}
"""Policy -> where each job runs."""

NOTICE_SECONDS: Mapping[str, float] = {"aws": 120.0, "gcp": 30.0, "azure": 30.0}
"""Cloud -> seconds between the notice and the loss of a machine."""

LONGEST_LIFE_SECONDS: Mapping[str, float] = {"gcp": 24 * 3600.0}
"""Cloud -> seconds after which a preemptible machine is taken away in any case (section 6.2)."""

LONGEST_REPLAY_SECONDS = 2 * 366 * 24 * 3600.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpotSettings:
    """One replay.

    Attributes:
        policy: one of :data:`POLICIES`.
        start: when the first job arrives, seconds since 1970; None: the first price.
        launch_seconds: from the request for a machine to the first step; it is paid.
        checkpoint_seconds: to save; also the pause of a move.
        notice_seconds: before a machine is lost; None: as the clouds give it.
        review_seconds: between looks at the prices.
        hysteresis: a move has to save this many times its cost.
        quota: GPU type -> most GPUs rented at a time; types that are missing: no limit.
        checkpoint_gb: carried at a move.
        usd_per_gb: of what leaves a region, and of what leaves a cloud.
        seed: of preemptions in pools that no log watched.
        oracle: whether to compute the least cost with the future known.
    """

    policy: str
    start: float | None = None
    launch_seconds: float = 180.0
    checkpoint_seconds: float = 5.0
    notice_seconds: float | None = None
    review_seconds: float = 600.0
    hysteresis: float = 1.0
    quota: Mapping[str, int] = dataclasses.field(default_factory=dict)
    checkpoint_gb: float = 0.4
    usd_per_gb: tuple[float, float] = (0.02, 0.09)
    seed: int = 0
    oracle: bool = True

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise SettingsError(
                f"policy: {self.policy!r} does not choose among prices that change. "
                f"To fix: one of {', '.join(POLICIES)}"
            )
        for name, value, least, most in (
            ("launch_seconds", self.launch_seconds, 0.0, 86400.0),
            ("checkpoint_seconds", self.checkpoint_seconds, 0.0, 86400.0),
            ("notice_seconds", self.notice_seconds or 0.0, 0.0, 86400.0),
            ("review_seconds", self.review_seconds, 60.0, 86400.0),
            ("hysteresis", self.hysteresis, 0.0, 1e6),
            ("checkpoint_gb", self.checkpoint_gb, 0.0, 1e6),
            ("start", self.start or 0.0, 0.0, 2**33),
        ):
            if not (least <= value <= most and math.isfinite(value)):
                raise SettingsError(f"{name}: {value:g} is not from {least:g} to {most:g}")
        for gpu_type, count in self.quota.items():
            if count < 0:
                raise SettingsError(f"gpus: {gpu_type}={count} must be at least 0")

    @property
    def preferences(self) -> Preferences:
        """Preferences of the choice; the notice is the shortest of the clouds' unless one is stated."""
        notice = min(NOTICE_SECONDS.values()) if self.notice_seconds is None else self.notice_seconds
        return Preferences(
            restart=RestartCosts(
                startup_seconds=self.launch_seconds,
                checkpoint_seconds=self.checkpoint_seconds,
                notice_seconds=notice,
            ),
            review_seconds=self.review_seconds,
            hysteresis=self.hysteresis,
            may_use_spot=self.policy != "on-demand",
        )

    @property
    def reads_deadlines(self) -> bool:
        """True if the policy keeps deadlines."""
        return self.policy in ("min-cost-slo", "on-demand")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpotJob:
    """One job.

    Attributes:
        arrival: seconds since the replay's start.
        gpus: of its gang.
        speeds: GPU type -> steps/s of the gang, above 0.
        deadline_seconds: after its arrival; None: none.
    """

    name: str
    arrival: float
    steps: float
    gpus: int
    speeds: Mapping[str, float]
    deadline_seconds: float | None = None
