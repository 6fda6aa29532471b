"""The cost of an allocation over the number of jobs (the dissertation's Figure 5.14).

    python benchmarks/allocation/growth.py                          # 32 to 2,048 jobs, a table
    python benchmarks/allocation/growth.py --picture growth.svg     # and log-log curves (needs matplotlib)

As the source measures it: n single-GPU jobs drawn from Gavel's workload, n/4 GPUs of each of k80, p100, v100;
one whole call of ``allocate``, building included; hierarchical with 5 entities of weight 1 to 3; space
sharing with every pair of jobs that the measured table knows, and once more with speeds of every job and
pair changed by up to 10 % at random, so that no two are alike. Seconds are CPU seconds of one thread, the
median of ``--trials`` seeds, so that a busy machine does not count;
growth is the slope of log seconds over log jobs from 128 jobs up. The targets: 5 entities at 2,048 jobs in
2 s (Gavel: minutes), space sharing at 512 jobs in 2 s (Gavel: up to 10 minutes).
"""

import argparse
import dataclasses
import io
import itertools
import random
import statistics
import sys
import time
from pathlib import Path

import numpy as np
from ballast_policies.allocation.problem import Entity, Job, Pair, Problem
from ballast_policies.allocation.registry import allocate
from ballast_policies.simulator.workloads import Generated
from ballast_policies.throughput.table import built_in_table

GPU_TYPES = ("k80", "p100", "v100")
ENTITIES = 5
FITTED_FROM = 128
DARK = """text { fill: #1f2937 }
    @media (prefers-color-scheme: dark) {
      text { fill: #e6edf3 }
      [style*="fill: #ffffff"] { fill: #161b22 !important }
      [style*="stroke: #000000"] { stroke: #8b98a9 !important }
    }
"""
"""The colours of the other pictures, ``scripts/pictures.py``."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """A policy to time, up to a number of jobs, with the target that the project sets for it."""

    policy: str
    sharing: bool = False
    distinct: bool = False
    most_jobs: int = 2048
    target: tuple[int, float] | None = None

    @property
    def name(self) -> str:
        """Name in the table."""
        return (
            self.policy
            + (", space sharing" if self.sharing else "")
            + (", no two jobs alike" if self.distinct else "")
        )


CURVES = (
    Curve(policy="max-min-fairness"),
    Curve(policy="makespan"),
    Curve(policy="finish-time-fairness"),
    Curve(policy="water-filling"),
    Curve(policy="hierarchical", target=(2048, 2.0)),
    Curve(policy="max-min-fairness", sharing=True, most_jobs=512, target=(512, 2.0)),
    Curve(policy="max-min-fairness", sharing=True, distinct=True, most_jobs=512),
)


def posed(jobs: int, seed: int, *, sharing: bool, distinct: bool = False) -> Problem:
    """The problem that the source times: its job types, a quarter of a GPU of each type for each job."""
    table = built_in_table()
    drawn = list(Generated(table=table, count=jobs, seed=seed, several_gpus=False))
    spread = random.Random(seed)
    entities = {f"entity-{e}": Entity(weight=float(spread.randint(1, 3))) for e in range(ENTITIES)}
    capacity = dict.fromkeys(GPU_TYPES, max(1, jobs // 4))
    rates = {t.type: {g: table.alone(t.type, g) for g in GPU_TYPES} for t in drawn}
    problem = Problem(
        gpu_types=GPU_TYPES,
        capacity=capacity,
        entities=entities,
        jobs=tuple(
            Job(
                name=f"job-{m}",
                throughput=rates[job.type],
                steps_remaining=job.steps,
                entity=f"entity-{spread.randrange(ENTITIES)}",
            )
            for m, job in enumerate(drawn)
        ),
        pairs=_pairs([job.type for job in drawn]) if sharing else (),
    )
    return _distinct(problem, spread) if distinct else problem


def _distinct(problem: Problem, draw: random.Random) -> Problem:
    """Every job's and pair's speed on every type changed by up to a tenth."""

    def near(rate: float) -> float:
        return rate * draw.uniform(0.9, 1.1)

    return dataclasses.replace(
        problem,
        jobs=tuple(
            dataclasses.replace(job, throughput={g: near(rate) for g, rate in job.throughput.items()})
            for job in problem.jobs
        ),
        pairs=tuple(
            Pair(jobs=pair.jobs, throughput={g: (near(a), near(b)) for g, (a, b) in pair.throughput.items()})
            for pair in problem.pairs
        ),
    )


def _pairs(types: list) -> tuple[Pair, ...]:
    table = built_in_table()
    known = {
        (a, b): {g: table.shared(a, b, g) for g in GPU_TYPES}
        for a, b in itertools.product(set(types), repeat=2)
    }
    return tuple(
        Pair(jobs=(f"job-{a}", f"job-{b}"), throughput=known[types[a], types[b]])
        for a, b in itertools.combinations(range(len(types)), 2)
    )


def seconds(curve: Curve, jobs: int, trials: int) -> tuple[float, float]:
    """(median CPU seconds of a call, largest certified gap) over the seeds."""
    taken, gaps = [], []
    for trial in range(trials):
        problem = posed(jobs, trial + 2, sharing=curve.sharing, distinct=curve.distinct)
        begin = time.process_time()
        answer = allocate(curve.policy, problem, space_sharing=curve.sharing)
        taken.append(time.process_time() - begin)
        gaps.append(answer.gap or 0.0)
    return statistics.median(taken), max(gaps)


def slope(points: dict[int, float]) -> float:
    """Exponent of the growth, fitted from FITTED_FROM jobs up."""
    large = {n: s for n, s in points.items() if n >= FITTED_FROM}
    if len(large) < 2:
        return float("nan")
    return float(np.polyfit(np.log(list(large)), np.log(list(large.values())), 1)[0])


def draw(curves: dict[str, dict[int, float]], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    matplotlib.rcParams |= {"svg.hashsalt": "ballast", "svg.fonttype": "none"}
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6.4, 5.2), layout="constrained")
    for name, points in curves.items():
        axes.loglog(list(points), list(points.values()), marker="o", label=f"{name} (n^{slope(points):.1f})")
    axes.set(xlabel="jobs", ylabel="CPU seconds of one allocation")
    axes.grid(visible=True, which="major", alpha=0.3)
    figure.legend(fontsize="small", ncols=2, loc="outside lower center", frameon=False)
    text = io.StringIO()
    figure.savefig(text, metadata={"Date": None})
    path.write_text(text.getvalue().replace("</style>", f"{DARK}</style>", 1))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--jobs", type=int, nargs="+", default=[32, 64, 128, 256, 512, 1024, 2048])
    parser.add_argument("--trials", type=int, default=3)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    allocate("max-min-fairness", posed(8, 0, sharing=False))  # imports and first calls are not the solve
    curves: dict[str, dict[int, float]] = {}
    print(
        "| policy | " + " | ".join(f"{n} jobs" for n in options.jobs) + " | growth | largest gap | target |"
    )
    print("|---" * (len(options.jobs) + 4) + "|")
    for curve in CURVES:
        points, worst = {}, 0.0
        for jobs in options.jobs:
            if jobs <= curve.most_jobs:
                print(f"{curve.name}: {jobs} jobs ...", file=sys.stderr)
                points[jobs], gap = seconds(curve, jobs, options.trials)
                worst = max(worst, gap)
        curves[curve.name] = points
        cells = [f"{points[n]:.3f} s" if n in points else "" for n in options.jobs]
        target = ""
        if curve.target is not None and curve.target[0] in points:
            at, limit = curve.target
            target = f"{limit:g} s at {at} jobs: {'reached' if points[at] <= limit else 'missed'}"
        print(
            f"| {curve.name} | {' | '.join(cells)} | n^{slope(points):.2f} | {worst:.1e} | {target} |",
            flush=True,
        )
    if options.picture is not None:
        draw(curves, options.picture)


if __name__ == "__main__":
    main()
