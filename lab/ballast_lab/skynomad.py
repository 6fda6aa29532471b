"""SkyNomad's cells: what the rule of deadlines costs over their offline optimum, beside what theirs does.

    python -m ballast_lab.skynomad --data FOLDER

FOLDER holds files of SkyNomad's artifact (github.com/andylizf/skynomad-artifact, Apache-2.0; NSDI 2027),
which are not part of Ballast: ``result_*.csv`` (or ``.csv.xz``), a row for each window, cell and policy,
and the traces, as folders ``ZONE_GPU/full.json``, in a ``.tar.gz`` or not; of V100s ``v100_ZONE.csv`` with
``v100_spot_prices.json`` (``.xz``). A cell is a set of zones, hours of work, a deadline, a start-up and a
checkpoint's size; its figure is the mean cost over its windows, over that of ``multi_region_oracle_dp``.
That optimum knows the future, and does not pay its first start-up. Whole ticks are paid, as there; in cells
that cannot be done in time their fixed cost counts for all.
"""

import ast
import csv
import dataclasses
import datetime
import functools
import io
import json
import lzma
import math
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np

from ballast_lab.comparison import Comparison, Point
from ballast_lab.spot.ticks import TickJob, TickResult, Zone, run_ticks

OPTIMUM, THEIRS = ("multi_region_oracle_dp",), ("unified_cost_model_risk", "unified_cost_model_rate_ratio")
"""Names of policies in results: the optimum, and SkyNomad in its settings."""

V100_USD = 3.06
"""A p3.2xlarge an hour on demand."""

NEAR = frozenset({"us-east-1", "us-east-2"})
"""Regions between which AWS asks half."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell of a table.

    Attributes:
        zones: names of traces.
        hours, deadline_hours, startup_hours: of the job.
        windows: hours at which it begins -> policy -> USD.
    """

    name: str
    zones: tuple[str, ...]
    hours: float
    deadline_hours: float
    startup_hours: float
    checkpoint_gb: float
    windows: Mapping[float, Mapping[str, float]]

    def published(self, policies: Sequence[str]) -> float:
        """USD of the windows together, by the first of the policies that each has; NaN: some have none."""
        return math.fsum(
            next((row[name] for name in policies if name in row), math.nan) for row in self.windows.values()
        )


def _text(path: Path) -> str:
    raw = path.read_bytes()
    return (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode("utf-8")


def read_cells(folder: Path) -> list[Cell]:
    """The cells of all ``result_*.csv``, in order."""
    found: dict[tuple[Any, ...], dict[float, dict[str, float]]] = {}
    for path in sorted(folder.glob("result_*.csv*")):
        for row in csv.DictReader(io.StringIO(_text(path))):
            if row["task_type"] != "multi_region":
                continue
            numbers = ("task_duration", "deadline_hours", "restart_overhead", "checkpoint_size")
            key = (
                path.name.removeprefix("result_").split(".")[0],
                row["scenario_name"],
                tuple(ast.literal_eval(row["regions_in_scenario"])),
                *(float(row[name]) for name in numbers),
            )
            windows = found.setdefault(key, {})
            windows.setdefault(float(row["env_start_hours"]), {})[row["strategy"]] = float(row["cost"])
    return [
        Cell(
            name=f"{table}: {scenario}",
            zones=zones,
            hours=hours,
            deadline_hours=deadline,
            startup_hours=startup,
            checkpoint_gb=gb,
            windows=windows,
        )
        for (table, scenario, zones, hours, deadline, startup, gb), windows in found.items()
    ]


class Traces:
    """The traces of a folder, read once each."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._packed: dict[str, Any] = {}
        for path in sorted(folder.glob("*.tar.gz")):
            with tarfile.open(path) as archive:
                for member in archive.getmembers():
                    file = archive.extractfile(member) if member.name.endswith("/full.json") else None
                    if file is not None:
                        self._packed[member.name.split("/")[-2]] = json.load(file)
        self.zone = functools.cache(self._zone)

    def _zone(self, name: str) -> tuple[Zone, float]:
        """A zone from the trace's beginning on, and seconds of a tick."""
        zone, gpu, *_ = name.split("_")
        region = zone.rstrip("abcdefghijklmnopqrstuvwxyz").rstrip("-")
        found = self._packed.get(name) or next(
            (json.loads(_text(path)) for path in self.folder.glob(f"**/{name}/full.json*")), None
        )
        if found is not None:
            about = found["metadata"]
            price = about["price_info"]
            there = np.array(found["data"]) == 0  # 1: preempted
            usd = found.get("prices") or [price["price"]] * len(there)
            on_demand, seconds = float(price["on_demand_price"]), float(about["gap_seconds"])
        elif gpu == "v100":
            path = next(self.folder.glob(f"v100_{zone}.csv*"), None)
            if path is None:
                raise KeyError(name)
            rows = list(csv.DictReader(io.StringIO(_text(path))))
            there = np.array([row["availability"] == "1" for row in rows])
            first, last = (datetime.datetime.fromisoformat(rows[at]["date"]) for at in (0, -1))
            seconds = round((last - first).total_seconds() / (len(rows) - 1))
            prices = next(self.folder.glob("v100_spot_prices.json*"))
            usd, on_demand = json.loads(_text(prices))[name], V100_USD
        else:
            raise KeyError(name)
        series = np.array(usd[: len(there)], dtype=float)
        return Zone(region=region, there=there, spot_usd=series, on_demand_usd=on_demand), seconds


def usd_per_gb(origin: str, destination: str) -> float:
    """Of a checkpoint between regions, as the artifact charges between those of its traces."""
    if origin == destination:
        return 0.0
    return 0.01 if {origin, destination} == NEAR else 0.02


def run_window(cell: Cell, traces: Traces, start_hours: float) -> TickResult:
    """The cell's job from an hour of the traces on.

    Raises:
        KeyError: a trace is not there.
    """
    found = [traces.zone(name) for name in cell.zones]
    seconds = found[0][1]
    begin = math.ceil(start_hours * 3600 / seconds - 1e-9)
    ticks = math.ceil(cell.deadline_hours * 3600 / seconds - 1e-9)
    zones = [
        dataclasses.replace(
            zone, there=zone.there[begin : begin + ticks], spot_usd=zone.spot_usd[begin : begin + ticks]
        )
        for zone, _ in found
    ]
    job = TickJob(
        seconds=cell.hours * 3600,
        deadline_seconds=min(cell.deadline_hours * 3600, min(len(zone.there) for zone in zones) * seconds),
        startup_seconds=cell.startup_hours * 3600,
        checkpoint_gb=cell.checkpoint_gb,
        tick_seconds=seconds,
    )
    return run_ticks(zones, job, np.array([[usd_per_gb(a.region, b.region) for b in zones] for a in zones]))


def compared(cells: list[Cell], traces: Traces) -> Iterator[tuple[Cell, float, float, int]]:
    """Each cell, its cost by the rule and by theirs over the optimum's, and windows that were late."""
    for cell in cells:
        optimum, theirs = cell.published(OPTIMUM), cell.published(THEIRS)
        late = 0
        if cell.hours + cell.startup_hours > cell.deadline_hours:
            usd = optimum
        else:
            results = [run_window(cell, traces, start) for start in cell.windows]
            usd, late = math.fsum(one.usd for one in results), sum(not one.in_time for one in results)
        yield cell, usd / optimum, theirs / optimum, late


@click.command()
@click.option(
    "--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True
)
def main(folder: Path) -> Comparison:
    """Print the cost of SkyNomad's cells over the optimum, by Ballast's rule and by theirs."""
    try:
        cells, traces = read_cells(folder), Traces(folder)
    except (OSError, ValueError, KeyError, tarfile.TarError, lzma.LZMAError) as error:
        raise click.ClickException(f"--data: {folder} cannot be read: {error!r}") from error
    if not cells:
        raise click.ClickException(
            f"--data: {folder} has no result_*.csv. To fix: name the artifact's results"
        )
    click.echo(
        f"{'cell':46}{'work h':>8}{'due h':>7}{'GB':>6}{'windows':>9}{'ours':>8}{'theirs':>8}{'late':>6}"
    )
    rows = []
    try:
        for cell, ours, theirs, late in compared(cells, traces):
            rows.append((ours, theirs, late))
            click.echo(
                f"{cell.name[:45]:46}{cell.hours:8.1f}{cell.deadline_hours:7.1f}{cell.checkpoint_gb:6.0f}"
                f"{len(cell.windows):9}{ours:8.3f}{theirs:8.3f}{late:6}"
            )
    except KeyError as error:
        raise click.ClickException(f"--data: no trace of {error.args[0]} in {folder}") from error
    mean = [math.fsum(row[at] for row in rows) / len(rows) for at in (0, 1)]
    above = sum(ours > theirs + 5e-4 for ours, theirs, _ in rows)
    click.echo(
        f"mean of {len(rows)} cells: ours {mean[0]:.3f}, theirs {mean[1]:.3f}; above theirs in {above}"
    )
    late = sum(row[2] for row in rows)
    return Comparison(
        (
            Point("mean", f"{mean[1]:.3f}", mean[0], low=0.99, high=mean[1]),
            Point("deadlines missed", "0", late, low=0, high=0),
        )
    )


if __name__ == "__main__":
    main()
