"""What a solution hands to the next one of a similar program: a warm start."""

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """Prices of the GPU types, in ratio to each other, and how far demands could be raised.

    The k + 1 numbers that a large program comes down to (``boxstep``): after an arrival or departure they
    are still nearly right. A wrong start costs time, never exactness.
    """

    prices: tuple[float, ...]
    t: float

    def scaled(self, unit: float) -> "Start":
        """The same for a program whose t counts ``unit`` times as much; only ratios of prices matter."""
        return Start(prices=self.prices, t=self.t * unit)
