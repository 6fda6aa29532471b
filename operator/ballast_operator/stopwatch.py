"""Times the parts of something into a histogram with the label ``part``."""

import time

from prometheus_client import Histogram


class Stopwatch:
    """Runs from when it is made."""

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._began = self._last = time.perf_counter()

    def lap(self, part: str) -> None:
        """Book the seconds since the last lap."""
        now = time.perf_counter()
        self._histogram.labels(part).observe(now - self._last)
        self._last = now

    def total(self, part: str) -> float:
        """Book the seconds since the beginning, and return them."""
        seconds = self._last - self._began
        self._histogram.labels(part).observe(seconds)
        return seconds
