"""Our simulator beside Gavel's published figures.

    python benchmarks/simulator_published.py                    # the four runs on physical traces, seconds
    python benchmarks/simulator_published.py --figure 5.9 --rates 2.0 4.0 --seeds 0
    python benchmarks/simulator_published.py --figure makespan --counts 100 300 --write a.md --plot a.png

Published: printed outputs of Gavel's notebooks (``simulator_published.json``), and Gavel's own
simulator rerun on its physical traces.  Figures are averages over the seeds.
"""

import argparse
import dataclasses
import json
import sys
import time
from pathlib import Path

from ballast_policies.allocation.registry import POLICY_NAMES
from ballast_policies.simulator.engine import simulate
from ballast_policies.simulator.generate import continuous, static
from ballast_policies.simulator.result import HOUR, Result
from ballast_policies.simulator.settings import RULES, Cluster, Settings
from ballast_policies.simulator.trace import read_trace
from ballast_policies.simulator.workload import Workload
from ballast_policies.throughput.table import built_in_table

PUBLISHED = json.loads(Path(__file__).with_name("simulator_published.json").read_text())
SIMULATED = Cluster(gpus={"v100": 36, "p100": 36, "k80": 36})
PHYSICAL = Cluster(gpus={"v100": 8, "p100": 16, "k80": 24})


@dataclasses.dataclass(frozen=True, kw_only=True)
class Curve:
    """One published curve and the settings of ours that stand for it."""

    label: str
    key: str
    policy: str
    agnostic: bool = False
    space_sharing: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class Point:
    """One number of ours beside a published one."""

    figure: str
    curve: str
    at: str
    published: float
    ours: float
    unit: str
    seconds: float

    @property
    def deviation(self) -> float:
        """Relative."""
        return self.ours / self.published - 1.0


LAS = (
    Curve(label="LAS, type-blind", key="max_min_fairness", policy="max-min-fairness", agnostic=True),
    Curve(label="Gandiva", key="gandiva", policy="gandiva", space_sharing=True),
    Curve(label="AlloX", key="allox", policy="allox"),
    Curve(label="LAS, aware", key="max_min_fairness_perf", policy="max-min-fairness"),
    Curve(
        label="LAS, aware, space sharing",
        key="max_min_fairness_packed",
        policy="max-min-fairness",
        space_sharing=True,
    ),
)
FTF = (
    Curve(label="FTF, type-blind", key="finish_time_fairness", policy="finish-time-fairness", agnostic=True),
    Curve(label="FTF, aware", key="finish_time_fairness_perf", policy="finish-time-fairness"),
)
FIFO = (
    Curve(label="FIFO, aware", key="fifo_perf", policy="fifo"),
    Curve(label="FIFO, space sharing", key="fifo_packed", policy="fifo", space_sharing=True),
)
CONTINUOUS = {
    "5.9": ("continuous_single_avg_jct_hours", False, LAS, "jct"),
    "5.10": ("continuous_multiple_avg_jct_hours", True, LAS, "jct"),
    "5.11": ("continuous_multiple_avg_jct_hours", True, FTF, "jct"),
    "5.11-ftf": ("continuous_multiple_avg_ftf", True, FTF, "ftf"),
    "fifo-single": ("continuous_single_avg_jct_hours", False, FIFO, "jct"),
    "fifo-multiple": ("continuous_multiple_avg_jct_hours", True, FIFO, "jct"),
}
MAKESPAN = (
    Curve(label="FIFO", key="FIFO", policy="fifo", agnostic=True),
    Curve(label="Gandiva", key="Gandiva", policy="gandiva", space_sharing=True),
    Curve(label="makespan, aware", key="Gavel", policy="makespan"),
    Curve(label="makespan, space sharing", key="Gavel w/ SS", policy="makespan", space_sharing=True),
)
PHYSICAL_RUNS = (
    ("max_min_fairness", Curve(label="LAS, aware", key="", policy="max-min-fairness"), 3.98, "jct"),
    (
        "max_min_fairness",
        Curve(label="LAS, type-blind", key="", policy="max-min-fairness", agnostic=True),
        4.95,
        "jct",
    ),
    ("minimize_makespan", Curve(label="makespan, aware", key="", policy="makespan"), 17.52, "makespan"),
    (
        "minimize_makespan",
        Curve(label="Gandiva", key="", policy="gandiva", space_sharing=True),
        20.93,
        "makespan",
    ),
)


def value_of(result: Result, what: str) -> float:
    return {
        "jct": result.average_completion_time / HOUR,
        "makespan": result.makespan / HOUR,
        "ftf": result.finish_time_fairness,
    }[what]


def measure(
    workloads: list[Workload],
    cluster: Cluster,
    table: str,
    curve: Curve,
    what: str,
    options: argparse.Namespace,
) -> tuple[float, float]:
    """(mean over the workloads, wall seconds of one)."""
    values, started = [], time.perf_counter()
    for seed, workload in zip(options.seeds, workloads, strict=False):
        settings = Settings(
            policy=curve.policy,
            agnostic=curve.agnostic,
            space_sharing=curve.space_sharing,
            rules=RULES[options.rules],
            seed=seed,
            measure=tuple(map(int, options.measure.split(":"))) if workload.endless else None,
        )
        values.append(value_of(simulate(workload, cluster, built_in_table(table), settings), what))
    return sum(values) / len(values), (time.perf_counter() - started) / len(values)


def points(options: argparse.Namespace):
    """Every number asked for, one after the other."""
    if options.figure == "physical":
        for trace, curve, published, what in PHYSICAL_RUNS:
            if curve.policy in POLICY_NAMES:
                found = measure([read_trace(Path(trace))], PHYSICAL, "physical_cluster", curve, what, options)
                yield as_point("physical", curve, trace, published, found, "h")
    elif options.figure == "makespan":
        for curve in MAKESPAN:
            for count in options.counts:
                published = PUBLISHED["static_multiple_makespan_hours"][curve.key].get(f"{count:.1f}")
                if published is not None and wanted(curve, options):
                    table = built_in_table()
                    workloads = [static(table, count=count, seed=seed) for seed in options.seeds]
                    found = measure(workloads, SIMULATED, "simulation", curve, "makespan", options)
                    yield as_point("makespan", curve, f"{count} jobs", published, found, "h")
    else:
        name, several, curves, what = CONTINUOUS[options.figure]
        for curve in curves:
            for rate in options.rates:
                published = PUBLISHED[name].get(f"{rate:.2f}", {}).get(curve.key)
                if published is not None and wanted(curve, options):
                    table = built_in_table()
                    workloads = [
                        continuous(table, jobs_per_hour=rate, seed=seed, several_gpus=several)
                        for seed in options.seeds
                    ]
                    found = measure(workloads, SIMULATED, "simulation", curve, what, options)
                    yield as_point(
                        options.figure,
                        curve,
                        f"{rate:g} jobs/h",
                        published,
                        found,
                        "" if what == "ftf" else "h",
                    )


def wanted(curve: Curve, options: argparse.Namespace) -> bool:
    return curve.policy in POLICY_NAMES and (not options.curves or curve.key in options.curves)


def as_point(
    figure: str, curve: Curve, at: str, published: float, found: tuple[float, float], unit: str
) -> Point:
    return Point(
        figure=figure,
        curve=curve.label,
        at=at,
        published=published,
        ours=found[0],
        unit=unit,
        seconds=found[1],
    )


HEADER = "| figure | curve | at | published | ours | deviation | wall s |\n|---|---|---|---|---|---|---|"


def row(point: Point) -> str:
    unit = f" {point.unit}" if point.unit else ""
    return (
        f"| {point.figure} | {point.curve} | {point.at} | {point.published:.2f}{unit} "
        f"| {point.ours:.2f}{unit} | {point.deviation:+.1%} | {point.seconds:.1f} |"
    )


def plot(found: list[Point], file: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    for number, curve in enumerate(dict.fromkeys(point.curve for point in found)):
        mine = [point for point in found if point.curve == curve]
        places = [float(point.at.split()[0]) if point.at[0].isdigit() else 0.0 for point in mine]
        axes.plot(places, [p.published for p in mine], "--", color=f"C{number}", label=f"{curve}, published")
        axes.plot(places, [p.ours for p in mine], "o-", color=f"C{number}", label=f"{curve}, ours")
    axes.set(title=f"Figure {found[0].figure}", xlabel=found[0].at.split()[-1], ylabel=found[0].unit)
    axes.legend(fontsize="small")
    figure.savefig(file, dpi=110)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--figure", choices=["physical", "makespan", *CONTINUOUS], default="physical")
    parser.add_argument("--rates", type=float, nargs="+", default=[2.0, 4.0])
    parser.add_argument("--counts", type=int, nargs="+", default=[100, 300, 500, 700])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--measure", default="4000:5000", help="jobs measured, FIRST:END")
    parser.add_argument("--rules", choices=sorted(RULES), default="gavel")
    parser.add_argument("--curves", nargs="*", help="names of the published curves, as in the JSON file")
    parser.add_argument("--write", type=Path, help="write the table here too")
    parser.add_argument("--plot", type=Path, help="draw the curves here")
    options = parser.parse_args()
    print(HEADER)
    found = []
    for point in points(options):
        found.append(point)
        print(row(point), flush=True)
    if not found:
        sys.exit("nothing to compare: no published value at these places, or a policy that is not there")
    if options.write:
        options.write.write_text("\n".join([HEADER, *map(row, found)]) + "\n")
    if options.plot:
        plot(found, options.plot)


if __name__ == "__main__":
    main()
