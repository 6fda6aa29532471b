"""Gavel's scheduling mechanism and headlines (dissertation 5.7.2, 5.7.3, 5.7.5 and 5.7.6), each beside ours.

Table 5.3 and the headlines read what ``published_runs.json`` keeps, with the command of each run; the others
are run, on fewer GPUs and jobs than published.
"""

import itertools
import json
import random
import types
from pathlib import Path
from unittest import mock

from ballast_lab.arrays.engine import simulate
from ballast_lab.arrays.rules import ArraySettings
from ballast_lab.arrays.solving import ShareSolver
from ballast_lab.comparison import Comparison, Point, near
from ballast_lab.gavel.shares import GAVEL_RULES
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import Generated, read_trace
from ballast_policies.throughput.estimator import PairSpeeds
from ballast_policies.throughput.table import built_in_table
from published_figures import PHYSICAL

KEPT = Path(__file__).with_name("published_runs.json")
SMALL = SimulatedCluster(gpus={"v100": 4, "p100": 4, "k80": 4})
JOBS_PER_HOUR = 0.6
TABLE_53 = (
    # Curve, what, hours on real GPUs, hours simulated there.
    ("max_min_fairness_perf", "jct_hours", 3.4, 3.7),
    ("max_min_fairness", "jct_hours", 5.1, 5.4),
    ("min_total_duration_perf", "makespan_hours", 17.7, 17.6),
    ("gandiva", "makespan_hours", 21.3, 22.1),
)
TABLE_54 = {
    # Percent of time without and with renewed leases.
    "ResNet-18": (0.94, 0.17),
    "ResNet-50": (1.58, 0.25),
    "LSTM": (2.91, 0.47),
    "Transformer": (0.77, 0.11),
    "CycleGAN": (0.77, 0.11),
}
HEADLINES = (
    # What, published, figure, at, curve above the line, curve below it, value.
    ("LAS, one GPU", 3.5, "5.9", 5.6, "max_min_fairness", "max_min_fairness_perf", "jct_hours"),
    ("LAS, gangs", 2.2, "5.10", 2.6, "max_min_fairness", "max_min_fairness_perf", "jct_hours"),
    (
        "Gandiva over space sharing, one GPU",
        2.2,
        "5.9",
        5.6,
        "gandiva",
        "max_min_fairness_packed",
        "jct_hours",
    ),
    (
        "Gandiva over space sharing, gangs",
        2.2,
        "5.10",
        2.6,
        "gandiva",
        "max_min_fairness_packed",
        "jct_hours",
    ),
    ("makespan: FIFO", 2.5, "makespan", 700, "FIFO", "Gavel", "makespan_hours"),
    ("makespan: Gandiva", 1.4, "makespan", 700, "Gandiva", "Gavel", "makespan_hours"),
    ("makespan: without space sharing", 1.08, "makespan", 700, "Gavel", "Gavel w/ SS", "makespan_hours"),
    ("FIFO, one GPU", 2.7, "fifo-single", 5.2, "fifo", "fifo_perf", "jct_hours"),
)


def kept(figure: str, curve: str, at: float, what: str) -> float:
    """The mean over the seeds of a value that was kept; not a number: no such run."""
    runs = json.loads(KEPT.read_text())
    wanted = (figure, curve, float(at))
    found = [run["values"] for run in runs if (run["figure"], run["curve"], run["at"]) == wanted]
    return sum(values[what] for values in found) / len(found) if found else float("nan")


def physical() -> Comparison:
    """Table 5.3: ours within the 8 % by which their simulator and their GPUs agree, and its two ratios."""
    ours = [kept("physical", curve, 0.0, what) for curve, what, _, _ in TABLE_53]
    return Comparison(
        (
            *(
                near(f"{curve}, simulated; {real} h on GPUs", said, value, 0.08)
                for (curve, _, real, said), value in zip(TABLE_53, ours, strict=True)
            ),
            near("completion time, agnostic over aware", 1.5, ours[1] / ours[0], 0.1),
            near("makespan, Gandiva over aware", 1.2, ours[3] / ours[2], 0.1),
        )
    )


def headlines() -> Comparison:
    """The ratios in the text of 5.7.3."""
    return Comparison(
        tuple(
            near(
                f"{what}, at {at}", said, kept(figure, above, at, value) / kept(figure, below, at, value), 0.1
            )
            for what, said, figure, at, above, below, value in HEADLINES
        )
    )


def renewals() -> Comparison:
    """Table 5.4: the part of the overhead that is left where leases are renewed, on the physical trace."""
    settings = ArraySettings(policy="max-min-fairness", rules=GAVEL_RULES)
    found = simulate(
        read_trace(Path("max_min_fairness")), PHYSICAL, built_in_table("physical_cluster"), settings
    )
    left = 1 - found.lease_extensions / found.lease_opportunities
    return Comparison(
        tuple(near(model, least / most, left, 0.25) for model, (most, least) in TABLE_54.items())
    )


def run(**settings: object) -> float:
    """Mean completion time in hours of jobs 100 to 300 on 12 GPUs under LAS, on one GPU each."""
    drawn = Generated(table=built_in_table(), jobs_per_hour=JOBS_PER_HOUR, seed=0, several_gpus=False)
    jobs = drawn.workload()
    chosen = ArraySettings(
        policy="max-min-fairness",
        measure=(100, 300),
        **settings,  # type: ignore[arg-type]
    )
    return simulate(jobs, SMALL, built_in_table(), chosen).average_completion_time / 3600


def rounds() -> Comparison:
    """Figure 5.15: completion times by length of a round, over shares that are given exactly."""
    ideal = run(ideal=True)
    by_minutes = {minutes: run(round_seconds=60.0 * minutes) for minutes in (6, 12, 24, 48)}
    return Comparison(
        (
            near("rounds of 6 min over ideal shares", 1.0, by_minutes[6] / ideal),
            Point(
                "rounds of 48 min over rounds of 6 min",
                "slower",
                by_minutes[48] / by_minutes[6],
                low=1.0,
                high=2.0,
            ),
            Point(
                "lengths after which the next is slower, of 6, 12, 24, 48 min",
                "3",
                sum(by_minutes[m] < by_minutes[2 * m] for m in (6, 12, 24)),
                low=3,
                high=3,
            ),
        )
    )


def estimated() -> Comparison:
    """Figure 5.16: space sharing with the speeds of 3 of 10 pairs measured and the others completed."""
    table, draws = built_in_table(), random.Random(0)
    jobs = Generated(table=table, jobs_per_hour=JOBS_PER_HOUR, seed=0, several_gpus=False).workload()
    names = sorted({job.type for job in itertools.islice(jobs.jobs, 500)}, key=str)
    measured: dict[str, dict[tuple[str, str], float]] = {}
    for kind in SMALL.gpus:
        for one in names:
            for other in names:
                alone = table.alone(one, kind)
                if alone > 0 and draws.random() < 0.3:
                    shared = table.shared(one, other, kind)[0] / alone
                    measured.setdefault(kind, {})[one.name, other.name] = shared
    speeds = PairSpeeds(measured)

    def shared(one, other, kind):  # type: ignore[no-untyped-def]
        pairs = ((one, other), (other, one))
        return tuple(table.alone(a, kind) * speeds.relative(a.name, b.name, kind).value for a, b in pairs)

    believed = types.SimpleNamespace(
        _ledger=types.SimpleNamespace(
            table=types.SimpleNamespace(alone=table.alone, shared=shared), gpu_types=tuple(SMALL.gpus)
        )
    )
    useful = ShareSolver._useful
    alone, oracle = run(), run(space_sharing=True)
    with mock.patch.object(ShareSolver, "_useful", lambda _, a, b: useful(believed, a, b)):
        guessed = run(space_sharing=True)
    return Comparison(
        (
            Point("estimated over known speeds", "very small loss", guessed / oracle, low=0.97, high=1.07),
            Point("no space sharing over estimated", "more", alone / guessed, low=1.0, high=3.0),
        )
    )
