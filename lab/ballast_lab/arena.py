"""Arena's traces: jobs that run on some shapes only, by ``completion-time`` and by Sia's program.

    python -m ballast_lab.arena --data FOLDER

FOLDER holds files of Arena's artifact (github.com/sjtu-epcc/arena, branch ae-eurosys, Apache-2.0; EuroSys
2026), which are not part of Ballast: ``optimal_iteration_seconds.json`` (model -> shape -> seconds of a step;
null or less than 0: it does not fit), ``*cluster_spec.json`` (GPU type -> ``node_num``), ``*trace*.csv``
and ``published_jct_summary.json``. A shape ``4_a40_4_n_2_d`` is 4 nodes with 2 GPUs of each; a node has as
many as the largest shape of its type. A number of GPUs takes as long as its fastest shape.

As there, rounds are of 300 s, restarts cost nothing, steps of simulated traces are divided by 5, and the
simulation is over after 2,000 rounds. ``--write FILE`` makes a file for ``ballast simulate --elastic``.
"""

import csv
import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import click
from ballast_policies.elastic.completion_time import ELASTIC_POLICIES
from ballast_policies.simulator.clock import SimulationError
from ballast_policies.simulator.elastic import ElasticResult, simulate
from ballast_policies.simulator.elastic_file import read_workload

from ballast_lab.comparison import Comparison, Point

ROUND_SECONDS, ROUNDS = 300.0, 2000
STEPS_DIVIDED_BY = 5
"""Divisor of simulated traces' steps, by Arena's simulator; traces that were run state them as they are."""
COLUMNS = ("job_id", "submission_time", "num_iteration", "model_name", "batch_size")


class DataError(ValueError):
    """A file that cannot be read: its name, line, value and reason."""


def read_speeds(path: Path) -> dict[str, dict[tuple[str, int, int], float]]:
    """Model -> (GPU type, nodes, GPUs of a node) -> steps/s; shapes that do not fit are left out.

    Raises:
        DataError: a shape or its seconds cannot be understood.
    """
    found: dict[str, dict[tuple[str, int, int], float]] = {}
    for model, shapes in _json(path).items():
        found[model] = {}
        if not isinstance(shapes, dict):
            raise DataError(f"{path}: {model}: {shapes!r:.60} has no shapes")
        for shape, seconds in shapes.items():
            parts = shape.split("_")
            if len(parts) != 6 or parts[3::2] != ["n", "d"] or not (parts[2] + parts[4]).isdecimal():
                raise DataError(f"{path}: {model}: {shape!r} is no shape. To fix: as 4_a40_4_n_2_d")
            if seconds is None or seconds == -1:
                continue
            if not _is_number(seconds) or seconds <= 0:
                raise DataError(f"{path}: {model}: {shape}: {seconds!r} is no number of seconds")
            found[model][parts[1], int(parts[2]), int(parts[4])] = 1.0 / seconds
    return found


def read_nodes(path: Path) -> dict[str, int]:
    """GPU type -> nodes.

    Raises:
        DataError: a number cannot be understood.
    """
    nodes = {}
    for kind, row in _json(path).items():
        count = row.get("node_num") if isinstance(row, dict) else row
        if not isinstance(count, int) or count < 1:
            raise DataError(f"{path}: {kind}: {count!r} is no number of nodes")
        nodes[kind] = count
    return nodes


def read_jobs(path: Path, divided_by: int) -> list[list[Any]]:
    """Rows of (name, seconds after the first, model, batch size, steps), in order of arrival.

    Raises:
        DataError: a line lacks a column, or a value is none.
    """
    rows: list[list[Any]] = []
    with path.open(newline="", encoding="utf-8") as file:
        for line, row in enumerate(csv.DictReader(file), start=2):
            numbers = {}
            for column in COLUMNS:
                text = row.get(column)
                if not text:
                    raise DataError(f"{path}:{line}: there is no {column}")
                if column in ("submission_time", "num_iteration"):
                    try:
                        numbers[column] = float(text)
                    except ValueError:
                        numbers[column] = math.nan
                    if not 0 <= numbers[column] < math.inf:
                        raise DataError(f"{path}:{line}: {column}: {text!r} is no number from 0 on")
            steps = max(1.0, numbers["num_iteration"] // divided_by)
            model = row["model_name"].replace("__", "_")
            rows.append([row["job_id"], numbers["submission_time"], model, row["batch_size"], steps])
    if not rows:
        raise DataError(f"{path}: there is no job")
    first = min(row[1] for row in rows)
    return sorted(([name, at - first, *rest] for name, at, *rest in rows), key=lambda row: row[1])


def elastic_file(
    speeds: Mapping[str, Mapping[tuple[str, int, int], float]],
    nodes: Mapping[str, int],
    traces: Mapping[str, list[list[Any]]],
) -> dict[str, Any]:
    """A file of ``ballast simulate --elastic``, of jobs that run on a shape of the cluster."""
    per_node: dict[str, int] = {}
    for shapes in speeds.values():
        for kind, _, gpus in shapes:
            per_node[kind] = max(gpus, per_node.get(kind, 0))
    models: dict[str, Any] = {}
    for model, shapes in speeds.items():
        best: dict[str, dict[int, float]] = {}
        for (kind, count, gpus), speed in sorted(shapes.items()):
            if count * gpus <= nodes.get(kind, 0) * per_node[kind]:
                of_type = best.setdefault(kind, {})
                of_type[count * gpus] = max(speed, of_type.get(count * gpus, 0.0))
        if best:
            name, _, batch = model.rpartition("_")
            types = {kind: {"options": [list(each) for each in by.items()]} for kind, by in best.items()}
            models[f"{name}@{batch}"] = {"restart_s": 0.0, "types": types}
    return {
        "cluster": {
            kind: {"nodes": count, "gpus_per_node": per_node[kind]}
            for kind, count in nodes.items()
            if kind in per_node
        },
        "option_columns": ["gpus", "samples_per_s"],
        "job_columns": ["name", "arrival_s", "application", "batch_size", "work_samples"],
        "models": models,
        "workloads": {
            trace: [row for row in rows if f"{row[2]}@{row[3]}" in models] for trace, rows in traces.items()
        },
    }


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Printed row of a run.

    Attributes:
        finished, jobs: of all that arrived in the time, those that run nowhere included.
        mean: s, of those that have ended.
        mean_of_all: s, those that have not counted until the end.
    """

    finished: int
    jobs: int
    mean: float
    mean_of_all: float


def row_of(result: ElasticResult, arrivals: list[float]) -> Row:
    """Row of a run of the jobs that fit somewhere, among ``arrivals`` (s) of all jobs."""
    came = [at for at in arrivals if at < result.until]
    waited = math.fsum(result.until - at for at in came)
    waited -= math.fsum(result.until - job.finish for job in result.finished)
    return Row(
        finished=len(result.finished),
        jobs=len(came),
        mean=result.average_completion_time,
        mean_of_all=waited / len(came),
    )


def _json(path: Path) -> dict[str, Any]:
    """The object in a file, or in the list that is there."""
    try:
        read = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"{path} cannot be read: {error}") from error
    read = read[0] if isinstance(read, list) and read else read
    if not isinstance(read, dict):
        raise DataError(f"{path}: {str(read)[:60]!r} is no object")
    return read


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _published(path: Path) -> Iterator[str]:
    names = {"crius": "arena"}
    for group, policies in (_json(path) if path.exists() else {}).items():
        for policy, runs in policies.items():
            for run in runs:
                yield f"{group:26}{names.get(policy, policy):18}{run['jobs']:9}{'':8}{run['mean_s']:11,.0f}"


def _only(folder: Path, pattern: str) -> Path:
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise DataError(f"{folder} has {len(found)} files {pattern}, not one")
    return found[0]


@click.command()
@click.option(
    "--data", "folder", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True
)
@click.option("--nodes", help="GPU types and nodes, as a40=16,a10=16. [default: the folder's cluster]")
@click.option("--rounds", type=click.IntRange(1), default=ROUNDS, show_default=True, help="Of 300 s.")
@click.option("--write", type=click.Path(path_type=Path), help="Write a file for ballast simulate --elastic.")
def main(folder: Path, nodes: str | None, rounds: int, write: Path | None) -> Comparison | None:
    """Print average completion times and finished jobs of Arena's traces, and what it publishes."""
    try:
        cluster = _nodes(nodes) if nodes else read_nodes(_only(folder, "*cluster_spec.json"))
        traces = {
            path.stem: read_jobs(path, 1 if "runtime" in path.stem else STEPS_DIVIDED_BY)
            for path in sorted(folder.glob("*trace*.csv"))
        }
        if not traces:
            raise DataError(f"{folder} has no *trace*.csv")
        read = elastic_file(read_speeds(folder / "optimal_iteration_seconds.json"), cluster, traces)
        published = list(_published(folder / "published_jct_summary.json"))
    except (DataError, OSError, UnicodeDecodeError, csv.Error) as error:
        raise click.ClickException(f"--data: {error}") from error
    text = json.dumps(read)
    if write is not None:
        write.write_text(text, encoding="utf-8")
        return None
    points = []
    click.echo(f"{'trace':26}{'policy':18}{'finished':>9}{'of':>8}{'mean s':>11}{'until the end s':>17}")
    for trace, rows in traces.items():
        if not read["workloads"][trace]:
            raise click.ClickException(f"--data: no job of {trace} runs on a shape of the cluster")
        workload = read_workload(text, workload=trace, sizes="all")
        means = []
        for policy in ("completion-time", "sia"):
            assert policy in ELASTIC_POLICIES
            try:
                result = simulate(
                    workload, policy=policy, round_seconds=ROUND_SECONDS, until=rounds * ROUND_SECONDS
                )
            except SimulationError as error:
                reason = f"no job of {trace} ends within {rounds}. To fix: more of them"
                raise click.ClickException(f"--rounds: {reason}") from error
            row = row_of(result, [row[1] for row in rows])
            means.append(row.mean)
            click.echo(
                f"{trace[:25]:26}{policy:18}{row.finished:9}{row.jobs:8}{row.mean:11,.0f}"
                f"{row.mean_of_all:17,.0f}"
            )
        points.append(Point(f"{trace}: completion-time over sia", "", means[0] / means[1], low=0.0, high=0.9))
    for line in published:
        click.echo(line)
    return Comparison(tuple(points), "Band: a mean completion time of at most 0.9 of Sia's.")


def _nodes(text: str) -> dict[str, int]:
    try:
        return {kind: int(count) for kind, _, count in (each.partition("=") for each in text.split(","))}
    except ValueError as error:
        raise click.ClickException(f"--nodes: {text} is not as a40=16,a10=16") from error


if __name__ == "__main__":
    main()
