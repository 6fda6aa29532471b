"""The rule of deadlines on other people's traces: figures for the page.

    python lab/benchmarks/prices/deadlines.py --data FOLDER > lab/benchmarks/prices/deadlines.json

FOLDER has the folders ``skynomad`` and ``cant-be-late``; ``ballast_lab.skynomad`` and
``ballast_lab.cant_be_late`` say what is in them. Of "Can't Be Late" only the second half of the windows
counts: the slack that the rule keeps was chosen on the first.
"""

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from ballast_lab import cant_be_late, skynomad


def cells(folder: Path) -> list[dict[str, Any]]:
    """SkyNomad's cells: cost over the optimum by our rule and theirs."""
    found = skynomad.compared(skynomad.read_cells(folder), skynomad.Traces(folder))
    return [
        {
            "cell": cell.name,
            "hours": cell.hours,
            "deadline_hours": cell.deadline_hours,
            "checkpoint_gb": cell.checkpoint_gb,
            "windows": len(cell.windows),
            "ours": ours,
            "theirs": theirs,
            "late": late,
        }
        for cell, ours, theirs, late in found
    ]


def elastic(folder: Path) -> list[dict[str, Any]]:
    """A gang of 16 beside elastic ones, over machines that come and go one by one."""
    zones, seconds, _ = skynomad.elastic_zones(folder)
    return [dataclasses.asdict(row) for row in skynomad.elastic_rows(zones, seconds)]


def scores(folder: Path) -> list[dict[str, Any]]:
    """Settings of "Can't Be Late": mean scores of the second half of the windows."""
    series = cant_be_late.read_windows(folder)
    second = {name: (tick, windows[len(windows) // 2 :]) for name, (tick, windows) in series.items()}
    return [
        {"series": name, "deadline_hours": deadline, "startup_hours": startup, **row}
        for (name, deadline, startup), row in cant_be_late.settings(second).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--data", type=Path, required=True)
    folder = parser.parse_args().data
    print(
        json.dumps(
            {
                "skynomad": cells(folder / "skynomad"),
                "elastic": elastic(folder / "skynomad"),
                "cant_be_late": scores(folder / "cant-be-late"),
            },
            indent=1,
        )
    )


if __name__ == "__main__":
    main()
