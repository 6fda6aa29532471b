"""Speed of the simulator.

    python benchmarks/simulator/speed.py            # whole processes on Gavel's traces
    python benchmarks/simulator/speed.py --large    # rounds of a 10,000-GPU cluster

Gavel's own simulator took 20 to 70 s for each of the runs on its physical traces (2 cores, Python 3.11,
HiGHS); the ratio is to 20 s, the fastest.
"""

import argparse
import subprocess
import sys
import time

import numpy as np
from ballast_lab.arrays.by_shares import Claims, select

GAVEL_SECONDS = 20.0
CLUSTER = "v100=8,p100=16,k80=24"
RUNS = {
    "LAS, aware": ["--policy", "max-min-fairness", "--trace", "max_min_fairness"],
    "LAS, heterogeneity-agnostic": [
        "--policy",
        "max-min-fairness",
        "--trace",
        "max_min_fairness",
        "--agnostic",
    ],
    "LAS, the operator's rules": [
        "--policy",
        "max-min-fairness",
        "--trace",
        "max_min_fairness",
        "--rules",
        "ballast",
    ],
    "makespan, aware": ["--policy", "makespan", "--trace", "minimize_makespan"],
    "Gandiva": ["--policy", "gandiva", "--trace", "minimize_makespan", "--space-sharing"],
}


def whole_processes() -> None:
    print("| run | wall s, best of 3 | times faster than 20 s |\n|---|---|---|")
    for name, arguments in RUNS.items():
        command = [sys.executable, "-m", "ballast_operator.cli", "simulate", *arguments]
        command += ["--cluster", CLUSTER, "--throughputs", "physical_cluster", "--output", "json"]
        best = float("inf")
        for _ in range(3):
            started = time.perf_counter()
            subprocess.run(command, check=True, capture_output=True)
            best = min(best, time.perf_counter() - started)
        print(f"| {name} | {best:.2f} | {GAVEL_SECONDS / best:.0f} |", flush=True)


def large_rounds(jobs: int, gpus: int, types: int, repeats: int) -> None:
    random = np.random.default_rng(0)
    size = random.choice([1, 2, 4, 8], p=[0.7, 0.1, 0.15, 0.05], size=jobs)
    job, column = np.divmod(random.permutation(jobs * types), types)
    claims = Claims(job=job, partner=np.full(len(job), -1), column=column, gpus=size[job])
    room = np.full(types, gpus // types)
    print(f"{jobs} jobs, {gpus} GPUs of {types} types, {len(claims)} claims a round")
    started = time.perf_counter()
    for _ in range(repeats):
        granted = select(claims, room)
    taken = (time.perf_counter() - started) / repeats
    print(f"  {taken * 1000:.1f} ms a round, {len(granted)} granted")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--large", action="store_true", help="only rounds of a large cluster")
    options = parser.parse_args()
    if options.large:
        large_rounds(jobs=10_000, gpus=10_000, types=3, repeats=20)
        large_rounds(jobs=20_000, gpus=10_000, types=10, repeats=5)
    else:
        whole_processes()


if __name__ == "__main__":
    main()
