"""The cost of data that is read from another region: clouds bill it by the GB, by origin and destination."""

import dataclasses
from collections.abc import Mapping

GB = float(2**30)
"""Bytes of a GB as clouds bill data transfer."""

ANY = "*"
"""Name for all regions that no other entry names."""


@dataclasses.dataclass(frozen=True, slots=True)
class DataPrices:
    """Prices of data between regions.

    Attributes:
        per_gb: (from, to) -> price of a GB; either may be :data:`ANY`. Inside of a region data is free.
    """

    per_gb: Mapping[tuple[str, str], float] = dataclasses.field(default_factory=dict)

    def of_gb(self, origin: str, destination: str) -> float | None:
        """Price of a GB; None: not known. What names both regions counts first, then what names the first."""
        if not origin or not destination:
            return None
        if origin == destination:
            return 0.0
        for pair in ((origin, destination), (origin, ANY), (ANY, destination), (ANY, ANY)):
            if pair in self.per_gb:
                return self.per_gb[pair]
        return None

    def of_bytes(self, count: float, origin: str, destination: str) -> float | None:
        """Price of ``count`` bytes; None: not known."""
        price = self.of_gb(origin, destination)
        return None if price is None else count / GB * price


NO_DATA_PRICES = DataPrices()
"""No price is known."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobData:
    """Data that a job reads, and their region.

    Attributes:
        region: where its data is.
        bytes_per_step: that all of its ranks read together for one step, on average.
        checkpoint_bytes: of a checkpoint, which moves with the job between regions; None: not known.
    """

    region: str
    bytes_per_step: float
    checkpoint_bytes: float | None = None

    def usd_per_step(self, prices: DataPrices, destination: str) -> float | None:
        """Price of the data of a step that is done in ``destination``; None: not known."""
        return prices.of_bytes(self.bytes_per_step, self.region, destination)

    def usd_to_move(self, prices: DataPrices, origin: str, destination: str) -> float:
        """Price of copying a checkpoint; 0 where its size, a region or the price is not known."""
        if self.checkpoint_bytes is None:
            return 0.0
        return prices.of_bytes(self.checkpoint_bytes, origin, destination) or 0.0
