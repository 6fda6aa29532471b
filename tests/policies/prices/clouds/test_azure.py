"""One page of Azure's list: the machine with Linux, spot or not, and no other entry of it."""

import json
from pathlib import Path
from typing import Any

import pytest
from ballast_policies.prices.clouds import AzurePrice, filter_of, gpus_of, retail_price
from ballast_policies.prices.offers import PriceLogError

TEXT = (Path(__file__).parent / "answers" / "azure-eastus2-NCC40ads_H100_v5.json").read_text()
SIZE = "Standard_NCC40ads_H100_v5"


def wanted(spot: bool = True, **more: Any) -> AzurePrice:
    return AzurePrice(**{"region": "eastus2", "vm_size": SIZE, "spot": spot, **more})


def changed(**fields: Any) -> str:
    """The page with other values in the entry of the spot machine."""
    page = json.loads(TEXT)
    page["Items"][1] |= fields
    return json.dumps(page)


def test_windows_low_priority_and_test_subscriptions_are_not_taken():
    """Of six entries for one size, one is the spot price and one the price on demand."""
    assert retail_price(TEXT, wanted()) == 1.419034
    assert retail_price(TEXT, wanted(spot=False)) == 6.98


def test_the_request_names_one_size_in_one_region():
    """So that the answer is one short page."""
    assert "armRegionName eq 'eastus2' and armSkuName eq 'Standard_NCC40ads_H100_v5'" in filter_of(wanted())


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        '{"Items": {}}',
        '{"Items": [5]}',
        "[" * 100_000,
        " " * (3 * 1024 * 1024),
        *(changed(retailPrice=price) for price in (None, "1.4", True, 0, -1.0, 1e9, [], {})),
        changed().replace("1.419034", "NaN"),
        changed().replace("1.419034", "1e999"),
        changed(unitOfMeasure="1/Month"),
        changed(currencyCode="EUR"),
        changed(currencyCode=None),
        changed(armRegionName="westeurope"),
        changed(armSkuName=["Standard_NCC40ads_H100_v5"]),
        changed(meterName=None),
        changed(productName=5),
    ],
)
def test_what_is_no_price_of_the_machine_is_refused(text: str):
    """With a short reason, whatever the page holds."""
    with pytest.raises(PriceLogError) as refused:
        retail_price(text, wanted())
    assert len(str(refused.value)) < 1000


def test_two_prices_of_one_machine_are_not_chosen_between():
    """An entry with another price for the same machine is named."""
    page = json.loads(TEXT)
    page["Items"].append({**page["Items"][1], "retailPrice": 2.0})
    with pytest.raises(PriceLogError, match=r"different prices of it: 1\.41903, 2"):
        retail_price(json.dumps(page), wanted())


def test_gpus_of_a_machine_are_those_of_the_pool_or_of_the_catalogue():
    """A size that neither knows is refused with what to set."""
    assert gpus_of(wanted(), 2) == 2
    assert gpus_of(wanted(vm_size="Standard_NC24s_v3"), None) == 4
    with pytest.raises(PriceLogError, match="To fix: set gpusPerNode"):
        gpus_of(wanted(), None)
