"""A warm start: the prices and level of a solution, for the next similar program."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """Prices of the GPU types, in ratio to each other, and how far demands could be raised.

    The k + 1 unknowns of a large program (``boxstep``): after an arrival or departure they
    are still nearly optimal. A bad start costs time, not exactness.
    """

    prices: tuple[float, ...]
    t: float

    def scaled(self, unit: float) -> "WarmStart":
        """The same for a program whose t counts ``unit`` times as much; only ratios of prices matter."""
        return WarmStart(prices=self.prices, t=self.t * unit)
