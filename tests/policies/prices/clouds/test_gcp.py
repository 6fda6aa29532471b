"""Pages of Google's list: SKUs by their id, added up to what one GPU costs."""

import json
from pathlib import Path
from typing import Any

import pytest
from ballast_policies.prices.clouds import GcpPrice, gpu_price, gpus_of, read_skus
from ballast_policies.prices.offers import PriceLogError

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
