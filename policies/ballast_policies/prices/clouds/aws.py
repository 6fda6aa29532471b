"""AWS: rows of DescribeSpotPriceHistory, as the AWS command saves them in a file, or as boto3 gives them."""

import dataclasses
import datetime
import re
from collections.abc import Iterable
from typing import Any

from ballast_policies.prices.clouds.wanted import AwsSpotPrice
from ballast_policies.prices.offers import Point, PriceLogError, seconds_of, usd

PRODUCT = "Linux/UNIX"
"""The only product that is read: the others are licences of other systems on the same machines."""

_ZONE = re.compile(r"([a-z]{2}(?:-[a-z]+){1,3}-\d)(?:-[a-z]{3}-\d)?[a-z]")
_TEXTS = ("AvailabilityZone", "InstanceType", "SpotPrice", "Timestamp")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PriceRow:
    """A price of one kind of machine in one zone, from a moment on."""

    cloud: str
    region: str
    zone: str
    instance: str
    point: Point


def aws_price_row(row: Any, where: str) -> PriceRow | None:
    """One row; None: of another product than :data:`PRODUCT`.

    Raises:
        PriceLogError: it is wrong.
    """
    if not isinstance(row, dict) or not all(isinstance(row.get(key), str) for key in _TEXTS):
        raise PriceLogError(f"{where}: needs the texts {', '.join(_TEXTS)}")
    if row.get("ProductDescription", PRODUCT) != PRODUCT:
        return None
    zone = _ZONE.fullmatch(row["AvailabilityZone"][:60])
    if zone is None:
        raise PriceLogError(
            f"{where}: {row['AvailabilityZone'][:60]!r} is no availability zone, as us-east-1d"
        )
    return PriceRow(
        cloud="aws",
        region=zone.group(1),
        zone=zone.group(0),
        instance=row["InstanceType"][:100],
        point=Point(
            time=seconds_of(row["Timestamp"], where=where),
            usd=usd(row["SpotPrice"], where=where),
        ),
    )


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
