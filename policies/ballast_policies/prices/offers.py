"""The catalogue of instances: a cloud's machines, their GPUs and their prices on demand."""

import csv
import dataclasses
import functools
import math
from collections.abc import Mapping
from importlib import resources

from ballast_policies.prices.log import PriceLogError

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
