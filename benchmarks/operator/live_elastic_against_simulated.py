"""The same elastic jobs on a live cluster and in the simulator: how far are average completion times apart?

    python benchmarks/operator/live_elastic_against_simulated.py            # some seven minutes
    python benchmarks/operator/live_elastic_against_simulated.py --output json

Real: API server, controllers, kube-scheduler, node agents, the operator, and the trainers with all that they
do. Their layers sleep (``live/sleeping_model.py``), so that other programs change no speeds.

The simulator is ``ballast simulate --elastic FILE --rules ballast`` on a file of the same jobs and arrivals.
What it is told was measured before the comparison: steps/s on 1 to 4 GPUs by ranks without a cluster, and
from two jobs on the same cluster how long a start takes, a growth from its decision on, the pause of a change
of size, and how long it takes from the last step until GPUs are free.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ballast_policies.simulator.elastic import ElasticResult, OperatorRules, simulate_rules
from ballast_policies.simulator.elastic_file import read_workload
from kubernetes import client
from live.cluster import next_round
from live.reports import Costs, Noted, costs, stretches
from live.trainer_jobs import WHERE, trainer_job
from live_elastic import LIMIT_SECONDS, NODES, ROUND_SECONDS, running

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE.parent / "trainer"), str(HERE / "live")]

import calibrated  # noqa: E402 - found beside the other benchmarks of the trainer

LAYERS, FORWARD_SECONDS, MICROBATCHES = 8, 0.008, 8
SIZES = (1, 2, 3, 4)
MODEL = {
    "name": "sleeping_model:build",
    "layers": LAYERS,
    "args": {"layers": LAYERS, "seconds": FORWARD_SECONDS},
}
FIRST = ((0.0, 10),)
"""Handed in before: the first launch of a cluster also starts the process that trainers are forked from."""
CALIBRATION = ((0.0, 130), (10.0, 40))
"""(arrival in s, steps): the first job makes room for the second, and grows when that is done."""
JOBS = ((0.0, 130), (8.0, 90), (47.0, 105), (95.0, 65), (140.0, 90))


def steps_per_second() -> dict[int, float]:
    """Speed by GPUs, of ranks without a cluster; the fastest of some steps."""
    found = {}
    for ranks in SIZES:
        job = calibrated.Job(
            loads=calibrated.np.zeros((5, LAYERS, 2)),
            ranks=ranks,
            bounds=tuple(LAYERS * rank // ranks for rank in range(ranks + 1)),
            microbatches=MICROBATCHES,
            model=MODEL,
        )
        found[ranks] = 1 / statistics.median(list(calibrated.run(job).step_seconds().values())[1:])
    return found


class LiveJobs:
    """Hands jobs in at their times, and waits until all are done."""

    def __init__(self, api: Any, folder: Path, speeds: Mapping[int, float]) -> None:
        self._custom, self._folder, self._speeds = client.CustomObjectsApi(api), folder, speeds
        self.watched = Noted(api)
        self.watched.start()

    def run(self, prefix: str, jobs: Sequence[tuple[float, int]]) -> dict[str, float]:
        """Create the jobs from the beginning of a round on; returns job -> when it was created."""
        created = {}
        began = next_round(self._folder / "operator.log")
        for number, (arrival, steps) in enumerate(jobs):
            time.sleep(max(0.0, began + arrival - time.time()))
            name = f"{prefix}-{number}"
            created[name] = time.time()
            self._custom.create_namespaced_custom_object(body=self._job(name, steps), **WHERE)
        deadline = time.time() + LIMIT_SECONDS
        while not set(created) <= set(self.watched.done):
            if time.time() > deadline:
                raise RuntimeError(f"not done within {LIMIT_SECONDS:g} s: {self.watched.status}")
            time.sleep(0.1)
        for name in created:
            self._custom.delete_namespaced_custom_object(name=name, **WHERE)
        return created

    def _job(self, name: str, steps: int) -> dict[str, Any]:
        return trainer_job(
            name,
            self._folder,
            steps=steps,
            model=MODEL,
            pipeline={
                "minStages": min(SIZES),
                "maxStages": max(SIZES),
                "microbatches": MICROBATCHES,
                "globalBatchSize": MICROBATCHES,
            },
            save_every=100_000,
            environment={"PYTHONPATH": str(HERE / "live")},
            repack={"enabled": False},
            rebalance={"enabled": False},
            throughput=[
                {"gpuType": "v100", "stages": size, "stepsPerSecond": round(speed, 4)}
                for size, speed in self._speeds.items()
            ],
        )


def simulated(jobs: Sequence[tuple[float, int]], speeds: Mapping[int, float], told: Costs) -> ElasticResult:
    """Result by the operator's rules, from a file as ``--elastic`` reads it."""
    (gpus_per_node,) = set(NODES.values())
    file = {
        "cluster": {"v100": {"nodes": len(NODES), "gpus_per_node": gpus_per_node}},
        "option_columns": ["gpus", "samples_per_s"],
        "job_columns": ["name", "arrival_s", "application", "batch_size", "work_samples"],
        "models": {
            "sleeping@1": {"restart_s": told.launch, "types": {"v100": {"options": list(speeds.items())}}}
        },
        "workloads": {
            "live": [[f"job-{n}", arrival, "sleeping", 1, steps] for n, (arrival, steps) in enumerate(jobs)]
        },
    }
    rules = OperatorRules(
        objective="max-min-fairness",
        round_seconds=ROUND_SECONDS,
        pause_seconds=told.pause,
        growth_seconds=told.growth,
        end_seconds=told.end,
    )
    return simulate_rules(read_workload(json.dumps(file)), rules)


def compare(folder: Path) -> dict[str, Any]:
    """Both, and the figures."""
    speeds = steps_per_second()
    with running(folder) as api:
        live = LiveJobs(api, folder, speeds)
        live.run("first", FIRST)
        told = costs(live.run("calibration", CALIBRATION), CALIBRATION, live.watched, speeds)
        print(f"steps/s {speeds}; {told}", file=sys.stderr, flush=True)
        created = live.run("job", JOBS)
        seen = costs(created, JOBS, live.watched, speeds)
        seconds = [live.watched.done[name] - at for name, at in created.items()]
        sizes = {
            name: [
                (round(part[0].at - created[name], 1), part[0].gpus)
                for part in stretches(live.watched.reports[name])
            ]
            for name in created
        }
    live.watched.stop()
    free = Costs(launch=0.0, growth=0.0, pause=0.0, end=0.0)
    results = {name: simulated(JOBS, speeds, each) for name, each in (("told", told), ("free", free))}
    mean = statistics.fmean(seconds)
    return {
        "layers": calibrated.SAYS,
        "steps_per_second": speeds,
        "costs": dataclasses.asdict(told),
        "costs_in_the_run_compared": dataclasses.asdict(seen),
        "live_average_seconds": mean,
        "simulated_average_seconds": results["told"].average_completion_time,
        "deviation": results["told"].average_completion_time / mean - 1,
        "deviation_where_changes_cost_nothing": results["free"].average_completion_time / mean - 1,
        "target": 0.03,
        "jobs": [
            {
                "arrival": arrival,
                "steps": steps,
                "live_seconds": lasted,
                "simulated_seconds": job.completion_time,
                "live_sizes": sizes[f"job-{number}"],
            }
            for number, ((arrival, steps), lasted, job) in enumerate(
                zip(JOBS, seconds, results["told"].jobs, strict=True)
            )
        ],
    }


def show(found: Mapping[str, Any]) -> None:
    """The figures as a table."""
    print(
        "| job | arrival s | steps | live s | simulated s | sizes (from s after its arrival) |\n"
        + "|---" * 6
        + "|"
    )
    for number, job in enumerate(found["jobs"]):
        sizes = ", ".join(f"{gpus} ({at:.0f})" for at, gpus in job["live_sizes"])
        print(
            f"| {number} | {job['arrival']:.0f} | {job['steps']} | {job['live_seconds']:.1f} | "
            f"{job['simulated_seconds']:.1f} | {sizes} |"
        )
    print(
        f"\naverage: live {found['live_average_seconds']:.1f} s, simulated "
        f"{found['simulated_average_seconds']:.1f} s ({found['deviation']:+.1%}; "
        f"{found['deviation_where_changes_cost_nothing']:+.1%} where starts and changes cost nothing)"
    )
    for name in ("costs", "costs_in_the_run_compared"):
        print(f"{name.replace('_', ' ')}: " + ", ".join(f"{k} {v:.2f} s" for k, v in found[name].items()))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", choices=["text", "json"], default="text")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="ballast-elastic-") as name:
        found = compare(Path(name))
    if chosen.output == "json":
        print(json.dumps(found, indent=2))
    else:
        show(found)


if __name__ == "__main__":
    main()
