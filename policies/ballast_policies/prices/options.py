"""What can be rented at a moment, and what its steps cost."""

import dataclasses

import numpy as np

from ballast_policies.prices.hazard import RestartCosts, checkpoint_interval


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """What a job could rent now; (k,) arrays.

    Attributes:
        speed: steps/s of the gang; 0 where it cannot run.
        usd_per_hour: of all machines of the gang; NaN where they cannot be had now.
        hazard_per_hour: rate at which the gang loses a machine; 0 on demand.
        spot: whether it may be taken away.
        there_seconds: for how long it could be had without a break, of one that was seen to go before;
            infinite of one that was not. None: not known of any.
        listed_usd_per_hour: prices also of those that cannot be had now; None: not known of these.
    """

    speed: np.ndarray
    usd_per_hour: np.ndarray
    hazard_per_hour: np.ndarray
    spot: np.ndarray
    there_seconds: np.ndarray | None = None
    listed_usd_per_hour: np.ndarray | None = None


def useful_parts(options: Options, restart: RestartCosts) -> np.ndarray:
    """(k,) part of the rented time in which steps are done."""
    return np.array(
        [
            restart.useful_part(rate, checkpoint_interval(rate, restart))
            for rate in options.hazard_per_hour.tolist()
        ]
    )


def usd_per_step(options: Options, useful: np.ndarray) -> np.ndarray:
    """(k,) expected USD per step; infinite where the gang cannot run, or nothing can be had."""
    rate = options.speed * useful * 3600.0
    found: np.ndarray = np.where(
        (rate > 0) & ~np.isnan(options.usd_per_hour),
        options.usd_per_hour / np.where(rate > 0, rate, 1.0),
        np.inf,
    )
    return found


def on_hull(rate: np.ndarray, cost: np.ndarray) -> np.ndarray:
    """(k,) whether no mix of renting other options, or nothing, is as fast and costs less.

    The lower convex hull of USD/s over steps/s from (0, 0): the columns that an optimal share of time uses
    (the linear program of section 6.4 for one job).

    Args:
        rate: (k,) steps/s; 0 where nothing can be had.
        cost: (k,) USD a step; infinite where nothing can be had.
    """
    keeps = np.zeros(len(rate), dtype=bool)
    usd = np.where(np.isfinite(cost), cost, 0.0) * rate
    at, spent = 0.0, 0.0
    while (ahead := np.isfinite(cost) & (rate > at)).any():
        slope = np.where(ahead, (usd - spent) / np.where(ahead, rate - at, 1.0), np.inf)
        least = slope.min()
        lowest = ahead & (slope <= least + 1e-12 * abs(least))
        keeps |= lowest
        furthest = int(np.argmax(np.where(lowest, rate, 0.0)))
        at, spent = float(rate[furthest]), float(usd[furthest])
    return keeps
