"""Bounds of a job's cost: on demand only, and with the future known."""

import dataclasses
import math

import numpy as np
from ballast_policies.prices.hazard import RestartCosts

from ballast_lab.spot.machines import Machines
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
    """A lower bound for the job's cost between two moments, all prices and preemptions known.

    In a slot machines count as there, at their least price, if they can be had at any moment of it: what a
    job does between two moments of the grid is then a mixture of paths on it.
    """
    slots = max(1, math.ceil((until - start) / slot_seconds))
    times = start + np.arange(slots) * slot_seconds
    prices = np.stack([machines.lowest(k, times, slot_seconds) for k in offers.tolist()], axis=1) * count
    there = ~np.isnan(prices)
    steps = np.where(there, speed * slot_seconds, 0.0)
    usd = np.where(there, prices * slot_seconds / 3600.0, 0.0)
    return least_usd(
        steps=job.steps,
        steps_per_slot=steps,
        usd_per_slot=usd,
        startup_slots=startup_seconds / slot_seconds,
    )


MULTIPLIERS = 24
"""Values of lambda tried at once, twice: over the whole range, then around the best."""


def least_usd(
    *,
    steps: float,
    steps_per_slot: np.ndarray,
    usd_per_slot: np.ndarray,
    startup_slots: float,
) -> float:
    """The least that a job can cost, in USD, when all prices and preemptions are known, as a lower bound.

    On a grid of reviews, a path chooses for every slot one offer or none; entering an offer takes the
    start-up, which is paid and trains nothing. The cheapest path with ``steps`` steps is bounded from below
    by its dual ``max over lambda of lambda S - max over paths of (lambda steps(path) - USD(path))``, the
    inner maximum by dynamic programming (Viterbi), which is exact. Quotas and other jobs are not looked at.

    Args:
        steps: to do.
        steps_per_slot: (T, K) of each offer in each slot; 0 where no machine can be had.
        usd_per_slot: (T, K).
        startup_slots: length of a start-up, in slots.

    Returns:
        0 where no path has enough steps at any price: there is no such bound then.
    """
    useful = steps_per_slot > 0
    if not useful.any():
        return 0.0
    per_step = usd_per_slot[useful] / steps_per_slot[useful]
    low, high = 0.5 * float(per_step.min()), 4.0 * float(per_step.max())
    bound = 0.0
    for _ in range(3):
        tried = np.geomspace(low, high, MULTIPLIERS)
        values = tried * steps - _best_paths(tried, steps_per_slot, usd_per_slot, startup_slots)
        best = int(np.argmax(values))
        bound = max(bound, float(values[best]))
        low, high = float(tried[max(best - 1, 0)]), float(tried[min(best + 1, MULTIPLIERS - 1)])
    return bound


def _best_paths(
    multipliers: np.ndarray, steps: np.ndarray, usd: np.ndarray, startup_slots: float
) -> np.ndarray:
    """(L,) the most that lambda steps - USD can be over all paths, for each lambda.

    A start-up longer than a slot costs the steps of several slots, all taken at the entry.
    """
    slots, offers = steps.shape
    idle = np.zeros(len(multipliers))
    running = np.full((len(multipliers), offers), -np.inf)
    for t in range(slots):
        worth = multipliers[:, None] * steps[t]
        best = np.maximum(idle, running.max(axis=1))
        entered = best[:, None] - startup_slots * worth
        running = np.maximum(running, entered) + worth - usd[t]
        running[:, steps[t] <= 0] = -np.inf
        idle = best
    best_of_all: np.ndarray = np.maximum(idle, running.max(axis=1))
    return best_of_all
