"""The catalogue of instances - a cloud's machines, their GPUs, their prices on demand - and prices in logs.

Which prices of a log can be true, its times, and the error of the parsers.
"""

import csv
import dataclasses
import functools
import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from importlib import resources


class PriceLogError(ValueError):
    """A log cannot be used; the text names the file, the value and the reason."""


MOST_ABOVE_ON_DEMAND = 2.0
"""Spot prices are capped at the on-demand price, which differs between regions by less than this factor."""

LEAST_OF_ON_DEMAND = 0.02
"""Below this part of the on-demand price a spot price is an error: discounts of 8 times have been seen."""


def is_plausible(usd: float, on_demand_usd: float | None) -> bool:
    """True if a spot price can be true: from a fiftieth to twice the on-demand price, where it is known."""
    if not (math.isfinite(usd) and usd > 0):
        return False
    return on_demand_usd is None or LEAST_OF_ON_DEMAND <= usd / on_demand_usd <= MOST_ABOVE_ON_DEMAND


_ISO = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d{1,6})?(Z|[+-]\d\d:?\d\d)")
_DATE = re.compile(r"\d{1,2}/\d{1,2}/\d{4}")


def seconds_of(text: str, *, where: str) -> float:
    """Seconds since 1970 of ``2020-02-20T23:21:08.000Z``, or of a day ``2/24/2020``, its beginning in UTC.

    Raises:
        PriceLogError: it is neither.
    """
    try:
        if _ISO.fullmatch(text):
            return datetime.fromisoformat(text).timestamp()
        if _DATE.fullmatch(text):
            month, day, year = (int(part) for part in text.split("/"))
            return datetime(year, month, day, tzinfo=UTC).timestamp()
    except (ValueError, OverflowError) as error:
        raise PriceLogError(f"{where}: the time {text[:40]!r}: {error}") from error
    raise PriceLogError(
        f"{where}: the time {text[:40]!r} is not as 2020-02-20T23:21:08Z or, in a table of days, 2/24/2020"
    )


MOST_GPUS = 4096
"""Most GPUs of one instance that a catalogue may state."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class InstanceType:
    """A kind of machine of one cloud.

    Attributes:
        gpu_type: lower case, as throughput tables name it.
        on_demand_usd: USD per instance and hour on demand; None: not known.
    """

    cloud: str
    instance: str
    gpu_type: str
    gpus: int
    on_demand_usd: float | None = None


Catalogue = Mapping[tuple[str, str], InstanceType]
"""(cloud, instance) -> its GPUs."""


@functools.cache
def built_in_catalogue() -> Catalogue:
    """GPU instances of AWS (us-east-1), Azure (East US) and Google Cloud (us-central1, GPUs only).

    On-demand list prices: of 2020 for the generations of the dissertation's chapter 6, later ones of the
    year in which they came out.
    """
    file = resources.files("ballast_policies.prices") / "data" / "instances.csv"
    return parse_catalogue(file.read_text(encoding="utf-8"), source="the built-in catalogue")


def parse_catalogue(text: str, *, source: str) -> Catalogue:
    """A catalogue with the columns cloud, instance, gpu_type, gpus, on_demand_usd_per_hour.

    Raises:
        PriceLogError: a column is missing, or a number is impossible.
    """
    found: dict[tuple[str, str], InstanceType] = {}
    columns = ("cloud", "instance", "gpu_type", "gpus", "on_demand_usd_per_hour")
    try:
        rows = list(csv.DictReader(text.splitlines()))
    except csv.Error as error:
        raise PriceLogError(f"{source}: not CSV: {error}") from error
    for number, row in enumerate(rows, start=2):
        where = f"{source}, line {number}"
        missing = [column for column in columns if row.get(column) is None]
        if missing:
            raise PriceLogError(f"{where}: no {', '.join(missing)}. To fix: the columns {', '.join(columns)}")
        cloud, instance = row["cloud"].strip().lower(), row["instance"].strip()
        gpus, price = row["gpus"].strip(), row["on_demand_usd_per_hour"].strip()
        if not (gpus.isascii() and gpus.isdigit() and len(gpus) <= 4 and 1 <= int(gpus) <= MOST_GPUS):
            raise PriceLogError(f"{where}: gpus is {gpus[:20]!r}, not a number from 1 to {MOST_GPUS}")
        if not cloud or not instance or not row["gpu_type"].strip():
            raise PriceLogError(f"{where}: cloud, instance and gpu_type must not be empty")
        if (cloud, instance) in found:
            raise PriceLogError(f"{where}: {cloud} {instance} is there twice. To fix: give it once")
        found[cloud, instance] = InstanceType(
            cloud=cloud,
            instance=instance,
            gpu_type=row["gpu_type"].strip().lower(),
            gpus=int(gpus),
            on_demand_usd=usd(price, where=where) if price else None,
        )
    return found


MOST_USD = 1e5
"""Most USD an hour that one instance may cost."""


def usd(text: str, *, where: str) -> float:
    """A price, as ``0.3405`` or ``$0.3405``.

    Raises:
        PriceLogError: it is no number, or not from above 0 to :data:`MOST_USD`.
    """
    digits = text.strip().removeprefix("$")
    try:
        value = float(digits) if len(digits) <= 32 and "_" not in digits else math.nan
    except ValueError:
        value = math.nan
    if not 0 < value <= MOST_USD:
        raise PriceLogError(
            f"{where}: the price {text[:40]!r} is not a number above 0 and at most {MOST_USD:g}. "
            "To fix: USD per instance and hour"
        )
    return value
