"""Where the price of a pool is read."""

from typing import Annotated

from ballast_policies.contract.conditions import Cel
from ballast_policies.contract.rules import Rule
from ballast_policies.prices.clouds.wanted import USD
from pydantic import Field

from ballast_operator.api.base import ApiModel, schema

_AwsRegion = Annotated[str, Field(max_length=32, pattern=r"^[a-z]{2}(-[a-z]+){1,3}-[0-9]$")]
_Place = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]


class AwsPriceFeed(ApiModel):
    """The history of spot prices of AWS, read every five minutes by boto3 with the operator's credentials."""

    region: _AwsRegion
    """Region, e.g. ``us-east-1``."""
    zone: Annotated[str, Field(max_length=63, pattern=r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$")] = ""
    """Availability zone, e.g. ``us-east-1a``; empty: the mean over the zones of the region that have one."""
    instance_type: Annotated[str, Field(max_length=63, pattern=r"^[a-z0-9][-a-z0-9]*\.[a-z0-9][-a-z0-9]*$")]
    """Instance type, e.g. ``p3.8xlarge``."""


class AzurePriceFeed(ApiModel):
    """The retail prices of Azure, read every hour without credentials, by the pool's ``capacityType``."""

    region: _Place
    """Region, e.g. ``eastus``."""
    vm_size: Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]*$")]
    """VM size, e.g. ``Standard_NC6s_v3``."""


class GcpSku(ApiModel):
    """One SKU of Compute Engine, and how much of it comes with a GPU."""

    id: Annotated[str, Field(pattern=r"^[0-9A-F]{4}-[0-9A-F]{4}-[0-9A-F]{4}$")]
    """Its id, as in Google's list of SKUs, which has others for spot machines and for each region."""
    per_gpu: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    """Of the GPU itself 1; cores, or GiB of memory, for each GPU."""


class GcpPriceFeed(ApiModel):
    """The Cloud Billing Catalog of Google, read every six hours: what a GPU costs is the sum of its SKUs."""

    skus: Annotated[
        tuple[GcpSku, ...], Field(min_length=1, max_length=8, json_schema_extra=schema(list_type="atomic"))
    ]
    """The GPU's SKU, and those of the cores and the memory beside it."""


class PriceFeed(ApiModel):
    """Where the price of a pool is read: a ConfigMap in the operator's namespace, or a cloud's price list."""

    RULES = (
        Rule(
            condition=Cel(
                "[has(self.configMap), has(self.aws), has(self.azure), has(self.gcp)]"
                ".filter(x, x).size() == 1",
                lambda feed: (
                    sum(part is not None for part in (feed.config_map, feed.aws, feed.azure, feed.gcp)) == 1
                ),
            ),
            field="",
            reason="a price feed is one of configMap, aws, azure and gcp",
            fix="set exactly one",
        ),
        Rule(
            condition=Cel(
                "!has(self.currency) || self.currency == 'USD' || has(self.rate)",
                lambda feed: feed.currency == USD or feed.rate is not None,
            ),
            field="rate",
            reason="a price in another currency than USD needs its rate",
            fix="set priceFeed.rate",
        ),
        Rule(
            condition=Cel(
                "!has(self.currency) || self.currency == 'USD' || !has(self.aws)",
                lambda feed: feed.currency == USD or feed.aws is None,
            ),
            field="currency",
            reason="AWS has its spot prices in USD alone",
            fix="leave currency out; rate converts",
        ),
        Rule(
            condition=Cel(
                "!has(self.configMap) || "
                "(!has(self.rate) && (!has(self.currency) || self.currency == 'USD'))",
                lambda feed: feed.config_map is None or (feed.rate is None and feed.currency == USD),
            ),
            field="rate",
            reason="currency and rate are for the price lists of clouds",
            fix="leave them out, and write the ConfigMap's prices in the pools' currency",
        ),
        Rule(
            condition=Cel(
                "!has(self.key) || size(self.key) == 0 || has(self.configMap)",
                lambda feed: not feed.key or feed.config_map is not None,
            ),
            field="key",
            reason="key is a key of a ConfigMap",
            fix="leave it out",
        ),
    )

    config_map: (
        Annotated[str, Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")]
        | None
    ) = None
    """Name of the ConfigMap. What else writes it is yours."""
    key: Annotated[str, Field(max_length=253, pattern=r"^[-._a-zA-Z0-9]*$")] = ""
    """Key whose value is ``{"pricePerGpuHour": 0.74, "time": "2026-01-01T00:00:00Z"}``; empty: the pool's
    name."""
    aws: AwsPriceFeed | None = None
    """AWS's spot prices."""
    azure: AzurePriceFeed | None = None
    """Azure's retail prices."""
    gcp: GcpPriceFeed | None = None
    """Google Cloud's list prices."""
    currency: Annotated[str, Field(pattern=r"^[A-Z]{3}$")] = USD
    """Currency in which the cloud's list is read; another than USD needs ``rate``."""
    rate: Annotated[float, Field(gt=0, le=1e6)] | None = None
    """What a price of the feed is multiplied with: the pools' currency for one unit of the feed's. Absent: 1,
    and the pools' prices are in USD."""
    stale_after_seconds: Annotated[float, Field(ge=1, le=1e9)] = 86_400.0
    """A price that is older still counts, and the condition PricesCurrent is False."""
