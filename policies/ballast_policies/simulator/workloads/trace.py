"""Gavel's trace format, read as it is.

One job a line, ten tab-separated columns: job type, command, working directory, name of the steps
argument, needs a data directory (0/1), steps, GPUs, weight, deadline factor (negative: none),
arrival in seconds.  Lines are in order of arrival.
"""

import math
from importlib import resources
from pathlib import Path

from ballast_policies.simulator.workloads.workload import TraceJob, Workload, WorkloadError
from ballast_policies.throughput.table import JobType

COLUMNS = 10
BUILT_IN_TRACES = ("max_min_fairness", "minimize_makespan", "small_test")
"""Traces of Gavel's physical cluster that come with Ballast."""


def read_trace(path: Path) -> Workload:
    """The workload in the file ``path``, or a built-in one where ``path`` is its bare name.

    Raises:
        WorkloadError: the file does not exist, or a line is wrong.
    """
    if not path.exists() and str(path) in BUILT_IN_TRACES:
        folder = resources.files("ballast_policies.throughput") / "data" / "gavel" / "traces"
        return parse_trace((folder / f"{path}.trace").read_text(), name=f"{path}.trace")
    try:
        text = path.read_text()
    except OSError as error:
        raise WorkloadError(
            f"trace {path} cannot be read: {error.strerror}. To fix: name a file, or one of the built-in "
            f"traces {', '.join(BUILT_IN_TRACES)}"
        ) from error
    except UnicodeDecodeError as error:
        raise WorkloadError(f"trace {path} is not a text file: {error}") from error
    return parse_trace(text, name=path.name)


def parse_trace(text: str, *, name: str) -> Workload:
    """The workload written in ``text``; ``name`` appears in messages."""
    jobs: list[TraceJob] = []
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        job = _parse_line(line, where=f"{name}, line {number}")
        if jobs and job.arrival < jobs[-1].arrival:
            raise WorkloadError(
                f"{name}, line {number}: arrives at {job.arrival:g} s, before the line above "
                f"({jobs[-1].arrival:g} s). To fix: sort the lines by arrival"
            )
        jobs.append(job)
    if not jobs:
        raise WorkloadError(f"{name}: there is no job in it")
    return Workload(name=name, jobs=tuple(jobs))


def _parse_line(line: str, *, where: str) -> TraceJob:
    columns = line.split("\t")
    if len(columns) != COLUMNS:
        raise WorkloadError(
            f"{where}: {len(columns)} columns; a job has {COLUMNS}, separated by tabs: type, command, "
            "directory, steps argument, needs data, steps, GPUs, weight, deadline factor, arrival"
        )
    steps = _number(columns[5], f"{where}: steps", above=0.0)
    gpus = _number(columns[6], f"{where}: GPUs", above=0.0)
    if gpus != int(gpus):
        raise WorkloadError(f"{where}: GPUs: {columns[6]} is not a whole number")
    factor = _number(columns[8], f"{where}: deadline factor")
    arrival = _number(columns[9], f"{where}: arrival")
    if arrival < 0:
        raise WorkloadError(f"{where}: arrival: {columns[9]} is before the begin of the simulation")
    return TraceJob(
        type=JobType(name=columns[0], gpus=int(gpus)),
        steps=steps,
        arrival=arrival,
        weight=_number(columns[7], f"{where}: weight", above=0.0),
        deadline_factor=factor if factor > 0 else None,
    )


def _number(text: str, what: str, *, above: float | None = None) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise WorkloadError(f"{what}: {text!r} is not a number") from error
    if not math.isfinite(value) or (above is not None and value <= above):
        raise WorkloadError(
            f"{what}: {text} must be a finite number{'' if above is None else f' above {above:g}'}"
        )
    return value
