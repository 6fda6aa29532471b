"""Everything that a replay knows: spot prices over time, on-demand prices, and availability by pool."""

import dataclasses
import math
import random
import re
from collections.abc import Mapping, Sequence

from ballast_policies.prices.hazard import Hazard
from ballast_policies.prices.offers import Catalogue, InstanceType

from ballast_lab.prices.availability import AvailabilityLog, Span, pooled
from ballast_lab.prices.history import PriceSeries
from ballast_lab.prices.offers import Offer, Pool

_COUNTED = re.compile(r"(?P<type>.+) x (?P<gpus>\d{1,4})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Market:
    """Machines to rent, with their times and prices.

    Attributes:
        spot: offer -> its price over time.
        on_demand: offer -> USD per instance and hour.
        availability: of the pools that were watched.
        outliers: prices that were left out because they cannot be true, a sentence each.
        ignored: what was not read or cannot be used, and why.
    """

    spot: Mapping[Offer, PriceSeries]
    on_demand: Mapping[Offer, float]
    availability: Mapping[Pool, AvailabilityLog]
    outliers: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()

    @property
    def start(self) -> float:
        """The first moment with a price that changes, in seconds since 1970.

        Raises:
            ValueError: there is no spot price.
        """
        known = (series.times[series.times > 0] for series in self.spot.values())
        return min(float(times[0]) for times in known if len(times))

    @property
    def end(self) -> float:
        """The last change of a price."""
        return max(float(series.times[-1]) for series in self.spot.values())

    def hazard_of_class(self, cloud: str, gpu_type: str) -> Hazard:
        """Hazard of all logs of that cloud's GPU type; of the cloud, or of all, where there is none."""
        for logs in (
            [
                log
                for pool, log in self.availability.items()
                if (pool.cloud, pool.gpu_type) == (cloud, gpu_type)
            ],
            [log for pool, log in self.availability.items() if pool.cloud == cloud],
            list(self.availability.values()),
        ):
            if logs:
                preemptions, seconds = pooled(logs)
                return Hazard(preemptions=preemptions, hours=seconds / 3600.0)
        return Hazard()

    def spans(self, pool: Pool, start: float, end: float, *, seed: int) -> Sequence[Span]:
        """Spans between two moments in which the pool's machines can be had.

        A pool that was watched: its log, repeated where it is shorter. Another: drawn with ``seed`` at
        its class's hazard rate, and away for as long as the class was on average; always there where no pool
        was watched at all.
        """
        log = self.availability.get(pool)
        if log is not None:
            return log.replayed(start, end)
        if not self.availability:
            return [Span(start=start, end=end, preempted=False)]
        return _drawn(self, pool, start, end, random.Random(f"{seed}/{pool}"))


def _drawn(market: Market, pool: Pool, start: float, end: float, draws: random.Random) -> list[Span]:
    rate = market.hazard_of_class(pool.cloud, pool.gpu_type).per_hour / 3600.0
    away = mean_seconds_away(
        [
            log
            for other, log in market.availability.items()
            if (other.cloud, other.gpu_type) == (pool.cloud, pool.gpu_type)
        ]
    )
    found, now = [], start
    while now < end:
        lost = now + draws.expovariate(rate)
        found.append(Span(start=now, end=min(lost, end), preempted=lost < end))
        now = lost + away
    return found


def mean_seconds_away(logs: Sequence[AvailabilityLog]) -> float:
    """Mean time from a preemption to the next machine; 600 s where none was seen."""
    gaps = [
        later.start - span.end
        for log in logs
        for span, later in zip(log.spans, log.spans[1:], strict=False)
        if span.preempted
    ]
    return math.fsum(gaps) / len(gaps) if gaps else 600.0


def instance_of(catalogue: Catalogue, cloud: str, instance: str) -> InstanceType | None:
    """The catalogue's entry; of Google Cloud's ``TYPE x N``, N GPUs of the entry TYPE."""
    known = catalogue.get((cloud, instance))
    counted = _COUNTED.fullmatch(instance)
    if known is not None or counted is None:
        return known
    one = catalogue.get((cloud, counted["type"]))
    if one is None:
        return None
    gpus = one.gpus * int(counted["gpus"])
    price = None if one.on_demand_usd is None else one.on_demand_usd * int(counted["gpus"])
    return dataclasses.replace(one, instance=instance, gpus=gpus, on_demand_usd=price)
