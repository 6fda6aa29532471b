"""Gavel's cost experiment (dissertation section 5.7.3): 500 jobs, ResNet-50 and A3C, with and without SLOs.

    python lab/benchmarks/prices/gavel_cost.py [--jobs 500] > lab/benchmarks/prices/gavel_cost.json

Durations of 0.5 to 8 days alone on a V100, deadlines of 1.2, 2 or 10 times that.  The dissertation states
neither cluster, arrivals nor batch size.  Here 500 GPUs of each type, so that no job waits and every deadline
can be kept, all jobs at the start, Google Cloud's on-demand prices, and each batch size of ResNet-50 in turn.
"""

import argparse
import json
import random
from typing import Any

from ballast_lab.commands.simulate_arrays import array_simulation
from ballast_lab.comparison import Comparison, Point, near
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import TraceJob, Workload
from ballast_policies.throughput.table import JobType, built_in_table

PRICES = {"k80": 0.45, "p100": 1.46, "v100": 2.48}
DAYS = (0.5, 1.0, 2.0, 4.0, 8.0)
FACTORS = (1.2, 2.0, 10.0)
POLICIES = ("max-throughput", "min-cost", "min-cost-slo")
BATCH_SIZES = (16, 32, 64, 128)


def workload(count: int, batch_size: int, seed: int = 0) -> Workload:
    """The jobs, all there at the start."""
    draws, table = random.Random(seed), built_in_table()
    jobs = []
    for _ in range(count):
        kind = JobType(name=draws.choice(("A3C", f"ResNet-50 (batch size {batch_size})")))
        steps = draws.choice(DAYS) * 86_400.0 * table.alone(kind, "v100")
        jobs.append(
            TraceJob(type=kind, steps=steps, arrival=0.0, weight=1.0, deadline_factor=draws.choice(FACTORS))
        )
    return Workload(name=f"{count} jobs of ResNet-50 and A3C", jobs=tuple(jobs))


def run(count: int, batch_size: int) -> dict[str, Any]:
    """Cost in USD and part of the deadlines missed, by policy."""
    cluster = SimulatedCluster(gpus=dict.fromkeys(PRICES, count), prices=PRICES)
    found: dict[str, Any] = {"batch_size": batch_size}
    for policy in POLICIES:
        simulate = array_simulation("gavel", policy=policy, ideal=True)
        result = simulate(workload(count, batch_size), cluster, built_in_table())
        found[policy] = {
            "cost_usd": result.cost,
            "missed": result.deadline_violations / result.deadlines,
        }
    base = found["max-throughput"]["cost_usd"]
    found["cheaper_without_slos"] = base / found["min-cost"]["cost_usd"]
    found["cheaper_with_slos"] = base / found["min-cost-slo"]["cost_usd"]
    return found


def comparison() -> Comparison:
    """Comparison at batch size 128, whose speeds by GPU type are nearest to those in the dissertation."""
    found = run(500, 128)
    kept = found["min-cost-slo"]["missed"]
    return Comparison(
        (
            near("times cheaper without deadlines", 1.4, found["cheaper_without_slos"], 0.15),
            near("deadlines missed then", 0.35, found["min-cost"]["missed"], 0.15),
            near("times cheaper with deadlines", 1.2, found["cheaper_with_slos"], 0.15),
            Point("deadlines missed then", "0", kept, low=0.0, high=0.0),
        )
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--jobs", type=int, default=500)
    options = parser.parse_args()
    print(json.dumps([run(options.jobs, size) for size in BATCH_SIZES], indent=2))


if __name__ == "__main__":
    main()
