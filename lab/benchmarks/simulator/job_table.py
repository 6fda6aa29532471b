"""Order of its job types with which Gavel's published curves were drawn.

    python lab/benchmarks/simulator/job_table.py

Tries the 5,040 orders of the seven families of models. First, where it is decided which draws are
refused (a gang's type is drawn until one comes that runs on several GPUs): the longest jobs of seeds 0,
1 and 2 among the first 100 and the first 300, whose mean is the published makespan of 100 to 300 jobs.
Then, for the orders that are left, the completion times at 0.4 jobs/h, where no job waits for another:
the mean duration of jobs 4000 to 4999 of seed 0 on the V100 (LAS, aware), on their fastest type (FIFO,
aware) and on all three by turns (LAS, heterogeneity-agnostic), plus the 0.17 h that the simulator lets a
job wait for its first round.
"""

import itertools
import random

from ballast_policies.simulator.workloads import DISTRIBUTED, _draw_duration, _draw_gpus
from ballast_policies.throughput.table import JobType, built_in_table
from published_figures import MULTIPLE, PUBLISHED, SINGLE

TYPES = ("v100", "p100", "k80")
MAKESPAN = PUBLISHED["static_multiple_makespan_hours"]["Gavel"]["200.0"]
CURVES = ("max_min_fairness_perf", "fifo_perf", "max_min_fairness")
FIRST_ROUND = 0.17
HOUR = 3600.0

Table = tuple[tuple[str, bool], ...]


def drawn(table: Table, seed: int, count: int, *, several_gpus: bool) -> list[tuple[str, int, float]]:
    """(name, gpus, hours on the V100) of the first jobs."""
    jobs, found = random.Random(seed + 2), []
    for _ in range(count):
        gpus, duration = _draw_gpus(jobs), _draw_duration(jobs)
        gpus = gpus if several_gpus else 1
        name, distributed = jobs.choice(table)
        while gpus > 1 and not distributed:
            name, distributed = jobs.choice(table)
        found.append((name, gpus, duration / HOUR))
    return found


def makespan(table: Table, count: int) -> float:
    longest = (max(job[2] for job in drawn(table, seed, count, several_gpus=True)) for seed in range(3))
    return sum(longest) / 3


def unhurried(table: Table, *, several_gpus: bool) -> tuple[float, float, float]:
    """Mean hours on the V100, on the fastest type, on all by turns."""
    known, sums = built_in_table(), [0.0, 0.0, 0.0]
    for name, gpus, hours in drawn(table, 0, 5000, several_gpus=several_gpus)[4000:]:
        rates = [known.alone(JobType(name=name, gpus=gpus), gpu_type) for gpu_type in TYPES]
        for i, rate in enumerate((rates[0], max(rates), sum(rates) / 3)):
            sums[i] += hours * rates[0] / rate / 1000
    return sums[0] + FIRST_ROUND, sums[1] + FIRST_ROUND, sums[2] + FIRST_ROUND


def main() -> None:
    families: dict[str, list[tuple[str, bool]]] = {}
    for name, distributed in DISTRIBUTED:
        families.setdefault(name.split(" (")[0], []).append((name, distributed))
    orders: dict[tuple[bool, ...], list[tuple[str, ...]]] = {}
    for order in itertools.permutations(families):
        refused = tuple(kind[1] for family in order for kind in families[family])
        orders.setdefault(refused, []).append(order)
    print(f"{len(orders)} patterns of refusals in 5,040 orders; published makespan {MAKESPAN:.3f} h")
    left = []
    for same in orders.values():
        table = tuple(kind for family in same[0] for kind in families[family])
        if all(abs(makespan(table, count) - MAKESPAN) < 0.01 for count in (100, 300)):
            left += same
    print(f"{len(left)} orders have it; their distance from the six completion times at 0.4 jobs/h:")
    published = [PUBLISHED[source]["0.40"][curve] for source in (SINGLE, MULTIPLE) for curve in CURVES]
    ranked = []
    for order in left:
        table = tuple(kind for family in order for kind in families[family])
        ours = unhurried(table, several_gpus=False) + unhurried(table, several_gpus=True)
        ranked.append((max(abs(a - b) for a, b in zip(ours, published, strict=True)), ours, order))
    for distance, ours, order in sorted(ranked)[:5]:
        print(f"{distance:.3f} h  {' '.join(f'{hours:.2f}' for hours in ours)}  {', '.join(order)}")
    print(f"published {' '.join(f'{hours:.2f}' for hours in published)}")


if __name__ == "__main__":
    main()
