"""SkyNomad's cells: what the rule of deadlines costs over their offline optimum, beside what theirs does.

    python -m ballast_lab.skynomad --data FOLDER

FOLDER holds files of SkyNomad's artifact (github.com/andylizf/skynomad-artifact, Apache-2.0; NSDI 2027),
which are not part of Ballast: ``result_*.csv`` (or ``.csv.xz``), a row for each window, cell and policy,
and the traces, as folders ``ZONE_GPU/full.json``, in a ``.tar.gz`` or not; of V100s ``v100_ZONE.csv`` with
``v100_spot_prices.json`` (``.xz``). A cell is a set of zones, hours of work, a deadline, a start-up and a
checkpoint's size; its figure is the mean cost over its windows, over that of ``multi_region_oracle_dp``.
That optimum knows the future, and does not pay its first start-up. Whole ticks are paid, as there; in cells
that cannot be done in time their fixed cost counts for all.

    ballast reproduce skynomad-elastic --data FOLDER

A gang of 16 H100 beside elastic ones, by the same rule. The traces say where at least one of 16 machines
could be had: how many is read from the artifact's probes (``h100_16_runs/*.json``) where FOLDER has them.
Where it has not, it is drawn to be like them: 57 % of those with one have all (44 % of all probes all, 33 %
some), and a zone's number stays for hours, within one or two.
"""

import ast
import csv
import dataclasses
import datetime
import functools
import io
import itertools
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

UNREADABLE = (
    *(OSError, EOFError, ValueError, KeyError, TypeError, SyntaxError),
    *(tarfile.TarError, lzma.LZMAError),
)
"""Errors of files that are not the artifact's."""

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
        files = (path.parent.name for path in folder.glob("**/full.json*"))
        self.names = frozenset((*self._packed, *files))

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
            prices = next(self.folder.glob("v100_spot_prices.json*"), None)
            if prices is None:
                raise KeyError(f"the prices of {name}")
            usd, on_demand = json.loads(_text(prices))[name], V100_USD
        else:
            raise KeyError(name)
        series = np.array(usd[: len(there)], dtype=float)
        return Zone(region=region, there=there, spot_usd=series, on_demand_usd=on_demand), seconds


def usd_per_gb(origin: str, destination: str) -> float:
    """Price of a checkpoint's way between regions, as the artifact charges between those of its traces."""
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


GANG, SIZES, EXPONENT = 16, (16, 8, 4, 1), 0.9
"""GPUs of the gang, the least on which each of its kinds may run, and the power of GPUs that its speed is."""

DRAWN_ALL, REDRAWN, SEED = 0.57, 0.05, 0
"""Part of the ticks with machines that have all; of the ticks at which a zone's number is drawn anew."""


def probed(folder: Path) -> dict[str, np.ndarray]:
    """Zone -> (T,) machines of 16 that probes were given, in their order; empty: there are no probes."""
    found: dict[str, list[int]] = {}
    for path in sorted(folder.glob("**/h100_16_runs/*.json")):
        for zone, result in json.loads(path.read_text(encoding="utf-8"))["zone_results"].items():
            found.setdefault(zone, []).append(int(result["instances_created"]))
    return {zone: np.array(counts) for zone, counts in found.items()}


def drawn(there: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """(T,) machines of 16 where there is one at least."""
    counts, level = np.zeros(len(there), dtype=int), 0
    for tick, some in enumerate(there):
        if level == 0 or generator.random() < REDRAWN:
            level = GANG if generator.random() < DRAWN_ALL else int(generator.integers(1, GANG))
        near = level if level == GANG else min(max(level + int(generator.integers(-2, 3)), 1), GANG - 1)
        counts[tick] = near if some else 0
    return counts


def elastic_zones(folder: Path) -> tuple[dict[str, Zone], float, bool]:
    """Zones of H100s with the part of 16 that can be had, seconds of a tick, whether probes say the parts."""
    traces, counts, generator = Traces(folder), probed(folder), np.random.default_rng(SEED)
    zones, seconds = dict[str, Zone](), 0.0
    for name in sorted(name for name in traces.names if "_h100" in name):
        zone, seconds = traces.zone(name)
        number = counts.get(name.split("_")[0])
        number = drawn(zone.there, generator) if number is None else number
        ticks = min(len(number), len(zone.there))
        zones[name] = dataclasses.replace(zone, there=number[:ticks] / GANG, spot_usd=zone.spot_usd[:ticks])
    return zones, seconds, bool(counts)


def least_usd(zones: Sequence[Zone], job: TickJob) -> float:
    """Bound: the cheapest moments and sizes of ticks with the future known, start-ups and egress for nothing.

    The dual of a linear program: at most one choice a tick, the speeds of all ticks do the work.
    """
    sizes = np.arange(math.ceil(job.least * GANG), GANG + 1) / GANG
    hours, ticks = job.tick_seconds / 3600, int(job.deadline_seconds // job.tick_seconds)
    gain, usd = [np.ones(ticks)], [np.full(ticks, min(zone.on_demand_usd for zone in zones))]
    for zone, size in itertools.product(zones, sizes.tolist()):
        held = zone.there[:ticks] >= size
        gain.append(held * size**job.exponent)
        usd.append(np.where(held, zone.spot_usd[:ticks] * size, 0.0))
    speed, cost = np.array(gain), np.array(usd) * hours

    def dual(price: float) -> float:
        best = np.maximum(price * speed * hours - cost, 0.0).max(axis=0)
        return float(price * job.seconds / 3600 - best.sum())

    low, high = 0.0, 2 * max(zone.on_demand_usd for zone in zones)
    for _ in range(60):
        third = (high - low) / 3
        low, high = (low + third, high) if dual(low + third) < dual(high - third) else (low, high - third)
    return dual((low + high) / 2)


@dataclasses.dataclass(frozen=True, slots=True)
class ElasticRow:
    """Jobs of one set of zones and one deadline, over the hours at which they begin.

    Attributes:
        usd, bound_usd: least GPUs -> USD of the jobs together, and of their bounds.
        late: least GPUs -> how many were late.
    """

    zones: int
    due_hours: float
    jobs: int
    usd: Mapping[int, float]
    bound_usd: Mapping[int, float]
    late: Mapping[int, int]


def elastic_rows(
    zones: Mapping[str, Zone], tick_seconds: float, *, hours: float = 43.2, checkpoint_gb: float = 50.0
) -> Iterator[ElasticRow]:
    """Each set of zones (one, three in turn, all) with each slack.

    ``zones``: ``there`` is the part of 16 machines that can be had.
    """
    names, ticks = sorted(zones), min(len(zone.there) for zone in zones.values())
    sets = {
        size: [names[at : at + size] for at in range(0, len(names) - size + 1, size)]
        for size in dict.fromkeys((1, min(3, len(names)), len(names)))
    }
    for (size, chosen), slack in itertools.product(sets.items(), (1.2, 1.5, 2.0)):
        length = int(hours * slack * 3600 / tick_seconds)
        usd, bound = (dict.fromkeys(SIZES, 0.0) for _ in range(2))
        jobs, late = 0, dict.fromkeys(SIZES, 0)
        for members, begin in itertools.product(chosen, range(0, ticks - length + 1, length)):
            here = [
                dataclasses.replace(
                    zones[name],
                    there=zones[name].there[begin : begin + length],
                    spot_usd=zones[name].spot_usd[begin : begin + length],
                )
                for name in members
            ]
            egress = np.array([[usd_per_gb(a.region, b.region) for b in here] for a in here])
            jobs += 1
            for least in SIZES:
                job = TickJob(
                    seconds=hours * 3600,
                    deadline_seconds=length * tick_seconds,
                    startup_seconds=0.2 * 3600,
                    checkpoint_gb=checkpoint_gb,
                    tick_seconds=tick_seconds,
                    least=least / GANG,
                    exponent=EXPONENT,
                )
                result = run_ticks(here, job, egress)
                usd[least] += result.usd
                bound[least] += least_usd(here, job)
                late[least] += not result.in_time
        yield ElasticRow(size, hours * slack, jobs, usd, bound, late)


@click.command()
@click.option(
    "--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True
)
def elastic(folder: Path) -> Comparison:
    """Print what a gang of 16 costs beside elastic ones, over machines that come and go one by one."""
    try:
        zones, seconds, as_probed = elastic_zones(folder)
    except UNREADABLE as error:
        raise click.ClickException(f"--data: {folder} cannot be read: {error!r}") from error
    if not zones:
        raise click.ClickException(
            f"--data: {folder} has no trace of H100s. To fix: name the artifact's data"
        )
    click.echo("machines: " + ("as probed" if as_probed else "drawn where there was one"))
    kinds = [f"{least} to {GANG}" if least < GANG else str(GANG) for least in SIZES]
    click.echo(f"{'zones':>6}{'due h':>7}{'jobs':>6}" + "".join(f"{kind:>17}" for kind in kinds) + "   late")
    rows = []
    for row in elastic_rows(zones, seconds):
        rows.append(row)
        cells = (f"{row.usd[s] / row.usd[GANG]:8.3f}, {row.usd[s] / row.bound_usd[s]:.3f}" for s in SIZES)
        missed = "/".join(str(row.late[least]) for least in SIZES)
        click.echo(
            f"{row.zones:6}{row.due_hours:7.1f}{row.jobs:6}"
            + "".join(f"{c:>17}" for c in cells)
            + f"   {missed}"
        )
    click.echo("each: USD over those of 16, and over the bound with the future known")
    late = sum(sum(row.late.values()) for row in rows)
    over = math.fsum(row.usd[4] / row.usd[GANG] for row in rows) / len(rows)
    return Comparison(
        (
            Point("4 to 16 over 16, USD, mean", "", over, low=0.0, high=1.0),
            Point("deadlines missed", "0", late, low=0, high=0),
        )
    )


@click.command()
@click.option(
    "--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True
)
def main(folder: Path) -> Comparison:
    """Print the cost of SkyNomad's cells over the optimum, by Ballast's rule and by theirs."""
    try:
        cells, traces = read_cells(folder), Traces(folder)
    except UNREADABLE as error:
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
