"""Our simulator beside Gavel's published figures: run, compare, keep.

    python lab/benchmarks/simulator/published.py                  # the four runs on physical traces, seconds
    python lab/benchmarks/simulator/published.py --figure 5.9 --at 2.0 4.0
    python lab/benchmarks/simulator/published.py --figure makespan --at 100 700 --seeds 0 1 2 --keep
    python lab/benchmarks/simulator/published_page.py               # lab/docs/published.md from what was kept

``--keep`` enters the runs in ``published_runs.json`` (what was run, with its seconds), from which
the page is made; ``--missing`` leaves out those that are there. Published values: printed outputs of
Gavel's notebooks (``published.json``), and Gavel's own simulator on its physical traces.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from ballast_lab.arrays.engine import simulate
from ballast_lab.comparison import Comparison, near
from ballast_policies.simulator.result import HOUR, Result
from published_figures import (
    FIGURES,
    ISOLATED,
    MEASURED,
    PHYSICAL_PUBLISHED,
    RULES,
    Curve,
    published,
    settings_of,
    workload_of,
)

KEPT = Path(__file__).with_name("published_runs.json")


def values_of(result: Result) -> dict[str, Any]:
    weights = result.average_completion_time_by_weight
    return {
        "jct_hours": result.average_completion_time / HOUR,
        "jct_hours_by_weight": {f"{weight:g}": seconds / HOUR for weight, seconds in weights.items()},
        "makespan_hours": result.makespan / HOUR,
        "utilisation": result.utilisation,
        "rounds": result.rounds,
        "solves": result.solves,
        "solve_seconds": result.solve_seconds,
    }


def run(figure: str, curve: Curve, at: float, seed: int, options: argparse.Namespace) -> tuple[Result, float]:
    workload, cluster, table = workload_of(figure, curve, at, seed)
    first, end = map(int, options.measure.split(":"))
    chosen = settings_of(figure, curve, seed, rules=options.rules, measured=(first, end))
    started = time.perf_counter()
    return simulate(workload, cluster, table, chosen), time.perf_counter() - started


def record(figure: str, curve: Curve, at: float, seed: int, options: argparse.Namespace) -> dict[str, Any]:
    """One run; figure 5.11-rho divides by the completion times of a run in which all are isolated."""
    result, seconds = run(figure, curve, at, seed, options)
    values = values_of(result)
    if FIGURES[figure].what == "rho":
        alone, _ = run(figure, ISOLATED, at, seed, options)
        pairs = zip(result.jobs, alone.jobs, strict=True)
        values["rho"] = sum(job.completion_time / other.completion_time for job, other in pairs) / len(
            result.jobs
        )
    again = (
        f"python lab/benchmarks/simulator/published.py --figure {figure} --curves '{curve.key}' --at {at:g}"
    )
    return {
        "figure": figure,
        "curve": curve.key,
        "at": at,
        "seed": seed,
        "rules": options.rules or ("gavel" if figure == "physical" else "published"),
        "measured": options.measure,
        "values": values,
        "wall_seconds": round(seconds, 1),
        "command": f"{again} --seeds {seed}",
    }


def compared(kept: dict[str, Any]) -> list[tuple[str, float, float | None]]:
    """(name, ours, published) of a run."""
    figure, curve, at, values = kept["figure"], kept["curve"], kept["at"], kept["values"]
    what = FIGURES[figure].what
    if figure == "physical":
        what = PHYSICAL_PUBLISHED[curve][1]
    if what == "jct_hours_by_weight":
        by_weight = values[what]
        return [
            (kind, by_weight[weight], published(figure, curve, at, kind))
            for kind, weight in (("high", "5"), ("low", "1"))
        ]
    return [("", values[what], published(figure, curve, at))]


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    keys = ("figure", "curve", "at", "seed", "rules", "measured")
    return all(one[key] == other[key] for key in keys)


def keep(fresh: dict[str, Any]) -> None:
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else []
    kept = [old for old in kept if not same(old, fresh)] + [fresh]
    kept.sort(key=lambda entry: (entry["figure"], entry["curve"], entry["at"], entry["seed"]))
    KEPT.write_text(json.dumps(kept, indent=1) + "\n")


def main() -> Comparison:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=list(FIGURES), default="physical")
    parser.add_argument(
        "--at", type=float, nargs="+", default=[0.0], help="rates in jobs/h, or numbers of jobs"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--measure", default="{}:{}".format(*MEASURED), help="jobs measured, FIRST:END")
    parser.add_argument("--rules", choices=sorted(RULES), help="default: those of the published values")
    parser.add_argument("--curves", nargs="*", help="names of the published curves, as in the JSON file")
    parser.add_argument("--keep", action="store_true", help="enter the runs in the file of runs")
    parser.add_argument("--missing", action="store_true", help="only what is not in the file of runs")
    options = parser.parse_args()
    print("| figure | curve | at | seed | published | ours | deviation | wall s |")
    print("|---|---|---|---|---|---|---|---|")
    known = json.loads(KEPT.read_text()) if KEPT.exists() and options.missing else []
    judged: dict[tuple[str, float], tuple[float, list[float]]] = {}
    for at in options.at:
        for curve in FIGURES[options.figure].curves:
            if options.curves and curve.key not in options.curves:
                continue
            for seed in options.seeds:
                wanted = {
                    "figure": options.figure,
                    "curve": curve.key,
                    "at": at,
                    "seed": seed,
                    "rules": options.rules or ("gavel" if options.figure == "physical" else "published"),
                    "measured": options.measure,
                }
                kind = "low" if options.figure == "priorities" else ""
                if published(options.figure, curve.key, at, kind) is None:
                    continue
                if any(same(wanted, old) for old in known):
                    continue
                found = record(options.figure, curve, at, seed, options)
                if options.keep:
                    keep(found)
                for name, ours, theirs in compared(found):
                    off = f"{ours / theirs - 1.0:+.1%}" if theirs else ""
                    label = f"{curve.label} {name}".strip()
                    print(
                        f"| {options.figure} | {label} | {at:g} | {seed} | {theirs} | {ours:.2f} | {off} "
                        f"| {found['wall_seconds']} |",
                        flush=True,
                    )
                    if theirs:
                        judged.setdefault((label, at), (theirs, []))[1].append(ours)
    points = (
        near(f"{label} at {at:g}", theirs, statistics.fmean(ours))
        for (label, at), (theirs, ours) in judged.items()
    )
    return Comparison(tuple(points), "Band: 5 % around what is published, for the mean of the seeds.")


if __name__ == "__main__":
    main()
