"""Shockwave's traces: jobs whose batch sizes change, by the operator's rules, beside its published results.

    python -m ballast_lab.shockwave --data FOLDER

FOLDER holds files of Shockwave's artifact (github.com/uw-mad-dash/shockwave, MIT; NSDI 2023), which are not
part of Ballast: ``*.trace`` (Gavel's ten columns with the mode of its batch size after the GPUs and its
seconds alone before the arrival) and ``published_results.json`` (``32gpus/NAME`` -> ``policy``, ``makespan``,
``jct_list``, ``finish_time_fairness_list``, ``finish_time_fairness_themis_list``).

How long a job runs alone with its batch size changed is not in the trace: it follows from the published
completion times and their fairness, whose quotient is these seconds times jobs over GPUs. Where there is
none, the seconds of the trace stand. Finish-time fairness is the completion time over the seconds alone
times the mean, over the job's time there, of jobs over GPUs (at least 1): Themis's, as published. So a job is
owed a job's part of the time whatever its GPUs; a policy's shares are of GPUs, and jobs that state as much
``weight`` as they have GPUs are owed the same by both.
"""

import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
import numpy as np
from ballast_operator.cli.option_names import Number
from ballast_policies.allocation.problem import ProblemError
from ballast_policies.simulator.engine import simulate
from ballast_policies.simulator.settings import SimulatedCluster, SimulationSettings
from ballast_policies.simulator.workloads import TraceJob, Workload
from ballast_policies.throughput.table import JobType, ThroughputTable

from ballast_lab.comparison import Comparison, Point

COLUMNS = {"GPUs": 6, "seconds": 10, "arrival": 11}
OURS = (
    ("finish-time-fairness", ""),
    ("finish-time-fairness", "weight as GPUs"),
    ("max-min-fairness", ""),
    ("max-min-fairness", "weight as GPUs"),
    ("allox", ""),
    ("shortest-job-first", ""),
    ("completion-time", ""),
    ("makespan", ""),
)
"""(policy, how jobs are weighted)."""
GPU = "v100"


class DataError(ValueError):
    """A file that cannot be read: its name, line, value and reason."""


def read_jobs(path: Path) -> np.ndarray:
    """(n, 3) GPUs, seconds alone as its batch size begins, arrival s; in order of arrival.

    Raises:
        DataError: a line has other columns, or a value is no number.
    """
    rows: list[list[float]] = []
    for line, text in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if not text.strip():
            continue
        columns = text.split("\t")
        if len(columns) != 12:
            raise DataError(f"{path}:{line}: {len(columns)} columns, not 12: {text[:60]!r}")
        row = []
        for name, at in COLUMNS.items():
            try:
                value = float(columns[at])
            except ValueError:
                value = math.nan
            if not (value >= 0 and math.isfinite(value)) or (name != "arrival" and value == 0):
                raise DataError(f"{path}:{line}: {name}: {columns[at]!r} is no number above 0")
            row.append(value)
        if row[0] != int(row[0]) or (rows and row[2] < rows[-1][2]):
            raise DataError(
                f"{path}:{line}: {columns[6]} GPUs at {columns[11]} s: not whole, or not in order"
            )
        rows.append(row)
    if not rows:
        raise DataError(f"{path}: there is no job")
    return np.array(rows)


def read_published(path: Path, jobs: int) -> dict[str, dict[str, Any]]:
    """Run -> what was published of it, of runs with as many jobs.

    Raises:
        DataError: the file is none, or a list is none of numbers.
    """
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
        found = {name: run for name, run in read.items() if len(run["jct_list"]) == jobs}
        for run in found.values():
            for key in ("jct_list", "finish_time_fairness_list", "finish_time_fairness_themis_list"):
                run[key] = np.array(run[key], dtype=float)
                if run[key].shape != (jobs,) or not (run[key] > 0).all():
                    raise ValueError(f"{key} is not {jobs} numbers above 0")
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise DataError(f"{path} cannot be read: {error!r}") from error
    return found


def seconds_alone(jobs: np.ndarray, published: Mapping[str, Mapping[str, Any]], gpus: int) -> np.ndarray:
    """(n,) s that each job runs alone, its batch size changed as published."""
    if not published:
        seconds: np.ndarray = jobs[:, 1]
        return seconds
    isolated = [run["jct_list"] / run["finish_time_fairness_list"] for run in published.values()]
    middle: np.ndarray = np.median(isolated, axis=0) / (len(jobs) / gpus)
    return middle


def fairness(arrival: np.ndarray, took: np.ndarray, alone: np.ndarray, gpus: int) -> np.ndarray:
    """(n,) finish-time fairness of jobs that took ``took`` s."""
    ends = arrival + took
    moments = np.unique(np.concatenate([arrival, ends]))
    middle, length = (moments[1:] + moments[:-1]) / 2, np.diff(moments)
    there = (arrival[:, None] <= middle) & (middle < ends[:, None])
    contention = np.maximum(1.0, there.sum(axis=0) / gpus)
    rho: np.ndarray = took * took / (alone * (there @ (contention * length)))
    return rho


def completion_times(
    jobs: np.ndarray, alone: np.ndarray, gpus: int, policy: str, round_seconds: float, *, weighted: bool
) -> np.ndarray:
    """(n,) s by the operator's rules; ``weighted``: each job by its GPUs."""
    types = [JobType(name=f"job {i}", gpus=int(row[0])) for i, row in enumerate(jobs)]
    table = ThroughputTable(source="trace", alone_rates={GPU: dict.fromkeys(types, 1.0)})
    rows = zip(types, alone, jobs[:, 2], strict=True)
    workload = Workload(
        name="trace",
        jobs=[
            TraceJob(
                type=kind, steps=float(s), arrival=float(at), weight=float(kind.gpus) if weighted else 1.0
            )
            for kind, s, at in rows
        ],
    )
    settings = SimulationSettings(policy=policy, round_seconds=round_seconds)
    result = simulate(workload, SimulatedCluster(gpus={GPU: gpus}), table, settings)
    return np.array([job.completion_time for job in result.jobs], dtype=float)


def _line(name: str, run: str, arrival: np.ndarray, took: np.ndarray, rho: Sequence[float]) -> str:
    makespan = float((arrival + took).max() - arrival.min())
    worst, mean = max(rho), statistics.fmean(rho)
    unfair = sum(each > 1 for each in rho) / len(rho)
    run = run.rpartition("/")[2][:38]
    return f"{name:24}{run:40}{took.mean():9,.0f}{makespan:10,.0f}{mean:8.3f}{worst:8.3f}{unfair:8.0%}"


@click.command()
@click.option(
    "--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True
)
@click.option("--gpus", type=click.IntRange(1), help="[default: by the names of the results, as 32gpus]")
@click.option("--round", "round_seconds", type=Number(1.0), default=120.0, show_default=True)
def main(folder: Path, gpus: int | None, round_seconds: float) -> Comparison:
    """Print completion times and finish-time fairness of Shockwave's traces, ours beside the published."""
    points = []
    traces = sorted(folder.glob("*.trace"))
    if not traces:
        raise click.ClickException(f"--data: {folder} has no *.trace")
    for path in traces:
        try:
            jobs = read_jobs(path)
            published = read_published(folder / "published_results.json", len(jobs))
        except (DataError, OSError, UnicodeDecodeError) as error:
            raise click.ClickException(f"--data: {error}") from error
        named = re.search(r"(\d+)gpus", " ".join(published))
        count = gpus or (int(named[1]) if named else 0)
        if count < jobs[:, 0].max():
            raise click.ClickException(
                f"--gpus: {count} do not hold each job of {path.name}. To fix: state them"
            )
        alone, arrival = seconds_alone(jobs, published, count), jobs[:, 2]
        click.echo(f"{path.name}: {len(jobs)} jobs on {count} GPUs, rounds of {round_seconds:g} s")
        headings = f"{'mean s':>9}{'makespan':>10}{'mean':>8}{'worst':>8}{'over 1':>8}"
        click.echo(f"{'policy':24}{'run':40}{headings}")
        for policy, weights in OURS:
            try:
                took = completion_times(jobs, alone, count, policy, round_seconds, weighted=bool(weights))
            except ProblemError as error:
                raise click.ClickException(str(error)) from error
            name = ", ".join(filter(None, ("ours", weights)))
            rho = fairness(arrival, took, alone, count)
            click.echo(_line(policy, name, arrival, took, rho.tolist()))
            if policy == "finish-time-fairness":
                points.append(Point(f"{policy}, {name}: worst", "", float(rho.max()), low=0.0, high=3.0))
                if weights:
                    means = [
                        float(run["finish_time_fairness_themis_list"].mean())
                        for run_name, run in published.items()
                        if run["policy"] == "shockwave" and run_name.endswith("simulation")
                    ]
                    theirs = min(means, default=math.nan)
                    what = f"{policy}, {name}: mean"
                    points.append(
                        Point(what, f"{theirs:.3f}", float(rho.mean()), low=0.0, high=1.05 * theirs)
                    )
        apart = 0.0
        for name, run in published.items():
            rho = run["finish_time_fairness_themis_list"].tolist()
            click.echo(_line(run["policy"], name, arrival, run["jct_list"], rho))
            computed = fairness(arrival, run["jct_list"], alone, count)
            apart = max(apart, abs(float(np.median(computed / rho)) - 1))
        if published:
            click.echo(f"fairness of published times as computed here: within {apart:.1%} of the published")
    return Comparison(tuple(points))


if __name__ == "__main__":
    main()
