"""Prices over time: series of changes, and outliers."""

import dataclasses
import math
from collections.abc import Iterable

import numpy as np
from ballast_policies.prices.offers import is_plausible


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """A price from a moment on; None: not offered from then on."""

    time: float
    usd: float | None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    """A row of a log: a price of one kind of machine in one zone."""

    cloud: str
    region: str
    zone: str
    instance: str
    point: Point


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class PriceSeries:
    """A price that holds until the next change.

    Attributes:
        times: (n,) seconds since 1970, increasing.
        usd: (n,) from then on, per instance and hour; NaN: not offered.
    """

    times: np.ndarray
    usd: np.ndarray

    def __post_init__(self) -> None:
        if self.times.shape != self.usd.shape or (np.diff(self.times) <= 0).any():
            raise ValueError("a price series needs increasing times and a price for each")

    def at(self, times: np.ndarray) -> np.ndarray:
        """(m,) prices at ``times``; NaN before the first change."""
        index = np.searchsorted(self.times, times, side="right") - 1
        found: np.ndarray = np.where(index >= 0, self.usd[np.maximum(index, 0)], np.nan)
        return found

    def usd_between(self, start: float, end: float) -> float:
        """USD for one instance from ``start`` to ``end``, by the second.

        Raises:
            ValueError: it is not offered for some of that time.
        """
        if end <= start:
            return 0.0
        inside = self.times[(self.times > start) & (self.times < end)]
        edges = np.concatenate(([start], inside, [end]))
        total = float(self.at(edges[:-1]) @ np.diff(edges)) / 3600.0
        if math.isnan(total):
            raise ValueError(f"there is no price for some of the time from {start} to {end}")
        return total


def series(points: Iterable[Point], *, on_demand_usd: float | None = None) -> tuple[PriceSeries, list[Point]]:
    """The series of a log, in any order and with repetitions, and the points left out as outliers.

    At an outlier the last good price stays. Of two prices for the same moment the later in the log wins.
    """
    kept: dict[float, float] = {}
    outliers = []
    for point in points:
        if point.usd is None:
            kept[point.time] = math.nan
        elif is_plausible(point.usd, on_demand_usd):
            kept[point.time] = point.usd
        else:
            outliers.append(point)
    times = sorted(kept)
    return PriceSeries(
        np.array(times, dtype=float), np.array([kept[t] for t in times], dtype=float)
    ), outliers
