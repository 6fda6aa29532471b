"""Time and cost of the rest of a job on each kind of GPUs: which deadline and budget are feasible."""

import dataclasses
import math
from collections.abc import Sequence

from ballast_policies.accounting import cost


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
