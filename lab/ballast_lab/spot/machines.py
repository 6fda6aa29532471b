"""Machines to rent during a replay, as arrays over offers: prices and when machines can be had."""

import dataclasses
from collections.abc import Sequence

import numpy as np

from ballast_lab.prices.availability import Span
from ballast_lab.prices.history import PriceSeries
from ballast_lab.prices.market import Market
from ballast_lab.prices.offers import Offer
from ballast_lab.spot.settings import LONGEST_LIFE_SECONDS


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Machines:
    """K offers between two moments, in seconds since 1970.

    Attributes:
        offers: (K).
        series: (K) prices per instance; constant on demand.
        starts, ends: (K) arrays: when machines of the offer can be had, in order.
        taken: (K) arrays: whether each of these spans ends with a preemption.
    """

    offers: tuple[Offer, ...]
    series: tuple[PriceSeries, ...]
    starts: tuple[np.ndarray, ...]
    ends: tuple[np.ndarray, ...]
    taken: tuple[np.ndarray, ...]

    @property
    def spot(self) -> np.ndarray:
        """(K,) whether each may be taken away."""
        return np.array([offer.spot for offer in self.offers], dtype=bool)

    def prices(self, times: np.ndarray) -> np.ndarray:
        """(T, K) USD per instance and hour; NaN where no machine can be had."""
        return np.stack([self.price(k, times) for k in range(len(self.offers))], axis=1)

    def price(self, k: int, times: np.ndarray) -> np.ndarray:
        """(T,) of one offer."""
        if not len(self.starts[k]):
            return np.full(len(times), np.nan)
        index = np.searchsorted(self.starts[k], times, side="right") - 1
        there = (index >= 0) & (times < self.ends[k][np.maximum(index, 0)])
        found: np.ndarray = np.where(there, self.series[k].at(times), np.nan)
        return found

    def lowest(self, k: int, times: np.ndarray, seconds: float) -> np.ndarray:
        """(T,) least price of one offer in the ``seconds`` from each of ``times`` on; NaN: never to be had.

        ``times``: one after the other, ``seconds`` apart.
        """
        changes = np.concatenate([times, self.series[k].times, self.starts[k]])
        moments = np.unique(changes[(changes >= times[0]) & (changes < times[-1] + seconds)])
        found: np.ndarray = np.fmin.reduceat(self.price(k, moments), moments.searchsorted(times))
        return found

    def there_seconds(self, now: float, since: float) -> np.ndarray:
        """(K,) for how long machines could be had without a break from ``since`` on; infinite: no loss."""
        found = np.full(len(self.offers), np.inf)
        for k in np.flatnonzero(self.spot).tolist():
            index = int(self.starts[k].searchsorted(now, side="right")) - 1
            before = int(self.ends[k].searchsorted(since, side="right"))
            if index > before and self.taken[k][before:index].any():
                found[k] = now - self.starts[k][index]
        return found

    def listed(self, now: float) -> np.ndarray:
        """(K,) USD per instance and hour, also where no machine can be had; NaN before the first price."""
        return np.concatenate([series.at(np.array([now])) for series in self.series])

    def lost_at(self, k: int, granted: float) -> float:
        """Moment at which a machine granted then is taken away; infinite where it is not.

        It may have gone between the choice and the grant, while the job saved: then it is lost at once.
        """
        index = int(np.searchsorted(self.starts[k], granted, side="right")) - 1
        if index < 0 or self.ends[k][index] <= granted:
            return granted
        lost = float(self.ends[k][index]) if self.taken[k][index] else np.inf
        offer = self.offers[k]
        if offer.spot and offer.cloud in LONGEST_LIFE_SECONDS:
            lost = min(lost, granted + LONGEST_LIFE_SECONDS[offer.cloud])
        return lost


def machines_of(market: Market, start: float, end: float, *, seed: int) -> Machines:
    """The market's offers between two moments; preemptions from its logs, or drawn with ``seed``."""
    offers, series, spans = [], [], []
    by_pool = {}
    for offer, prices in market.spot.items():
        if offer.pool not in by_pool:
            by_pool[offer.pool] = market.spans(offer.pool, start, end, seed=seed)
        offers.append(offer)
        series.append(prices)
        spans.append(_while_offered(by_pool[offer.pool], prices, start, end))
    for offer, usd in market.on_demand.items():
        offers.append(offer)
        series.append(PriceSeries(np.array([0.0]), np.array([usd])))
        spans.append([Span(start=start, end=np.inf, preempted=False)])
    return Machines(
        tuple(offers),
        tuple(series),
        tuple(np.array([span.start for span in each], dtype=float) for each in spans),
        tuple(np.array([span.end for span in each], dtype=float) for each in spans),
        tuple(np.array([span.preempted for span in each], dtype=bool) for each in spans),
    )


def _while_offered(spans: Sequence[Span], prices: PriceSeries, start: float, end: float) -> list[Span]:
    """The parts of the spans in which there is a price; where it is withdrawn, the machine is taken away."""
    offered = ~np.isnan(prices.usd)
    if offered.all() and prices.times[0] <= start:
        return [_open(span, end) for span in spans]
    edges = np.append(prices.times, np.inf)
    found = []
    for span in spans:
        first = max(int(np.searchsorted(edges, span.start, side="right")) - 1, 0)
        open_from = None
        for index in range(first, len(prices.usd)):
            if edges[index] >= span.end:
                break
            if offered[index] and open_from is None:
                open_from = max(span.start, float(edges[index]))
            elif not offered[index] and open_from is not None:
                found.append(Span(start=open_from, end=float(edges[index]), preempted=True))
                open_from = None
        if open_from is not None:
            found.append(_open(Span(start=open_from, end=span.end, preempted=span.preempted), end))
    return found


def _open(span: Span, end: float) -> Span:
    """A span that reaches the end of the replay without a preemption does not end."""
    if span.end >= end and not span.preempted:
        return Span(start=span.start, end=np.inf, preempted=False)
    return span
