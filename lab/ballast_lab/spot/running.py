"""A job of a replay that has arrived and is not done, and what it can rent."""

import dataclasses
import math
from collections.abc import Mapping

import numpy as np
from ballast_policies.simulator.settings import SettingsError

from ballast_lab.spot.machines import Machines
from ballast_lab.spot.rental import Rental
from ballast_lab.spot.result import JobOutcome
from ballast_lab.spot.settings import SpotJob, SpotSettings


@dataclasses.dataclass(slots=True, eq=False)
class Running:
    """One job.

    Attributes:
        offers: (k,) indices of the offers on which it can run.
        machines: (k,) how many its gang needs of each.
        speed: (k,) steps/s there.
        steps: left to do.
        rental: on its machines; None: it has none.
        idle_since: when it lost its last ones.
        region: cloud and region where its last checkpoint is.
        hazards, useful: (k,) rates of preemption and useful parts of the time, as of ``seen``.
    """

    job: SpotJob
    offers: np.ndarray
    machines: np.ndarray
    speed: np.ndarray
    outcome: JobOutcome
    steps: float
    rental: Rental | None = None
    idle_since: float = 0.0
    region: tuple[str, str] | None = None
    hazards: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    useful: np.ndarray = dataclasses.field(default_factory=lambda: np.empty(0))
    seen: int = -1

    def within(self, quota: Mapping[str, int], used: Mapping[str, int], machines: Machines) -> np.ndarray:
        """(k,) whether its gang there stays within the most GPUs of a type, beside those that others hold."""
        own = {} if self.rental is None else {self.rental.gpu_type: self.rental.gpus}
        found = []
        for k, count in zip(self.offers.tolist(), self.machines.tolist(), strict=True):
            kind = machines.offers[k].gpu_type
            held = used.get(kind, 0) - own.get(kind, 0) + count * machines.offers[k].gpus
            found.append(held <= quota.get(kind, math.inf))
        return np.array(found)

    def move_usd(self, machines: Machines, settings: SpotSettings) -> np.ndarray:
        """(k,) USD to carry the checkpoint there."""
        gb, (between_regions, between_clouds) = settings.checkpoint_gb, settings.usd_per_gb
        if self.region is None or not gb:
            return np.zeros(len(self.offers))
        cloud, region = self.region
        found = []
        for k in self.offers.tolist():
            offer = machines.offers[k]
            rate = between_regions if offer.region != region else 0.0
            found.append(gb * (between_clouds if offer.cloud != cloud else rate))
        return np.array(found)


def arrived(job: SpotJob, machines: Machines, start: float) -> Running:
    """The job when it arrives; machines with more GPUs than its gang only where there are no others.

    Raises:
        SettingsError: it can run on none.
    """
    offers = [
        k
        for k, offer in enumerate(machines.offers)
        if offer.gpu_type in job.speeds and offer.gpus <= job.gpus
    ]
    if not offers:
        offers = [k for k, offer in enumerate(machines.offers) if offer.gpu_type in job.speeds]
    if not offers:
        raise SettingsError(
            f"jobs: {job.name} runs on {', '.join(sorted(job.speeds))}, and the prices are of "
            f"{', '.join(sorted({offer.gpu_type for offer in machines.offers}))}"
        )
    chosen = [machines.offers[k] for k in offers]
    return Running(
        job=job,
        offers=np.array(offers),
        machines=np.array([math.ceil(job.gpus / offer.gpus) for offer in chosen]),
        speed=np.array([job.speeds[offer.gpu_type] for offer in chosen]),
        outcome=JobOutcome(job=job, arrival=start + job.arrival),
        steps=job.steps,
        idle_since=start + job.arrival,
    )


def urgency(each: Running) -> tuple[float, float]:
    """Earliest deadline first, then by arrival."""
    deadline = each.job.deadline_seconds
    return (math.inf if deadline is None else each.job.arrival + deadline, each.job.arrival)
