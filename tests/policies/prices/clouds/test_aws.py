"""AWS's spot prices: the command's JSON, and single prices."""

import datetime
from typing import Any

import pytest
from ballast_policies.prices.clouds import AwsSpotPrice, spot_price
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
    row("9.0", ProductDescription="Windows"),
    row("1.0", InstanceType="p3.2xlarge"),
    row("2.0", "us-east-2a"),
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
