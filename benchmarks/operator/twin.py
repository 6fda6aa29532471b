"""Rigid and elastic jobs on a live cluster, replayed by `ballast twin`: how far off is it?

    python benchmarks/operator/twin.py                              # five runs of each, some forty minutes
    python benchmarks/operator/twin.py --kind rigid --runs 1 --output json

Real: API server, controllers, kube-scheduler, node agents, the operator and its history. Emulated: GPUs;
rigid jobs train by the passing of time at the steps/s of Gavel's table, the layers of elastic jobs sleep. The
twin reads nothing but the operator's history. Completion times are from a job's arrival to its end.
"""

import argparse
import dataclasses
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ballast_operator.history.recording import TwinResult
from ballast_operator.history.store import History
from ballast_operator.history.twin import read_recording
from ballast_policies.simulator.replay import replay
from ballast_policies.throughput.table import built_in_table
from live import cluster
from live.trace import write_trace

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent / "trainer"), str(HERE / "live")]

GPUS = {"k80": 4, "p100": 4, "v100": 4}
ROUND_SECONDS = 60
LIMIT_SECONDS = 1800.0
WRITTEN_SECONDS = 15.0
"""Pause until the operator has written what happened."""
TARGET = 0.03


def rigid(runs: int, jobs: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Traces of jobs of one size, under max-min fairness."""
    table = built_in_table()
    with cluster.running(GPUS, folder) as live:
        live.use_policy("max-min-fairness", GPUS, ROUND_SECONDS)
        for seed in range(runs):
            workload = write_trace(folder / f"seed-{seed}.trace", table, jobs=jobs, seed=seed)
            began = time.time()
            live.run(workload, table, limit_seconds=LIMIT_SECONDS)
            yield compared("rigid", folder, began)


def elastic(runs: int, folder: Path) -> Iterator[dict[str, Any]]:
    """Jobs of 1 to 4 GPUs that share four."""
    import live_elastic_against_simulated as jobs
    from live_elastic import running

    speeds = jobs.steps_per_second()
    with running(folder) as api:
        live = jobs.LiveJobs(api, folder, speeds)
        live.run("first", jobs.FIRST)
        for number in range(runs):
            began = time.time()
            live.run(f"run-{number}", jobs.JOBS)
            yield compared("elastic", folder, began)
    live.watched.stop()


def compared(kind: str, folder: Path, began: float) -> dict[str, Any]:
    """The errors of the twin of a run."""
    time.sleep(WRITTEN_SECONDS)
    found = replay(read_recording(History(folder / "history.db"), began, time.time()))
    result = TwinResult.of(found)
    print(f"{kind}: {result.text}", file=sys.stderr, flush=True)
    for job in found.jobs:
        took = "later" if job.seconds is None else f"{job.seconds:.1f} s"
        print(
            f"  {job.job}: {job.recorded_seconds:.1f} s, replay {took}, {job.starts} starts", file=sys.stderr
        )
    for name, why in found.left_out.items():
        print(f"  left out: {name}: {why}", file=sys.stderr)
    return {"kind": kind, **dataclasses.asdict(result)}


def mean_error(rows: list[dict[str, Any]], kind: str, which: str) -> float | None:
    """Mean over runs of the size of an error; None: there is none."""
    errors = [abs(row[which]) for row in rows if row["kind"] == kind and row[which] is not None]
    return statistics.fmean(errors) if errors else None


def show(rows: list[dict[str, Any]], means: Mapping[str, Mapping[str, float | None]]) -> None:
    """The errors as a table."""
    print(
        "| run | jobs | completion times, sum | one job, mean of sizes | cost, sum |\n|---|---|---|---|---|"
    )
    for row in rows:
        errors = [row[name] for name in ("time_error", "typical_time_error", "cost_error")]
        words = " | ".join("-" if error is None else f"{error:+.1%}" for error in errors)
        print(f"| {row['kind']} | {row['jobs']} | {words} |")
    for kind, mean in means.items():
        print(f"\n{kind}, mean size over the runs: {mean} (target {TARGET:.0%} of completion times)")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kind", choices=["rigid", "elastic", "both"], default="both")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--jobs", type=int, default=12, help="of a rigid run")
    parser.add_argument("--output", choices=["text", "json"], default="text")
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory(prefix="ballast-twin-") as name:
        if chosen.kind != "elastic":
            (Path(name) / "rigid").mkdir()
            rows += rigid(chosen.runs, chosen.jobs, Path(name) / "rigid")
        if chosen.kind != "rigid":
            (Path(name) / "elastic").mkdir()
            rows += elastic(chosen.runs, Path(name) / "elastic")
    means = {
        kind: {which: mean_error(rows, kind, which) for which in ("time_error", "cost_error")}
        for kind in dict.fromkeys(row["kind"] for row in rows)
    }
    if chosen.output == "json":
        print(json.dumps({"runs": rows, "means": means, "target": TARGET}, indent=2))
    else:
        show(rows, means)


if __name__ == "__main__":
    main()
