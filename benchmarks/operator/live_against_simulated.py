"""The same trace on a live cluster and in the simulator: how far are average completion times apart?

    python benchmarks/operator/live_against_simulated.py     # 30 jobs, max-min fairness, seed 0
    python benchmarks/operator/live_against_simulated.py --policy fifo --seed 0 --seed 1

Real: API server, etcd, controllers, kube-scheduler, node agents, pods, Leases, ConfigMaps, the operator with
its solver process. Emulated: GPUs, and the training itself. A step of a pod is the passing of time, at the
steps/s that Gavel's table has for the job on that type of GPU; for the rest the pods do what the trainer does
(plan, reports, checkpoint and stop, resume, exit codes), and their ranks do not talk to each other.

The simulator is `ballast simulate --rules ballast` on the trace file. What a start costs it is told: the
means of a calibration run before the comparison (other jobs, same cluster), never of the run compared.
"""

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ballast_policies.simulator.engine import simulate
from ballast_policies.simulator.settings import SimulatedCluster, SimulationSettings
from ballast_policies.simulator.workloads import Workload
from ballast_policies.throughput.table import ThroughputTable, built_in_table
from live import measure
from live.cluster import Live, LiveRun, running
from live.trace import write_trace

GPUS = {"k80": 4, "p100": 4, "v100": 4}
EMULATED = (
    "training and GPUs are emulated (a step is the passing of time, at the steps/s of Gavel's table); "
    "API server, operator, kube-scheduler, nodes, pods, Leases and ConfigMaps are real"
)
CALIBRATION_SEED = 1000
CALIBRATION_ROUND_SECONDS = 10
FACTORS = tuple(0.8 + 0.02 * step for step in range(21))
"""Factors of the costs of starts. A start that takes a moment longer may change who runs in all rounds after
it: one simulation is one of many that might have been, and these say how far they are apart."""
LIMIT_SECONDS = 1800.0
CALIBRATION_LIMIT_SECONDS = 300.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Completion times and starts, by job in the order of the trace."""

    seconds: tuple[float, ...]
    makespan: float
    starts: tuple[int, ...]


def simulated(
    workload: Workload, table: ThroughputTable, policy: str, round_seconds: float, costs: measure.Costs | None
) -> Simulated:
    settings = SimulationSettings(
        policy=policy,
        round_seconds=round_seconds,
        record_timeline=True,
        launch_seconds=costs.launch if costs is not None else 0.0,
        stop_seconds=costs.stop if costs is not None else 0.0,
        notice_seconds=costs.notice if costs is not None else 0.0,
    )
    result = simulate(workload, SimulatedCluster(gpus=GPUS), table, settings)
    rows = result.to_json(per_job=True)["jobs"]
    began = min(row["arrival"] for row in rows)
    return Simulated(
        seconds=tuple(row["finish"] - row["arrival"] for row in rows),
        makespan=max(row["finish"] for row in rows) - began,
        starts=tuple(sum(1 for s in result.timeline if s.row == row) for row in range(len(rows))),
    )


def over_costs(
    workload: Workload, table: ThroughputTable, policy: str, round_seconds: float, costs: measure.Costs
) -> list[float]:
    """Average completion times with the costs of starts a fifth lower to a fifth higher."""
    means = []
    for factor in FACTORS:
        scaled = dataclasses.replace(
            costs, launch=factor * costs.launch, stop=factor * costs.stop, notice=factor * costs.notice
        )
        means.append(statistics.fmean(simulated(workload, table, policy, round_seconds, scaled).seconds))
    return means


def compare(
    live: Live,
    table: ThroughputTable,
    folder: Path,
    costs: measure.Costs,
    *,
    policy: str,
    seed: int,
    jobs: int,
    round_seconds: int,
) -> dict[str, Any]:
    trace = folder / f"seed-{seed}.trace"
    workload = write_trace(trace, table, jobs=jobs, seed=seed)
    live.use_policy(policy, GPUS, round_seconds)
    run = live.run(workload, table, limit_seconds=LIMIT_SECONDS)
    told = simulated(workload, table, policy, round_seconds, costs)
    free = simulated(workload, table, policy, round_seconds, None)
    many = over_costs(workload, table, policy, round_seconds, costs)
    seconds = measure.completion_seconds(run)
    live_mean, told_mean, free_mean = (
        statistics.fmean(each) for each in (seconds, told.seconds, free.seconds)
    )
    return {
        "policy": policy,
        "seed": seed,
        "jobs": jobs,
        "round_seconds": round_seconds,
        "live": {
            "average_jct_seconds": live_mean,
            "makespan_seconds": measure.makespan_seconds(run),
            "launches": sum(measure.launches(run)),
            "restarts": {name: job.restarts for name, job in run.jobs.items() if job.restarts},
            "costs": dataclasses.asdict(measure.costs(run, round_seconds=round_seconds)),
        },
        "simulated": _summary(told, told_mean, live_mean, measure.makespan_seconds(run)),
        "simulated_without_costs_of_starts": _summary(
            free, free_mean, live_mean, measure.makespan_seconds(run)
        ),
        "simulated_over_costs_of_starts": {
            "factors": [FACTORS[0], FACTORS[-1]],
            "simulations": len(many),
            "average_jct_seconds": statistics.fmean(many),
            "average_jct_deviation": statistics.fmean(many) / live_mean - 1.0,
            "least_deviation": min(many) / live_mean - 1.0,
            "most_deviation": max(many) / live_mean - 1.0,
        },
        "per_job": _per_job(workload, run, told),
        "trace": str(trace),
    }


def _summary(result: Simulated, mean: float, live_mean: float, live_makespan: float) -> dict[str, float]:
    return {
        "average_jct_seconds": mean,
        "average_jct_deviation": mean / live_mean - 1.0,
        "makespan_seconds": result.makespan,
        "makespan_deviation": result.makespan / live_makespan - 1.0,
        "launches": sum(result.starts),
    }


def _per_job(workload: Workload, run: LiveRun, told: Simulated) -> list[dict[str, Any]]:
    rows = zip(
        workload.jobs,
        measure.completion_seconds(run),
        told.seconds,
        measure.launches(run),
        told.starts,
        measure.stretches(run),
        strict=True,
    )
    return [
        {
            "type": job.type.name,
            "gpus": job.type.gpus,
            "arrival": job.arrival,
            "live_seconds": live_seconds,
            "simulated_seconds": simulated_seconds,
            "live_launches": live_launches,
            "simulated_launches": simulated_launches,
            "live_stretches": [dataclasses.asdict(stretch) for stretch in trained],
        }
        for job, live_seconds, simulated_seconds, live_launches, simulated_launches, trained in rows
    ]


def calibrate(live: Live, table: ThroughputTable, folder: Path, jobs: int) -> measure.Costs:
    """Costs of starts and stops on this machine, by a run of other jobs."""
    workload = write_trace(
        folder / "calibration.trace",
        table,
        jobs=jobs,
        seed=CALIBRATION_SEED,
        seconds_on_v100=(10.0, 25.0),
        mean_gap_seconds=3.0,
    )
    live.use_policy("max-min-fairness", GPUS, CALIBRATION_ROUND_SECONDS)
    run = live.run(workload, table, limit_seconds=CALIBRATION_LIMIT_SECONDS)
    return measure.costs(run, round_seconds=CALIBRATION_ROUND_SECONDS)


def show(outcome: Mapping[str, Any], costs: measure.Costs) -> None:
    live, told, free = (outcome[key] for key in ("live", "simulated", "simulated_without_costs_of_starts"))
    print(
        f"\n{outcome['policy']}, seed {outcome['seed']}: {outcome['jobs']} jobs, "
        f"rounds of {outcome['round_seconds']} s, GPUs {GPUS}\n"
    )
    print(
        "| job | type | GPUs | arrival s | live s | simulated s | difference s | launches live / simulated |"
    )
    print("|---|---|---|---|---|---|---|---|")
    for index, job in enumerate(outcome["per_job"]):
        print(
            f"| {index} | {job['type']} | {job['gpus']} | {job['arrival']:.0f} | {job['live_seconds']:.1f} | "
            f"{job['simulated_seconds']:.1f} | {job['simulated_seconds'] - job['live_seconds']:+.1f} | "
            f"{job['live_launches']} / {job['simulated_launches']} |"
        )
    print("\n| | average JCT s | deviation | makespan s | deviation | launches |\n|---|---|---|---|---|---|")
    mean, makespan = live["average_jct_seconds"], live["makespan_seconds"]
    print(f"| live | {mean:.2f} | | {makespan:.1f} | | {live['launches']} |")
    for name, row in (("simulated", told), ("simulated, starts for nothing", free)):
        print(
            f"| {name} | {row['average_jct_seconds']:.2f} | {row['average_jct_deviation']:+.2%} | "
            f"{row['makespan_seconds']:.1f} | {row['makespan_deviation']:+.2%} | {row['launches']} |"
        )
    many = outcome["simulated_over_costs_of_starts"]
    print(
        f"\n{many['simulations']} simulations with costs of starts from {FACTORS[0]:.1f} to "
        f"{FACTORS[-1]:.1f} times the measured: average JCT {many['average_jct_seconds']:.2f} s "
        f"({many['average_jct_deviation']:+.2%}), "
        f"from {many['least_deviation']:+.2%} to {many['most_deviation']:+.2%}"
    )
    seen = live["costs"]
    print(
        f"\nlaunch {costs.launch:.2f} s, stop {costs.stop:.2f} s, notice {costs.notice:.2f} s in the "
        f"calibration ({costs.launches} and {costs.changes} starts of the two kinds); in this run "
        f"{seen['launch']:.2f} s ({seen['launches']}) and {seen['stop']:.2f} s ({seen['changes']}); "
        f"a gang to be stopped trains on for {seen['notice']:.2f} s; "
        f"from the last step to Succeeded {seen['end']:.2f} s",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policy", action="append", help="may be repeated; default: max-min-fairness")
    parser.add_argument("--seed", action="append", type=int, help="of the trace; may be repeated; default: 0")
    parser.add_argument("--jobs", type=int, default=30)
    parser.add_argument("--round", type=int, default=60, help="seconds of a round")
    parser.add_argument("--calibration-jobs", type=int, default=14)
    parser.add_argument("--output", choices=["text", "json"], default="text")
    chosen = parser.parse_args()
    table = built_in_table()
    text = chosen.output == "text"
    with tempfile.TemporaryDirectory(prefix="ballast-live-") as name:
        folder = Path(name)
        with running(GPUS, folder) as live:
            print(EMULATED, file=sys.stdout if text else sys.stderr, flush=True)
            costs = calibrate(live, table, folder, chosen.calibration_jobs)
            outcomes = []
            for policy in chosen.policy or ["max-min-fairness"]:
                for seed in chosen.seed or [0]:
                    outcome = compare(
                        live,
                        table,
                        folder,
                        costs,
                        policy=policy,
                        seed=seed,
                        jobs=chosen.jobs,
                        round_seconds=chosen.round,
                    )
                    outcomes.append(outcome)
                    with contextlib.redirect_stdout(sys.stdout if text else sys.stderr):
                        show(outcome, costs)
    if not text:
        summary = {
            "emulated": EMULATED,
            "gpus": GPUS,
            "calibration": dataclasses.asdict(costs),
            "runs": outcomes,
        }
        print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
