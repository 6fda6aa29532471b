"""Windows of "Can't Be Late": the score of the rule of deadlines beside uniform progress and greedy.

    python -m ballast_lab.cant_be_late --data FOLDER

FOLDER holds ``windows.json`` (or ``.json.xz``) of github.com/FrontierCS/Frontier-CS (MIT), which is not
part of Ballast: windows of the traces of "Can't Be Late" (NSDI 2024), a sample each 600 s, 1: spot machines
can be had. A job of 48 h on one zone, due after 52 or 70 h, with a start-up of 0.05 or 0.2 h; 3.06 USD an
hour on demand, 0.97 on spot machines. Score: (on demand - cost) / (on demand - all spot), of hours without
start-ups; a job that is late scores as it costs, and is counted.
"""

import json
import lzma
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import click
import numpy as np

from ballast_lab.comparison import Comparison, Point
from ballast_lab.spot.ticks import TickJob, Zone, run_ticks

HOURS, ON_DEMAND, SPOT = 48.0, 3.06, 0.97
DEADLINES, STARTUPS = (52.0, 70.0), (0.05, 0.2)

Score = tuple[float, bool]
"""Score of a window, and whether its job was in time."""


def score(usd: float) -> float:
    """Part of what spot machines could save that was saved."""
    return (HOURS * ON_DEMAND - usd) / (HOURS * (ON_DEMAND - SPOT))


def by_rule(there: np.ndarray, deadline: float, startup: float, tick: float) -> Score:
    """Score by Ballast's rule, which sees the zone for nothing."""
    zone = Zone(region="", there=there, spot_usd=np.full(len(there), SPOT), on_demand_usd=ON_DEMAND)
    found = run_ticks(
        [zone],
        TickJob(
            seconds=HOURS * 3600,
            deadline_seconds=deadline * 3600,
            startup_seconds=startup * 3600,
            tick_seconds=tick,
            look_seconds=0.0,
        ),
    )
    return score(found.usd), found.in_time


def by_pace(there: np.ndarray, deadline: float, startup: float, tick: float, *, even: bool) -> Score:
    """Score by uniform progress (``even``), or by greedy: spot while there is any, on demand when it must.

    Uniform progress runs on demand where no spot machine is and the job is behind the even pace, and stays
    there until it is two start-ups ahead of it.
    """
    start, of_all = startup * 3600, HOURS * 3600
    left, at, starting, usd = of_all, "", 0.0, 0.0
    ticks = math.floor(deadline * 3600 / tick + 1e-9)
    for number in range(ticks):
        if left <= 1e-6:
            break
        up, remain = bool(there[number]), (ticks - number) * tick
        at = "" if at == "spot" and not up else at
        ahead = (of_all - left) - number * tick * HOURS / deadline
        on_spot = max(0.0, tick - (starting if at == "spot" else start))
        may_idle = remain - tick >= left + start
        may_spot = remain - tick >= left - min(left, on_spot) + start
        held = at == "demand" and (not even or ahead < 2 * start)
        if up and may_spot and not held:
            wanted = "spot"
        elif may_idle and not held and not (even and ahead < 0):
            wanted = ""
        else:
            wanted = "demand"
        if wanted != at and wanted:
            starting = start
        at = wanted
        if at:
            usd += (SPOT if at == "spot" else ON_DEMAND) * tick / 3600
            left -= min(left, max(0.0, tick - starting))
            starting = max(0.0, starting - tick)
    return score(usd), left <= 1e-6


def means(scores: Sequence[Score]) -> tuple[float, int]:
    """(mean score, jobs that were late)."""
    return math.fsum(one for one, _ in scores) / len(scores), sum(not in_time for _, in_time in scores)


def settings(
    series: Mapping[str, tuple[float, Sequence[str]]],
) -> dict[tuple[str, float, float], dict[str, tuple[float, int]]]:
    """(Series, deadline, start-up) -> policy -> its mean score, and jobs that were late.

    In a window that is shorter the deadline is its end.
    """
    found = {}
    for name, (tick, windows) in series.items():
        zones = [np.array([sample == "1" for sample in window]) for window in windows]
        for deadline in DEADLINES:
            due = [(zone, min(deadline, len(zone) * tick / 3600)) for zone in zones]
            for startup in STARTUPS:
                found[name, deadline, startup] = {
                    "ours": means([by_rule(*each, startup, tick) for each in due]),
                    "uniform": means([by_pace(*each, startup, tick, even=True) for each in due]),
                    "greedy": means([by_pace(*each, startup, tick, even=False) for each in due]),
                }
    return found


def read_windows(folder: Path) -> dict[str, tuple[float, list[str]]]:
    """Series -> seconds of a sample, and its windows."""
    path = next(folder.glob("windows.json*"))
    raw = path.read_bytes()
    read = json.loads(lzma.decompress(raw) if path.suffix == ".xz" else raw)
    return {name: (float(each["gap_seconds"]), list(each["windows"])) for name, each in read.items()}


@click.command()
@click.option(
    "--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True
)
@click.option("--windows", default="0:", help="Of each series, as FIRST:END.", show_default=True)
def main(folder: Path, windows: str) -> Comparison:
    """Print the scores of the windows of "Can't Be Late"."""
    try:
        first, end = (int(text) if text else None for text in windows.split(":"))
    except ValueError as error:
        raise click.ClickException(f"--windows: {windows} is not FIRST:END") from error
    try:
        series = {name: (tick, all_[first:end]) for name, (tick, all_) in read_windows(folder).items()}
    except (OSError, StopIteration, ValueError, KeyError, TypeError, AttributeError, lzma.LZMAError) as error:
        raise click.ClickException(f"--data: {folder} cannot be read: {error!r}") from error
    for name, (_, chosen) in series.items():
        if not chosen:
            raise click.ClickException(f"--windows: {windows} has none of {name}. To fix: start sooner")
    kinds = ("ours", "uniform", "greedy")
    headings = f"{'ours':>8}{'uniform':>9}{'greedy':>8}{'late':>6}"
    click.echo(f"{'series':22}{'due h':>6}{'start h':>8}{'windows':>8}{headings}")
    above, rows = 0, settings(series)
    for (name, deadline, startup), row in rows.items():
        ours, uniform, greedy = (row[kind][0] for kind in kinds)
        above += ours > max(uniform, greedy)
        click.echo(
            f"{name:22}{deadline:6.0f}{startup:8.2f}{len(series[name][1]):8}"
            f"{ours:8.3f}{uniform:9.3f}{greedy:8.3f}{row['ours'][1]:6}"
        )
    mean = [math.fsum(row[kind][0] for row in rows.values()) / len(rows) for kind in kinds]
    click.echo(
        f"mean: ours {mean[0]:.3f}, uniform progress {mean[1]:.3f}, greedy {mean[2]:.3f}; "
        f"above both in {above} of {len(rows)}"
    )
    late = sum(row["ours"][1] for row in rows.values())
    return Comparison(
        (
            Point("settings in which ours is above both", "", above, low=len(rows), high=len(rows)),
            Point("deadlines missed", "0", late, low=0, high=0),
        )
    )


if __name__ == "__main__":
    main()
