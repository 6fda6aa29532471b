"""A folder of logs, as a market: every file is known by its content, whatever its name."""

import csv
import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from pathlib import Path

from ballast_policies.contract.decode import parse_json
from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.limits import FILE, Limits
from ballast_policies.prices.clouds import PRODUCTS, aws_price
from ballast_policies.prices.offers import (
    MOST_GPUS,
    Catalogue,
    InstanceType,
    PriceLogError,
    built_in_catalogue,
    parse_catalogue,
    seconds_of,
)

from ballast_lab.prices.availability import AvailabilityLog
from ballast_lab.prices.history import Point, PriceRow, series
from ballast_lab.prices.logs.availability_log import any_running, parse_availability
from ballast_lab.prices.logs.azure_prices import parse_azure_prices
from ballast_lab.prices.logs.gcp_prices import parse_gcp_prices
from ballast_lab.prices.market import Market, instance_of
from ballast_lab.prices.offers import Offer, Pool

LIMITS: Limits = dataclasses.replace(FILE, depth=8)
MOST_FILES = 10_000
MOST_BYTES = 64 * 2**20
MOST_BYTES_IN_ALL = 512 * 2**20
CATALOGUE = "instances.csv"
"""A file of this name in the folder adds instances to the built-in catalogue, or replaces their prices."""

READ = {".json", ".csv", ".out", ".log"}


@dataclasses.dataclass(slots=True)
class _Found:
    catalogue: dict[tuple[str, str], InstanceType]
    rows: list[PriceRow] = dataclasses.field(default_factory=list)
    logs: dict[Pool, list[AvailabilityLog]] = dataclasses.field(default_factory=dict)
    ignored: list[str] = dataclasses.field(default_factory=list)


def read_market(folder: Path) -> Market:
    """The market of a folder with logs of AWS, Google Cloud and Azure, in any of its subfolders.

    ``*.json``: answers of ``aws ec2 describe-spot-price-history``; ``*.csv``: ``instances.csv``
    (:func:`parse_catalogue`), Azure's VM sizes (Instance, GPU type, # GPUs) or tables of its prices by day,
    whose region is the file's name; ``*.out`` and ``*.log``: availability logs, or Google Cloud's prices.

    Raises:
        PriceLogError: there is no such folder, a log cannot be read, or no spot price is of a known instance.
    """
    if not folder.is_dir():
        raise PriceLogError(f"{folder} is no folder. To fix: name one with price logs")
    files = sorted(path for path in folder.rglob("*") if path.suffix in READ and path.is_file())
    if len(files) > MOST_FILES:
        raise PriceLogError(f"{folder}: {len(files)} files, above {MOST_FILES}")
    found = _Found(catalogue=dict(built_in_catalogue()))
    left = MOST_BYTES_IN_ALL
    for path in files:
        text = _text(path)
        left -= len(text)
        if left < 0:
            raise PriceLogError(f"{folder}: more than {MOST_BYTES_IN_ALL // 2**20} MiB of logs")
        _read(path, text, str(path.relative_to(folder)), found)
    return _market(found, folder)


def excerpt() -> Market:
    """The logs that come with Ballast: four weeks of those of the dissertation's chapter 6."""
    with resources.as_file(resources.files("ballast_lab.prices") / "data" / "excerpt") as folder:
        return read_market(folder)


def _text(path: Path) -> str:
    try:
        if path.stat().st_size > MOST_BYTES:
            raise PriceLogError(f"{path}: {path.stat().st_size} bytes, above {MOST_BYTES}")
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise PriceLogError(f"{path} cannot be read: {error}") from error


def parse_aws_prices(text: str, *, source: str) -> Iterator[PriceRow]:
    """The rows of what the AWS command has saved, in the order of the file.

    Raises:
        PriceLogError: it is not such an answer, or a row is wrong.
    """
    try:
        answer = parse_json(text, limits=LIMITS)
    except ContractError as error:
        raise PriceLogError(f"{source}: {error}") from error
    rows = answer.get("SpotPriceHistory") if isinstance(answer, dict) else None
    if not isinstance(rows, list):
        raise PriceLogError(
            f"{source}: no list under SpotPriceHistory. "
            "To fix: save the answer of aws ec2 describe-spot-price-history as JSON"
        )
    for number, row in enumerate(rows):
        if isinstance(row, dict) and row.get("ProductDescription", PRODUCTS[0]) != PRODUCTS[0]:
            continue
        region, zone, time, usd = aws_price(row, f"{source}: SpotPriceHistory[{number}]")
        instance = row["InstanceType"][:100]
        yield PriceRow(
            cloud="aws", region=region, zone=zone, instance=instance, point=Point(time=time, usd=usd)
        )


def _read(path: Path, text: str, name: str, found: _Found) -> None:
    if path.suffix == ".json":
        found.rows.extend(parse_aws_prices(text, source=name))
    elif path.name == CATALOGUE:
        found.catalogue.update(parse_catalogue(text, source=name))
    elif path.suffix == ".csv":
        if text.startswith("Instance,"):
            for kind in _azure_sizes(text, name):
                found.catalogue.setdefault((kind.cloud, kind.instance), kind)
        else:
            found.rows.extend(parse_azure_prices(text, region=path.stem, source=name))
    elif text.lstrip().startswith("Zone: "):
        found.rows.extend(parse_gcp_prices(text, start=_time_of(path.stem), source=name))
    elif text.strip():
        for pool, log in parse_availability(text, source=name).items():
            found.logs.setdefault(pool, []).append(log)
    else:
        found.ignored.append(f"{name}: empty")


def _time_of(stem: str) -> float:
    """The time in a file's name; 0, so that the price always holds, where it has none."""
    try:
        return seconds_of(stem, where="name")
    except PriceLogError:
        return 0.0


def _azure_sizes(text: str, source: str) -> Iterable[InstanceType]:
    try:
        rows = list(csv.reader(text.splitlines()[1:]))
    except csv.Error as error:
        raise PriceLogError(f"{source}: not CSV: {error}") from error
    for number, row in enumerate(rows, start=2):
        gpus = row[2] if len(row) == 3 else ""
        if not (gpus.isascii() and gpus.isdigit() and len(gpus) <= 4 and 1 <= int(gpus) <= MOST_GPUS):
            raise PriceLogError(
                f"{source}, line {number}: {','.join(row)[:80]!r} is not SIZE,GPU TYPE,NUMBER"
            )
        yield InstanceType(
            cloud="azure", instance=row[0].strip(), gpu_type=row[1].strip().lower(), gpus=int(gpus)
        )


def _market(found: _Found, folder: Path) -> Market:
    points: dict[Offer, list[Point]] = {}
    unknown: dict[tuple[str, str], int] = {}
    for row in found.rows:
        kind = instance_of(found.catalogue, row.cloud, row.instance)
        if kind is None:
            unknown[row.cloud, row.instance] = unknown.get((row.cloud, row.instance), 0) + 1
            continue
        offer = Offer(
            cloud=row.cloud,
            region=row.region,
            zone=row.zone,
            instance=row.instance,
            gpu_type=kind.gpu_type,
            gpus=kind.gpus,
            spot=True,
        )
        points.setdefault(offer, []).append(row.point)
    spot, outliers = {}, []
    for offer, seen in sorted(points.items()):
        kind = instance_of(found.catalogue, offer.cloud, offer.instance)
        made, wrong = series(seen, on_demand_usd=kind.on_demand_usd if kind else None)
        outliers += [
            f"{offer}: {point.usd:g} USD at {point.time:.0f} s is not between a fiftieth and twice the "
            "on-demand price; the last good price stays"
            for point in wrong
        ]
        if len(made.times):
            spot[offer] = made
    if not any(series_.times[-1] > 0 for series_ in spot.values()):
        names = "; ".join(f"{cloud} {instance}" for cloud, instance in sorted(unknown)[:5])
        raise PriceLogError(
            f"{folder}: no spot price of a known instance"
            + (f" (not known: {names}). To fix: add them to {CATALOGUE} in the folder" if names else "")
        )
    ignored = found.ignored + [
        f"{cloud} {instance}: {count} prices of an instance that is not in the catalogue. "
        f"To fix: add it to {CATALOGUE} in the folder"
        for (cloud, instance), count in sorted(unknown.items())
    ]
    return Market(
        spot=spot,
        on_demand=_on_demand(spot, found.catalogue),
        availability={pool: _joined(logs) for pool, logs in found.logs.items()},
        outliers=tuple(outliers),
        ignored=tuple(ignored),
    )


def _on_demand(spot: Iterable[Offer], catalogue: Catalogue) -> Mapping[Offer, float]:
    """The same instances on demand, once a cloud: list prices of the region that is first in the alphabet.

    The catalogue's prices are those of the clouds' first US regions; where the logs have one, it is named.
    """
    found: dict[tuple[str, str], Offer] = {}
    for offer in spot:
        key = (offer.cloud, offer.instance)
        if key not in found or _us_first(offer) < _us_first(found[key]):
            found[key] = offer
    prices = {}
    for (cloud, instance), offer in sorted(found.items()):
        kind = instance_of(catalogue, cloud, instance)
        if kind is not None and kind.on_demand_usd is not None:
            on_demand = dataclasses.replace(offer, zone=offer.region, spot=False)
            prices[on_demand] = kind.on_demand_usd
    return prices


def _us_first(offer: Offer) -> tuple[bool, str]:
    return not offer.region.startswith("us"), offer.region


def _joined(logs: list[AvailabilityLog]) -> AvailabilityLog:
    """Several logs of one pool; where none has watched, the pool counts as away."""
    return AvailabilityLog(
        start=min(log.start for log in logs),
        end=max(log.end for log in logs),
        spans=any_running(span for log in logs for span in log.spans),
    )
