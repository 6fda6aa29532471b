"""A year of a 10,000-GPU cluster.

    python benchmarks/simulator/year.py                       # a year in rounds of an hour
    python benchmarks/simulator/year.py --days 14 --round 360 # what the coarse rounds cost in truth

4,000 V100, 4,000 P100 and 2,000 K80; gangs of 1 to 8 from Gavel's distributions; heterogeneity-aware max-min
fairness solved again each round in which jobs have come or gone; the operator's accounts and priorities.
Every job is followed from its arrival to its end: what is coarse is only the length of a round (a job that
arrives waits for the next, and GPUs that come free within one idle until its end).
"""

import argparse
import json
import sys
import time

from ballast_lab.commands.simulate_arrays import RULES, array_simulation
from ballast_policies.simulator.clock import SimulationProgress
from ballast_policies.simulator.settings import SimulatedCluster
from ballast_policies.simulator.workloads import Generated, Workload
from ballast_policies.throughput.table import built_in_table

CLUSTER = {"v100": 4000, "p100": 4000, "k80": 2000}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--days", type=float, default=365.0)
    parser.add_argument("--jobs-per-hour", type=float, default=200.0)
    parser.add_argument("--round", type=float, default=3600.0, help="seconds")
    parser.add_argument("--policy", default="max-min-fairness")
    parser.add_argument("--rules", choices=sorted(RULES), default="whole-rounds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measure", help="jobs measured, FIRST:END; default: all")
    options = parser.parse_args()
    table = built_in_table()
    count = round(options.days * 24 * options.jobs_per_hour)
    jobs = Generated(table=table, count=count, seed=options.seed, jobs_per_hour=options.jobs_per_hour)
    workload = Workload(name=f"{options.days:g} days, {options.jobs_per_hour:g} jobs/h", jobs=jobs)
    simulate = array_simulation(
        options.rules,
        policy=options.policy,
        round_seconds=options.round,
        seed=options.seed,
        record_jobs=False,
        measure=tuple(map(int, options.measure.split(":"))) if options.measure else None,
    )
    started = time.perf_counter()
    last = started

    def progress(moment: SimulationProgress) -> None:
        nonlocal last
        if time.perf_counter() - last > 30:
            last = time.perf_counter()
            done = f"{moment.done} of {moment.total} jobs"
            print(f"day {moment.seconds / 86400:.1f}: {done}, {last - started:.0f} s", file=sys.stderr)

    result = simulate(workload, SimulatedCluster(gpus=CLUSTER), table, progress=progress)
    found = result.to_json()
    found["finish_time_fairness"].pop("per_job")
    seconds = {
        "wall_seconds": round(time.perf_counter() - started, 1),
        "processor_seconds": round(time.process_time(), 1),
    }
    print(json.dumps({**found, "jobs": count, **seconds}, indent=1))


if __name__ == "__main__":
    main()
