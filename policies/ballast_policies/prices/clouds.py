"""Prices that are asked of a cloud, its answers, and prices of machines as prices of GPUs.

Of AWS rows of DescribeSpotPriceHistory, as its command saves them in a file, or as boto3 gives them; of Azure
a page of the Retail Prices API; of Google Cloud pages of the Cloud Billing Catalog's list of SKUs.
"""

import dataclasses
import datetime
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import Limits
from ballast_policies.prices.offers import MOST_USD, PriceLogError, built_in_catalogue, seconds_of, usd

USD = "USD"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AwsSpotPrice:
    """The present spot price of an instance type, in USD.

    Attributes:
        zone: availability zone; empty: the mean over the region's zones.
    """

    region: str
    instance_type: str
    zone: str = ""

    def __str__(self) -> str:
        return f"aws/{self.zone or self.region}/{self.instance_type}"

    @property
    def machine(self) -> tuple[str, str]:
        """Its key in a catalogue."""
        return "aws", self.instance_type


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class AzurePrice:
    """The retail price of a VM size with Linux.

    Attributes:
        vm_size: as Azure's API has it, e.g. ``Standard_NC6s_v3``.
        spot: the price of spot machines; else on demand.
    """

    region: str
    vm_size: str
    spot: bool
    currency: str = USD

    def __str__(self) -> str:
        return f"azure/{self.region}/{self.vm_size}/{'spot' if self.spot else 'onDemand'}"

    @property
    def machine(self) -> tuple[str, str]:
        """Its key in a catalogue."""
        return "azure", self.vm_size.removeprefix("Standard_").replace("_", " ")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GcpPrice:
    """The list price of what one GPU comes with.

    Attributes:
        skus: (id of a SKU, its amount for one GPU): the GPU itself, cores and GiB of memory.
    """

    skus: tuple[tuple[str, float], ...]
    currency: str = USD

    def __str__(self) -> str:
        return "gcp/" + "+".join(f"{amount:g}*{sku}" for sku, amount in self.skus)


Wanted = AwsSpotPrice | AzurePrice | GcpPrice


def gpus_of(wanted: Wanted, gpus_per_node: int | None) -> int:
    """GPUs that the price of ``wanted`` is for. Raises PriceLogError: neither says it.

    ``gpus_per_node``: as the pool states it; None: as the built-in catalogue does.
    """
    if isinstance(wanted, GcpPrice):
        return 1
    if gpus_per_node is not None:
        return gpus_per_node
    known = built_in_catalogue().get(wanted.machine)
    if known is None:
        raise PriceLogError(
            f"{wanted}: how many GPUs a machine has is not known. To fix: set gpusPerNode of the pool"
        )
    return known.gpus


_ZONE = re.compile(r"([a-z]{2}(?:-[a-z]+){1,3}-\d)(?:-[a-z]{3}-\d)?[a-z]")
_TEXTS = ("AvailabilityZone", "InstanceType", "SpotPrice", "Timestamp")


PRODUCTS = ("Linux/UNIX", "Linux/UNIX (Amazon VPC)")
"""Machines with Linux; the second name is that of accounts made before 2013. The other products are licences
of other systems on the same machines."""


def aws_price(row: Any, where: str) -> tuple[str, str, float, float]:
    """(region, zone, seconds since 1970, USD per machine and hour) of a row.

    Raises:
        PriceLogError: it is wrong.
    """
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in _TEXTS):
        raise PriceLogError(f"{where}: needs the texts {', '.join(_TEXTS)}")
    zone = _ZONE.fullmatch(row["AvailabilityZone"][:60])
    if zone is None:
        raise PriceLogError(
            f"{where}: {row['AvailabilityZone'][:60]!r} is no availability zone, as us-east-1d"
        )
    seconds, price = seconds_of(row["Timestamp"], where=where), usd(row["SpotPrice"], where=where)
    return zone.group(1), zone.group(0), seconds, price


def spot_price(rows: Iterable[Any], wanted: AwsSpotPrice) -> float:
    """USD per machine and hour: the newest of the zone, or the mean of the newest of each zone.

    ``rows``: in any order; those of other instance types, zones and products are not looked at.

    Raises:
        PriceLogError: there is none, or a row that counts is wrong.
    """
    newest: dict[str, tuple[float, float]] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.get("InstanceType") != wanted.instance_type:
            continue
        if row.get("ProductDescription") not in PRODUCTS:
            continue
        if wanted.zone and row.get("AvailabilityZone") != wanted.zone:
            continue
        time = row.get("Timestamp")
        text = time.isoformat() if isinstance(time, datetime.datetime) else time
        region, zone, seconds, price = aws_price({**row, "Timestamp": text}, f"{wanted}, row {number}")
        if region == wanted.region and (zone not in newest or newest[zone][0] <= seconds):
            newest[zone] = seconds, price
    if not newest:
        raise PriceLogError(
            f"{wanted}: AWS has no spot price of it. To fix: correct region, zone or instanceType"
        )
    return sum(price for _, price in newest.values()) / len(newest)


AZURE_PAGE = Limits(most_bytes=2 * 1024 * 1024, depth=8)
"""A thousand entries at most, as Azure documents it."""

_WINDOWS = re.compile(r"\bWin(dows)?\b")
"""Sign of Windows in a product's name: "Virtual Machines NCasT4 v3 Series Windows", "... Srs Win"."""


def filter_of(wanted: AzurePrice) -> str:
    """``$filter`` of the request."""
    return (
        "serviceName eq 'Virtual Machines' and priceType eq 'Consumption' "
        f"and armRegionName eq '{wanted.region}' and armSkuName eq '{wanted.vm_size}'"
    )


def retail_price(text: str, wanted: AzurePrice) -> float:
    """Price per machine and hour, in the currency of ``wanted``.

    Azure lists one VM size several times: with Windows (its product's name says so), as spot machine (its
    meter's name ends in Spot), and as Low Priority, which Batch alone can have.

    Raises:
        PriceLogError: it is no such page, has no price of it, or several that differ.
    """
    try:
        page = parse_json(text, limits=AZURE_PAGE)
    except ContractError as error:
        raise PriceLogError(f"{wanted}: {error}") from error
    items = page.get("Items") if isinstance(page, dict) else None
    if not isinstance(items, list):
        raise PriceLogError(f"{wanted}: no list under Items: this is no answer of Azure's Retail Prices API")
    prices = {_azure_price(item, wanted) for item in items if _counts(item, wanted)}
    if not prices:
        raise PriceLogError(
            f"{wanted}: Azure has no price of it. To fix: correct region, vmSize or capacityType"
        )
    if len(prices) > 1:
        listed = ", ".join(f"{price:g}" for price in sorted(prices)[:5])
        raise PriceLogError(f"{wanted}: Azure lists different prices of it: {listed}")
    return prices.pop()


def _counts(item: Any, wanted: AzurePrice) -> bool:
    if not isinstance(item, dict):
        raise PriceLogError(f"{wanted}: an entry of Items is no object")
    meter, product = item.get("meterName"), item.get("productName")
    return (
        item.get("armSkuName") == wanted.vm_size
        and item.get("armRegionName") == wanted.region
        and item.get("type") == "Consumption"
        and isinstance(meter, str)
        and isinstance(product, str)
        and not _WINDOWS.search(product)
        and not meter.endswith("Low Priority")
        and meter.endswith("Spot") == wanted.spot
    )


def _azure_price(item: dict[str, Any], wanted: AzurePrice) -> float:
    unit, currency, price = (item.get(key) for key in ("unitOfMeasure", "currencyCode", "retailPrice"))
    if unit != "1 Hour":
        raise PriceLogError(f"{wanted}: the price is for {str(unit)[:40]!r}, not for 1 Hour")
    if currency != wanted.currency:
        raise PriceLogError(
            f"{wanted}: the price is in {str(currency)[:10]!r}, not in {wanted.currency}. "
            "To fix: set priceFeed.currency and priceFeed.rate"
        )
    if isinstance(price, bool) or not isinstance(price, int | float) or not math.isfinite(price):
        raise PriceLogError(f"{wanted}: retailPrice is {str(price)[:40]!r}, not a number")
    if not 0 < price <= MOST_USD:
        raise PriceLogError(f"{wanted}: retailPrice is {price:g}, not above 0 and at most {MOST_USD:g}")
    return float(price)


GCP_PAGE = Limits(most_bytes=8 * 1024 * 1024, depth=16)
"""A thousand SKUs."""

UNITS = ("h", "GiBy.h")
"""Units of prices that count: an hour, of a GPU or a core, and an hour of a GiB of memory."""

LONGEST_TOKEN = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SkuPage:
    """Content of a page.

    Attributes:
        prices: id of a SKU that was looked for -> price of an hour; or why it cannot be used.
        next_token: of the next page; empty: this was the last.
    """

    prices: Mapping[str, float | PriceLogError]
    next_token: str


def read_skus(text: str, ids: Iterable[str], *, currency: str) -> SkuPage:
    """The SKUs ``ids``, as far as they are on this page. Raises PriceLogError: it is no such page."""
    try:
        page = parse_json(text, limits=GCP_PAGE)
    except ContractError as error:
        raise PriceLogError(f"gcp: {error}") from error
    if not isinstance(page, dict) or not isinstance(page.get("skus"), list):
        raise PriceLogError("gcp: no list under skus: this is no answer of the Cloud Billing Catalog")
    token = page.get("nextPageToken", "")
    if not isinstance(token, str) or len(token) > LONGEST_TOKEN:
        raise PriceLogError("gcp: nextPageToken is no short text")
    looked_for, found = set(ids), dict[str, float | PriceLogError]()
    for sku in page["skus"]:
        name = sku.get("skuId") if isinstance(sku, dict) else None
        if isinstance(name, str) and name in looked_for:
            try:
                found[name] = _gcp_price(sku, name, currency)
            except PriceLogError as error:
                found[name] = error
    return SkuPage(prices=found, next_token=token)


def gpu_price(prices: Mapping[str, float | PriceLogError], wanted: GcpPrice) -> float:
    """Price of a GPU hour: the sum of its SKUs.

    Raises:
        PriceLogError: one of them is missing, or cannot be used.
    """
    total = 0.0
    for sku, amount in wanted.skus:
        price = prices.get(sku)
        if price is None:
            raise PriceLogError(f"gcp: there is no SKU {sku} of Compute Engine. To fix: correct skus[].id")
        if isinstance(price, PriceLogError):
            raise price
        total += amount * price
    return total


def _gcp_price(sku: Any, name: str, currency: str) -> float:
    """Price of the newest pricing, which comes last; of a SKU without steps of amount."""
    where = f"gcp: SKU {name}"
    pricings = sku.get("pricingInfo")
    expression = _field(
        pricings[-1] if isinstance(pricings, list) and pricings else None, "pricingExpression"
    )
    unit, rates = _field(expression, "usageUnit"), _field(expression, "tieredRates")
    if unit not in UNITS:
        raise PriceLogError(f"{where}: its unit is {str(unit)[:40]!r}, not {' or '.join(UNITS)}")
    if not isinstance(rates, list) or len(rates) != 1:
        raise PriceLogError(f"{where}: it has not one price, but prices by amount")
    money = _field(rates[0], "unitPrice")
    units, nanos = _field(money, "units") or "0", _field(money, "nanos") or 0
    if _field(money, "currencyCode") != currency:
        raise PriceLogError(
            f"{where}: the price is in {str(_field(money, 'currencyCode'))[:10]!r}, not in {currency}. "
            "To fix: set priceFeed.currency and priceFeed.rate"
        )
    if not isinstance(units, str) or not (units.isascii() and units.isdigit() and len(units) <= 9):
        raise PriceLogError(f"{where}: units is {str(units)[:40]!r}, not a whole number of {currency}")
    if type(nanos) is not int or not 0 <= nanos < 1_000_000_000:
        raise PriceLogError(f"{where}: nanos is {str(nanos)[:40]!r}, not from 0 to 999999999")
    price = round(int(units) + nanos / 1e9, 9)
    if not 0 < price <= MOST_USD:
        raise PriceLogError(f"{where}: the price {price:g} is not above 0 and at most {MOST_USD:g}")
    return price


def _field(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
