"""Figures 5.12 and 5.13: three teams of six jobs on 3 V100, 3 P100 and 3 K80, one job more at a time.

    python lab/benchmarks/simulator/published_hierarchical.py [--keep]

The recipe is that of Gavel's notebook (evaluation/hierarchical.ipynb): job types drawn by Python's
generator with seed 0 from Gavel's job table, teams of weight 1, 2 and 3, jobs of weight 1 and 2 by turns
(fairness) or
in order of arrival (FIFO).  Compared: the sum over the jobs of throughput / throughput of the equal
share.  No simulation: one allocation for each number of jobs.
"""

import argparse
import random
import time
from typing import Any

from ballast_lab.comparison import Comparison, near
from ballast_policies.allocation.problem import Entity, Job, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.simulator.workloads import DISTRIBUTED
from ballast_policies.throughput.table import JobType, built_in_table
from published import keep
from published_figures import PUBLISHED

TYPES = ("k80", "p100", "v100")
TEAM = 6
FIGURES = {"5.12": ("fairness", "fairness_fig5.12"), "5.13": ("fifo", "fifo_fig5.13")}
CURVES = {
    "aware": ("perf_aware_norm_throughput_by_num_jobs", False),
    "heterogeneity-agnostic": ("agnostic_norm_throughput_by_num_jobs", True),
}


def problem(inside: str, count: int) -> Problem:
    """The first ``count`` jobs."""
    draw, table = random.Random(0), built_in_table()
    jobs = []
    for i in range(count):
        kind = JobType(name=draw.choice(DISTRIBUTED)[0])
        jobs.append(
            Job(
                name=f"{i:02d}",
                throughput={gpu_type: table.alone(kind, gpu_type) for gpu_type in TYPES},
                weight=i % 2 + 1 if inside == "fairness" else 1,
                entity=f"team{i // TEAM}",
                elapsed=float(count - i),
            )
        )
    teams = {f"team{e}": Entity(weight=e + 1, policy=inside) for e in range(3)}
    return Problem(gpu_types=TYPES, capacity=dict.fromkeys(TYPES, 3), jobs=tuple(jobs), entities=teams)


def published(figure: str, curve: str, count: int) -> list[float]:
    name = FIGURES[figure][1]
    entry = next(e for e in PUBLISHED["hierarchical_3v100_3p100_3k80"] if e["name"] == name)
    return entry[CURVES[curve][0]][count - 1]


def record(figure: str, curve: str, count: int) -> dict[str, Any]:
    started = time.perf_counter()
    posed = problem(FIGURES[figure][0], count)
    allocation = allocate("hierarchical", posed, agnostic=CURVES[curve][1])
    volumes = [allocation.levels[job.name] * job.weight for job in posed.jobs]
    return {
        "figure": figure,
        "curve": curve,
        "at": float(count),
        "seed": 0,
        "rules": "",
        "measured": "",
        "values": {"total": sum(volumes), "volumes": [round(volume, 4) for volume in volumes]},
        "wall_seconds": round(time.perf_counter() - started, 3),
        "command": "python lab/benchmarks/simulator/published_hierarchical.py",
    }


def main() -> Comparison:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--keep", action="store_true", help="enter the runs in the file of runs")
    options = parser.parse_args()
    print("| figure | curve | jobs | published | ours | deviation | largest of a job |")
    print("|---|---|---|---|---|---|---|")
    points = []
    for figure in FIGURES:
        for curve in CURVES:
            for count in range(1, 19):
                found = record(figure, curve, count)
                if options.keep:
                    keep(found)
                theirs = published(figure, curve, count)
                points.append(near(f"{figure}, {curve}, {count} jobs", sum(theirs), found["values"]["total"]))
                ours, off = found["values"]["total"], zip(found["values"]["volumes"], theirs, strict=True)
                print(
                    f"| {figure} | {curve} | {count} | {sum(theirs):.3f} | {ours:.3f} "
                    f"| {ours / sum(theirs) - 1:+.1%} | {max(abs(a - b) for a, b in off):.3f} |"
                )
    return Comparison(tuple(points), "Band: 5 % around what is published.")


if __name__ == "__main__":
    main()
