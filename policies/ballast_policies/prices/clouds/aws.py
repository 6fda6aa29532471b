"""AWS: the rows of DescribeSpotPriceHistory, as boto3 or the AWS command gives them."""

import datetime
from collections.abc import Iterable
from typing import Any

from ballast_policies.prices.clouds.aws_prices import PRODUCT, PriceRow, aws_price_row
from ballast_policies.prices.clouds.wanted import AwsSpotPrice
from ballast_policies.prices.errors import PriceLogError

PRODUCTS = (PRODUCT, f"{PRODUCT} (Amazon VPC)")
"""Machines with Linux; the second name is that of accounts made before 2013."""


def spot_price(rows: Iterable[Any], wanted: AwsSpotPrice) -> float:
    """USD per machine and hour: the newest of the zone, or the mean of the newest of each zone.

    Args:
        rows: in any order; those of other instance types, zones and products are not looked at.
        wanted: the instance type.

    Raises:
        PriceLogError: there is none, or a row that counts is wrong.
    """
    newest: dict[str, PriceRow] = {}
    for number, row in enumerate(rows):
        if not isinstance(row, dict) or row.get("InstanceType") != wanted.instance_type:
            continue
        if row.get("ProductDescription") not in PRODUCTS:
            continue
        if wanted.zone and row.get("AvailabilityZone") != wanted.zone:
            continue
        time = row.get("Timestamp")
        text = time.isoformat() if isinstance(time, datetime.datetime) else time
        plain = {**row, "ProductDescription": PRODUCT, "Timestamp": text}
        found = aws_price_row(plain, f"{wanted}, row {number}")
        if found is None or found.region != wanted.region:
            continue
        before = newest.get(found.zone)
        if before is None or before.point.time <= found.point.time:
            newest[found.zone] = found
    prices = [row.point.usd for row in newest.values() if row.point.usd is not None]
    if not prices:
        raise PriceLogError(
            f"{wanted}: AWS has no spot price of it. To fix: correct region, zone or instanceType"
        )
    return sum(prices) / len(prices)
