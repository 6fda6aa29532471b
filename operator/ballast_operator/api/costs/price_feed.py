"""Where the price of a pool is read."""

from typing import Annotated

from pydantic import Field

from ballast_operator.api.base import ApiModel


class PriceFeed(ApiModel):
    """Where the price of a pool is read: a ConfigMap in the operator's namespace."""

    config_map: Annotated[
        str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    ]
    """Name of the ConfigMap. What else writes it is yours."""
    key: Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z0-9]*$")] = ""
    """Key whose value is ``{"pricePerGpuHour": 0.74, "time": "2026-01-01T00:00:00Z"}``; empty: the pool's
    name."""
    stale_after_seconds: Annotated[float, Field(ge=1, le=1e9)] = 86_400.0
    """A price that is older still counts, and the condition PricesCurrent is False."""
