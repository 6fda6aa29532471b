"""Azure: one page of the Retail Prices API."""

import math
import re
from typing import Any

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import Limits
from ballast_policies.prices.clouds.wanted import AzurePrice
from ballast_policies.prices.offers import MOST_USD, PriceLogError

PAGE = Limits(most_bytes=2 * 1024 * 1024, depth=8)
"""A thousand entries at most, as Azure documents it."""

_WINDOWS = re.compile(r"\bWin(dows)?\b")
"""In a product's name: Virtual Machines NCasT4 v3 Series Windows, Virtual Machines NCCadsv5 Srs Win."""


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
        page = parse_json(text, limits=PAGE)
    except ContractError as error:
        raise PriceLogError(f"{wanted}: {error}") from error
    items = page.get("Items") if isinstance(page, dict) else None
    if not isinstance(items, list):
        raise PriceLogError(f"{wanted}: no list under Items: this is no answer of Azure's Retail Prices API")
    prices = {_price(item, wanted) for item in items if _counts(item, wanted)}
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


def _price(item: dict[str, Any], wanted: AzurePrice) -> float:
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
