"""What a job would have cost on demand only, and what it would have cost with the future known."""

import dataclasses
import math

import numpy as np
from ballast_policies.prices.hazard import RestartCosts

from ballast_lab.spot.machines import Machines
from ballast_lab.spot.oracle import least_usd
from ballast_lab.spot.settings import SpotJob


@dataclasses.dataclass(frozen=True, slots=True)
class OnDemand:
    """A job on one kind of on-demand machine from its arrival to its end.

    Attributes:
        usd: cost of the cheapest that keeps the deadline; of the fastest where none does; NaN: none is known.
        feasible: whether one keeps the deadline; true without one.
    """

    usd: float
    feasible: bool


def on_demand_bound(
    job: SpotJob, speed: np.ndarray, usd_per_hour: np.ndarray, restart: RestartCosts
) -> OnDemand:
    """The on-demand baseline of a job.

    Args:
        job: what is to do.
        speed: (k,) steps/s of the gang on each on-demand offer.
        usd_per_hour: (k,) of the gang there.
        restart: the start-up is paid once; checkpoints are as on spot machines without preemptions.
    """
    known = ~np.isnan(usd_per_hour) & (speed > 0)
    if not known.any():
        return OnDemand(math.nan, False)
    interval = 3600.0
    part = restart.useful_part(0.0, interval)
    seconds = restart.startup_seconds + job.steps / (speed[known] * part)
    usd = usd_per_hour[known] * seconds / 3600.0
    in_time = seconds <= (math.inf if job.deadline_seconds is None else job.deadline_seconds)
    if in_time.any():
        return OnDemand(float(usd[in_time].min()), True)
    return OnDemand(float(usd[np.argmin(seconds)]), False)


def oracle_usd(
    job: SpotJob,
    machines: Machines,
    offers: np.ndarray,
    count: np.ndarray,
    speed: np.ndarray,
    *,
    start: float,
    until: float,
    slot_seconds: float,
    startup_seconds: float,
) -> float:
    """A lower bound for the job's cost between two moments, all prices and preemptions known."""
    slots = max(1, math.ceil((until - start) / slot_seconds))
    times = start + np.arange(slots) * slot_seconds
    prices = np.stack([machines.price(k, times) for k in offers.tolist()], axis=1) * count
    there = ~np.isnan(prices)
    steps = np.where(there, speed * slot_seconds, 0.0)
    usd = np.where(there, prices * slot_seconds / 3600.0, 0.0)
    return least_usd(
        steps=job.steps,
        steps_per_slot=steps,
        usd_per_slot=usd,
        startup_slots=startup_seconds / slot_seconds,
    )
