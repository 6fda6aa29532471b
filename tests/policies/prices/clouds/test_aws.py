"""AWS's spot prices: the command's JSON, and single prices."""

import datetime
import json
from pathlib import Path
from typing import Any

import pytest
from ballast_policies.prices.clouds import AwsSpotPrice, GcpPrice, gpu_price, gpus_of, read_skus, spot_price
from ballast_policies.prices.offers import PriceLogError

NOON = datetime.datetime(2026, 1, 1, 12, tzinfo=datetime.UTC)


def row(price: Any, zone: Any = "us-east-1a", *, minutes: float = 0.0, **more: Any) -> dict[str, Any]:
    return {
        "AvailabilityZone": zone,
        "InstanceType": "p3.8xlarge",
        "ProductDescription": "Linux/UNIX",
        "SpotPrice": price,
        "Timestamp": NOON + datetime.timedelta(minutes=minutes),
        **more,
    }


def wanted(zone: str = "") -> AwsSpotPrice:
    return AwsSpotPrice(region="us-east-1", zone=zone, instance_type="p3.8xlarge")


ROWS = [
    row("4.0", minutes=5),
    row("3.0"),
    row("6.0", "us-east-1b"),
    row("9.0", minutes=9, ProductDescription="Windows"),
    row("1.0", minutes=9, InstanceType="p3.2xlarge"),
    row("2.0", "us-east-2a", minutes=9),
    "not a row",
]


def test_the_newest_row_of_the_zone_counts():
    """Whatever the order; other products, types and regions are not looked at."""
    assert spot_price(ROWS, wanted("us-east-1a")) == 4.0
    assert spot_price(ROWS[::-1], wanted("us-east-1a")) == 4.0


def test_without_a_zone_it_is_the_mean_over_the_zones():
    """A pool with nodes in several zones has one price."""
    assert spot_price(ROWS, wanted()) == 5.0


@pytest.mark.parametrize(
    "found",
    [
        [],
        [row("0")],
        [row("-1")],
        [row("NaN")],
        [row("inf")],
        [row("1e9")],
        [row(4.0)],
        [row(None)],
        [row("4.0", "here")],
        [row("4.0", ["us-east-1a"])],
        [row("4.0", Timestamp="yesterday")],
        [row("4.0", Timestamp=None)],
    ],
)
def test_what_is_no_price_is_refused(found: list[Any]):
    with pytest.raises(PriceLogError, match=r"aws/us-east-1/p3.8xlarge"):
        spot_price(found, wanted())


TEXT = (Path(__file__).parent / "answers" / "gcp-skus.json").read_text()
GPU, RAM, CORE = "039F-D0DA-4055", "2390-DCAF-DA38", "2922-40C5-B19F"


def money(**fields: Any) -> str:
    """The page with another price of the GPU."""
    page = json.loads(TEXT)
    page["skus"][0]["pricingInfo"][0]["pricingExpression"]["tieredRates"][0]["unitPrice"] |= fields
    return json.dumps(page)


def expression(**fields: Any) -> str:
    page = json.loads(TEXT)
    page["skus"][0]["pricingInfo"][0]["pricingExpression"] |= fields
    return json.dumps(page)


def test_a_gpu_costs_what_it_comes_with():
    """An a2-highgpu-1g: one A100, 12 cores and 85 GiB of memory."""
    page = read_skus(TEXT, {GPU, RAM, CORE}, currency="USD")
    assert page.next_token == "APKCS1HVa0YpwgyTFbqb"
    wanted = GcpPrice(skus=((GPU, 1.0), (CORE, 12.0), (RAM, 85.0)))
    assert gpu_price(page.prices, wanted) == pytest.approx(2.933908 + 12 * 0.031611 + 85 * 0.004237)
    assert gpus_of(wanted, 8) == 1  # the price is that of a GPU already


def test_only_what_is_looked_for_is_read():
    """Another SKU of the page that is malformed does no harm."""
    page = json.loads(money(units="many"))
    assert read_skus(json.dumps(page), {RAM}, currency="USD").prices == {RAM: 0.004237}


def test_a_sku_that_does_not_exist_is_named():
    with pytest.raises(PriceLogError, match=r"no SKU 0000-0000-0000 .* To fix: correct skus\[\].id"):
        gpu_price({}, GcpPrice(skus=(("0000-0000-0000", 1.0),)))


@pytest.mark.parametrize(
    "text",
    [
        *(money(units=units) for units in ("-1", "1e3", "9" * 12, 2, "NaN", "²")),
        *(money(nanos=nanos) for nanos in (-1, 10**9, "5", True, 0.5)),
        money(units="0", nanos=0),
        money(currencyCode="EUR"),
        expression(usageUnit="mo"),
        expression(tieredRates=[]),
        expression(tieredRates=None),
        expression(tieredRates=[{}, {}]),
        expression(tieredRates=[[]]),
    ],
)
def test_a_price_that_cannot_be_used_is_refused_with_its_sku(text: str):
    """Other SKUs of the page still have their price."""
    page = read_skus(text, {GPU, RAM}, currency="USD")
    assert page.prices[RAM] == 0.004237
    with pytest.raises(PriceLogError, match=GPU):
        gpu_price(page.prices, GcpPrice(skus=((GPU, 1.0),)))


@pytest.mark.parametrize(
    "text", ["", "[]", '{"skus": 5}', '{"skus": [], "nextPageToken": 5}', "[" * 50_000, '{"skus": NaN}']
)
def test_what_is_no_page_is_refused(text: str):
    with pytest.raises(PriceLogError):
        read_skus(text, {GPU}, currency="USD")
