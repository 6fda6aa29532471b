"""The result of a replay."""

import dataclasses
import math
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from ballast_policies.prices.hazard import Hazard

from ballast_lab.prices.offers import Offer
from ballast_lab.spot.bounds import OnDemand
from ballast_lab.spot.rental import Rental, RentalEnd
from ballast_lab.spot.settings import SpotJob, SpotSettings


@dataclasses.dataclass(slots=True, kw_only=True, eq=False)
class JobOutcome:
    """One job, summed up while it runs; times in seconds since 1970.

    Attributes:
        usd: all that was paid, ``egress_usd`` for carried checkpoints included.
        moves: machines left by choice.
        stays: (offer, reason, from, to, USD, why it ended), in order.
    """

    job: SpotJob
    arrival: float
    finish: float = math.nan
    usd: float = 0.0
    egress_usd: float = 0.0
    startup_usd: float = 0.0
    lost_steps: float = 0.0
    preemptions: int = 0
    moves: int = 0
    gpu_seconds: float = 0.0
    stays: list[tuple[Offer, str, float, float, float, str]] = dataclasses.field(default_factory=list)
    on_demand: OnDemand = dataclasses.field(default_factory=lambda: OnDemand(math.nan, False))
    oracle_usd: float = math.nan

    def book(self, offer: Offer, rental: Rental, ended: RentalEnd, usd: float) -> None:
        """One stay that has ended and cost ``usd``."""
        length = ended.at - rental.granted
        self.usd += usd
        if length > 0:
            self.startup_usd += usd * min(1.0, (rental.trains_from - rental.granted) / length)
        self.lost_steps += ended.lost_steps
        self.preemptions += ended.cause == "preempted"
        self.gpu_seconds += rental.gpus * length
        self.stays.append((offer, rental.reason, rental.granted, ended.at, usd, ended.cause or ""))

    @property
    def in_time(self) -> bool | None:
        """True if the deadline was kept; None: there is none."""
        if self.job.deadline_seconds is None:
            return None
        return self.finish <= self.arrival + self.job.deadline_seconds

    def to_json(self) -> dict[str, Any]:
        """A row."""
        return {
            "job": self.job.name,
            "arrival": utc(self.arrival),
            "finish": utc(self.finish),
            "gpus": self.job.gpus,
            "steps": self.job.steps,
            "deadline_hours": None
            if self.job.deadline_seconds is None
            else self.job.deadline_seconds / 3600.0,
            "deadline_feasible": None if self.job.deadline_seconds is None else self.on_demand.feasible,
            "deadline_met": self.in_time,
            "cost_usd": self.usd,
            "on_demand_usd": _number(self.on_demand.usd),
            "oracle_usd": _number(self.oracle_usd),
            "preemptions": self.preemptions,
            "moves": self.moves,
            "steps_done_twice": self.lost_steps,
            "stays": [
                {
                    "offer": str(offer),
                    "reason": reason,
                    "from": utc(since),
                    "to": utc(until),
                    "usd": usd,
                    "ended": ended,
                }
                for offer, reason, since, until, usd, ended in self.stays
            ],
        }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpotResult:
    """A replay's jobs in order of arrival, and the preemption rates that it saw."""

    settings: SpotSettings
    start: float
    outcomes: tuple[JobOutcome, ...]
    hazards: Mapping[str, Hazard]
    outliers: tuple[str, ...]
    ignored: tuple[str, ...]

    @property
    def usd(self) -> float:
        """All that was paid."""
        return math.fsum(each.usd for each in self.outcomes)

    @property
    def on_demand_usd(self) -> float:
        """The same jobs on demand only."""
        return math.fsum(each.on_demand.usd for each in self.outcomes)

    @property
    def oracle_usd(self) -> float:
        """Lower bound of the same jobs with the future known."""
        return math.fsum(each.oracle_usd for each in self.outcomes)

    @property
    def repeated_part(self) -> float:
        """Steps done twice, as part of all steps."""
        steps = math.fsum(each.job.steps for each in self.outcomes)
        return math.fsum(each.lost_steps for each in self.outcomes) / steps if steps else 0.0

    def deadlines(self) -> dict[str, int]:
        """Numbers of jobs with one, that could keep it on demand, kept it, missed it though feasible."""
        with_one = [each for each in self.outcomes if each.in_time is not None]
        return {
            "jobs": len(with_one),
            "feasible": sum(each.on_demand.feasible for each in with_one),
            "met": sum(bool(each.in_time) for each in with_one),
            "missed_though_feasible": sum(not each.in_time and each.on_demand.feasible for each in with_one),
        }

    def to_json(self, *, per_job: bool) -> dict[str, Any]:
        """All figures; rows of jobs on request."""
        hours = [(each.finish - each.arrival) / 3600.0 for each in self.outcomes]
        spent: dict[str, dict[str, float]] = {}
        for each in self.outcomes:
            for offer, _, since, until, usd, _ in each.stays:
                row = spent.setdefault(str(offer), {"usd": 0.0, "hours": 0.0, "stays": 0})
                row["usd"] += usd
                row["hours"] += (until - since) / 3600.0
                row["stays"] += 1
        found: dict[str, Any] = {
            "policy": self.settings.policy,
            "start": utc(self.start),
            "end": utc(max((each.finish for each in self.outcomes), default=self.start)),
            "jobs_measured": len(self.outcomes),
            "cost_usd": self.usd,
            "on_demand_usd": _number(self.on_demand_usd),
            "oracle_usd": _number(self.oracle_usd),
            "saved_part": _number(1 - self.usd / self.on_demand_usd if self.on_demand_usd else math.nan),
            "over_oracle": _number(self.usd / self.oracle_usd if self.oracle_usd else math.nan),
            "steps": math.fsum(each.job.steps for each in self.outcomes),
            "steps_done_twice": math.fsum(each.lost_steps for each in self.outcomes),
            "steps_done_twice_part": self.repeated_part,
            "preemptions": sum(each.preemptions for each in self.outcomes),
            "moves": sum(each.moves for each in self.outcomes),
            "startup_usd": math.fsum(each.startup_usd for each in self.outcomes),
            "egress_usd": math.fsum(each.egress_usd for each in self.outcomes),
            "gpu_hours": math.fsum(each.gpu_seconds for each in self.outcomes) / 3600.0,
            "average_jct_hours": math.fsum(hours) / len(hours) if hours else 0.0,
            "deadlines": self.deadlines(),
            "by_offer": dict(sorted(spent.items())),
            "preemptions_per_hour": {
                name: {
                    "mean": hazard.per_hour,
                    "low": hazard.quantile_per_hour(0.025),
                    "high": hazard.quantile_per_hour(0.975),
                    "seen": hazard.preemptions,
                    "hours": hazard.hours,
                }
                for name, hazard in self.hazards.items()
            },
            "outliers": list(self.outliers),
            "ignored": list(self.ignored),
        }
        if per_job:
            found["jobs"] = [each.to_json() for each in self.outcomes]
        return found


def utc(seconds: float) -> str:
    """Text of a moment, seconds since 1970."""
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None
