"""A running elastic job of the simulator: its GPUs, what is left of it, and what is under way."""

import dataclasses
import math
from collections.abc import Mapping

from ballast_policies.allocation.problem import Job
from ballast_policies.elastic.job import ElasticJob
from ballast_policies.rounds import Placement
from ballast_policies.rounds.sizes import ElasticGang
from ballast_policies.simulator.elastic.engine import SimulationError

LEAST_STEP = 1e-6
"""Seconds; nearer events are one."""


@dataclasses.dataclass(slots=True, kw_only=True)
class ElasticRunning:
    """A job that has arrived and not ended.

    Attributes:
        at: whose GPUs it holds.
        trains_on: GPUs that it trains on: fewer than it holds while new pods start.
        joins: seconds until it trains on all of them.
        waits: seconds until it trains, or trains again.
        ending: seconds that it holds its GPUs after its last step.
        settled: when it may grow again.
    """

    job: ElasticJob
    sizes: Mapping[str, Mapping[int, float]]
    remaining: float
    ending: float
    pause: float
    at: Placement | None = None
    since: float = 0.0
    waits: float = 0.0
    joins: float = 0.0
    trains_on: int = 0
    settled: float = 0.0
    starts: int = 0
    gpu_seconds: float = 0.0

    @property
    def least(self) -> int:
        """Its smallest number of GPUs."""
        return min(min(by_size) for by_size in self.sizes.values())

    @property
    def speed(self) -> float:
        """On the GPUs that it trains on."""
        return 0.0 if self.at is None else self.sizes[self.at.gpu_type][self.trains_on]

    def changes_in(self, now: float) -> float:
        """Seconds until it trains, trains on more GPUs, or may grow again; infinite: nothing is under way."""
        if self.at is None:
            return math.inf
        return self.waits or self.joins or (self.settled - now if self.settled > now else math.inf)

    def seconds_left(self) -> float:
        """Until its GPUs are free, if nothing changes before."""
        if self.at is None or self.waits > 0:
            return math.inf
        return max(0.0, self.remaining) / self.speed + self.ending

    def advance(self, seconds: float) -> None:
        """Let time pass, at most until the next change."""
        if self.at is None:
            return
        self.gpu_seconds += seconds * len(self.at.nodes)
        if self.waits > 0:
            self.waits = _left(self.waits - seconds)
            return
        trained = min(seconds, max(0.0, self.remaining) / self.speed)
        self.remaining -= trained * self.speed
        self.ending -= seconds - trained
        if self.joins > 0:
            self.joins = _left(self.joins - seconds)
            if self.joins == 0.0:
                self.trains_on, self.waits = len(self.at.nodes), self.pause

    def as_job(self, now: float) -> Job:
        """As policies see it: its speed at the least size, on the types that have it."""
        return Job(
            name=self.job.name,
            gpus=self.least,
            throughput={kind: by_size.get(self.least, 0.0) for kind, by_size in self.sizes.items()},
            steps_remaining=max(self.remaining, 1e-9),
            elapsed=now - self.job.arrival,
        )

    def as_gang(self, now: float) -> ElasticGang | None:
        """Its sizes; None: it has one."""
        sizes = {kind: by_size for kind, by_size in self.sizes.items() if self.least in by_size}
        if all(len(by_size) == 1 for by_size in sizes.values()):
            return None
        trains = self.waits == self.joins == 0 and self.remaining > 0
        return ElasticGang(
            speeds=sizes,
            may_shrink=trains,
            may_grow=trains and now >= self.settled - LEAST_STEP,
            may_move=trains,
            pause_seconds=self.pause,
            restart_seconds=self.job.restart_seconds,
        )


def sizes_within(job: ElasticJob, gpus: Mapping[str, int]) -> dict[str, dict[int, float]]:
    """GPU type -> number -> speed, of the configurations that the cluster can hold.

    Raises:
        SimulationError: there is none, or one has several GPU types.
    """
    sizes: dict[str, dict[int, float]] = {}
    for each in job.configurations:
        if len(each.gpus) > 1:
            raise SimulationError(
                f"{job.name}: configuration {each.name} has several GPU types, and the operator's gangs "
                "have one. To fix: leave out --rules"
            )
        (kind,) = each.gpus
        if each.fits(gpus):
            sizes.setdefault(kind, {})[each.total] = each.throughput
    if not sizes:
        raise SimulationError(f"{job.name}: none of its configurations fits the cluster")
    return {kind: dict(sorted(by_size.items())) for kind, by_size in sizes.items()}


def _left(seconds: float) -> float:
    return seconds if seconds > LEAST_STEP else 0.0
