"""Google Cloud: pages of the Cloud Billing Catalog's list of SKUs."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import Limits
from ballast_policies.prices.clouds.wanted import GcpPrice
from ballast_policies.prices.offers import MOST_USD, PriceLogError

PAGE = Limits(most_bytes=8 * 1024 * 1024, depth=16)
"""A thousand SKUs."""

UNITS = ("h", "GiBy.h")
"""Units of prices that count: an hour, of a GPU or a core, and an hour of a GiB of memory."""

LONGEST_TOKEN = 4096


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SkuPage:
    """What a page has.

    Attributes:
        prices: id of a SKU that was looked for -> price of an hour; or why it cannot be used.
        next_token: of the next page; empty: this was the last.
    """

    prices: Mapping[str, float | PriceLogError]
    next_token: str


def read_skus(text: str, ids: Iterable[str], *, currency: str) -> SkuPage:
    """The SKUs ``ids``, as far as they are on this page.

    Raises:
        PriceLogError: it is no such page.
    """
    try:
        page = parse_json(text, limits=PAGE)
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
                found[name] = _price(sku, name, currency)
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


def _price(sku: Any, name: str, currency: str) -> float:
    """Of the newest pricing, which comes last; of a SKU without steps of amount."""
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
