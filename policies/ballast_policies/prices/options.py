"""Options to rent at a moment and what their steps cost, and the rest of a job on each kind of GPUs."""

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ballast_policies.accounting import cost
from ballast_policies.prices.hazard import RestartCosts, checkpoint_interval


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """Options that a job could rent now; (k,) arrays.

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


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOption:
    """The rest of a job on one kind of GPUs, alone and without interruptions.

    Attributes:
        gpu_type: of its GPUs.
        cost: None: the price is not known.
    """

    pool: str
    gpu_type: str
    gpus: int
    seconds: float
    cost: float | None


def placement_option(
    pool: str,
    gpu_type: str,
    *,
    gpus: int,
    price_per_gpu_hour: float,
    steps: float,
    speed: float,
    usd_per_step: float = 0.0,
) -> PlacementOption | None:
    """The rest of a job of ``steps`` steps at ``speed`` steps/s; None where it does not run.

    ``price_per_gpu_hour`` 0: not known. ``usd_per_step``: what each step costs besides GPUs.
    """
    if not (0 < speed < math.inf and 0 <= steps < math.inf):
        return None
    seconds = steps / speed
    paid = None
    if price_per_gpu_hour > 0:
        paid = cost(gpus * seconds, price_per_gpu_hour) + steps * usd_per_step
    if not math.isfinite(seconds) or (paid is not None and not math.isfinite(paid)):
        return None
    return PlacementOption(pool=pool, gpu_type=gpu_type, gpus=gpus, seconds=seconds, cost=paid)


def cheapest(
    options: Sequence[PlacementOption], *, within_seconds: float = math.inf
) -> PlacementOption | None:
    """The cheapest way that takes at most ``within_seconds``, of equally cheap ones the fastest.

    None where none with a known price does.
    """
    priced = [one for one in options if one.cost is not None and one.seconds <= within_seconds]
    return min(priced, key=lambda one: (one.cost, one.seconds, one.pool, one.gpus), default=None)


def fastest(options: Sequence[PlacementOption]) -> PlacementOption | None:
    """The fastest way, of equally fast ones the cheapest; None where there is none."""

    def order(one: PlacementOption) -> tuple[float, float, str, int]:
        return one.seconds, math.inf if one.cost is None else one.cost, one.pool, one.gpus

    return min(options, key=order, default=None)
