"""Files of elastic jobs: a cluster, speeds by GPU type and number, and jobs (``docs/simulator.md``)."""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from ballast_policies.allocation.problem import Configuration
from ballast_policies.contract.decode import decode_text
from ballast_policies.contract.errors import ContractError, Problem, shown
from ballast_policies.elastic.job import ElasticCluster, ElasticJob

Sizes = Literal["stated", "all", "requested"] | int
"""Numbers of GPUs that a job may have: those that the file's cluster states for each type, all that have a
measured speed, (nearest to) what the job requested, or (nearest to) one number for all jobs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Type:
    nodes: int
    gpus_per_node: int
    gpu_counts: tuple[int, ...] | None = None
    sia_gpu_counts: tuple[int, ...] | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Speeds:
    options: tuple[tuple[Any, ...], ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Model:
    restart_s: float
    types: Mapping[str, _Speeds]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _File:
    cluster: Mapping[str, _Type]
    option_columns: tuple[str, ...]
    job_columns: tuple[str, ...]
    models: Mapping[str, _Model]
    workloads: Mapping[str, tuple[tuple[Any, ...], ...]]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ElasticWorkload:
    """Jobs in order of arrival, and the cluster that their speeds belong to."""

    name: str
    cluster: ElasticCluster
    jobs: tuple[ElasticJob, ...]


def read_workload(text: str, *, workload: str | None = None, sizes: Sizes = "stated") -> ElasticWorkload:
    """Workload of a file; ``workload``: its name, None: the file's only one.

    Raises:
        ContractError: the file does not fit, or has no such workload.
    """
    file = decode_text(_File, text, unknown="ignore", spelling=str)
    if workload is None:
        if len(file.workloads) != 1:
            raise ContractError(
                f"the file has {len(file.workloads)} workloads. "
                f"To fix: --workload, one of {_some(file.workloads)}"
            )
        workload = next(iter(file.workloads))
    if workload not in file.workloads:
        raise ContractError(f"there is no workload {workload!r}. To fix: one of {_some(file.workloads)}")
    for name, kind in file.cluster.items():
        if kind.nodes < 1 or kind.gpus_per_node < 1:
            raise ContractError(Problem(f"cluster.{name}", "nodes and gpus_per_node must be 1 or more"))
    cluster = ElasticCluster(
        nodes={name: kind.nodes for name, kind in file.cluster.items()},
        gpus_per_node={name: kind.gpus_per_node for name, kind in file.cluster.items()},
    )
    configurations = {name: _configurations(file, name, sizes) for name in file.models}
    path = f"workloads.{workload}"
    rows = [dict(zip(file.job_columns, row, strict=False)) for row in file.workloads[workload]]
    jobs = [_job(file, configurations, row, f"{path}[{i}]", sizes) for i, row in enumerate(rows)]
    names = [job.name for job in jobs]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ContractError(Problem(path, f"the job {twice!r} is named twice"))
    if not jobs:
        raise ContractError(Problem(path, "there are no jobs"))
    return ElasticWorkload(
        name=workload, cluster=cluster, jobs=tuple(sorted(jobs, key=lambda job: (job.arrival, job.name)))
    )


_Spread = Mapping[tuple[str, int], Mapping[int, float]]


def _configurations(file: _File, model: str, sizes: Sizes) -> tuple[tuple[Configuration, ...], _Spread]:
    """Configurations of the model, with speeds on more nodes than hold a gang, as :class:`ElasticJob` has."""
    if not {"gpus", "samples_per_s"} <= set(file.option_columns):
        raise ContractError(Problem("option_columns", "must have 'gpus' and 'samples_per_s'"))
    found, spread = [], dict[tuple[str, int], dict[int, float]]()
    for gpu_type, speeds in file.models[model].types.items():
        if gpu_type not in file.cluster:
            continue
        kind = file.cluster[gpu_type]
        stated = kind.gpu_counts if kind.gpu_counts is not None else kind.sia_gpu_counts
        for i, values in enumerate(speeds.options):
            path = f"models.{model}.types.{gpu_type}.options[{i}]"
            row = dict(zip(file.option_columns, values, strict=False))
            gpus, speed = (_number(row.get(column), column, path) for column in ("gpus", "samples_per_s"))
            if gpus != int(gpus) or gpus < 1 or speed <= 0:
                raise ContractError(Problem(path, f"{gpus:g} GPUs at {speed:g} is no configuration"))
            if gpus > kind.nodes * kind.gpus_per_node:
                continue
            if sizes == "stated" and stated is not None and int(gpus) not in stated:
                continue
            fewest = math.ceil(gpus / kind.gpus_per_node)
            nodes = fewest if row.get("nodes") is None else _number(row["nodes"], "nodes", path)
            if nodes != int(nodes) or not fewest <= nodes <= gpus:
                reason = f"nodes is {nodes:g}: {gpus:g} GPUs are on {fewest} to {gpus:g} nodes of {gpu_type}"
                raise ContractError(Problem(path, reason))
            if nodes > fewest:
                spread.setdefault((gpu_type, int(gpus)), {})[int(nodes)] = speed
            else:
                found.append((gpu_type, int(gpus), speed))
    packed = {(gpu_type, gpus): speed for gpu_type, gpus, speed in found}
    for (gpu_type, gpus), by_nodes in spread.items():
        most, at = packed.get((gpu_type, gpus)), f"models.{model}.types.{gpu_type}"
        if most is None or max(by_nodes.values()) > most:
            reason = f"{gpus} GPUs at {max(by_nodes.values()):g} over {min(by_nodes)} nodes or more"
            known = "no row says" if most is None else f"{most:g} is"
            fix = "To fix: a row without nodes, of a speed no lower"
            raise ContractError(Problem(at, f"{reason}; {known} the speed on fewer. {fix}"))
    return tuple(Configuration.of_one_type(*each) for each in sorted(found)), spread


def _job(
    file: _File,
    configurations: Mapping[str, tuple[tuple[Configuration, ...], _Spread]],
    row: Mapping[str, Any],
    path: str,
    sizes: Sizes,
) -> ElasticJob:
    needed = ["name", "arrival_s", "application", "batch_size", "work_samples"]
    if sizes == "requested":
        needed.append("requested_gpus")
    missing = [key for key in needed if key not in row]
    if missing:
        raise ContractError(
            Problem(path, f"has no {', '.join(missing)}. To fix: add it to the row and job_columns")
        )
    model = f"{row['application']}@{row['batch_size']}"
    if model not in configurations:
        raise ContractError(
            Problem(path, f"there is no model {model!r}. To fix: one of {_some(configurations)}")
        )
    chosen, spread = configurations[model]
    if sizes == "requested":
        chosen = _nearest(chosen, _number(row["requested_gpus"], "requested_gpus", path))
    elif isinstance(sizes, int):
        chosen = _nearest(chosen, sizes)
    try:
        return ElasticJob(
            name=str(row["name"]),
            arrival=_number(row["arrival_s"], "arrival_s", path),
            work=_number(row["work_samples"], "work_samples", path),
            restart_seconds=file.models[model].restart_s,
            configurations=chosen,
            spread=spread,
        )
    except ContractError as error:
        raise ContractError(problem.below(path) for problem in error.problems) from error


def _nearest(configurations: Iterable[Configuration], requested: float) -> tuple[Configuration, ...]:
    """Size on each GPU type that is nearest to the requested one, the first of two; smallest first."""
    best: dict[str, Configuration] = {}
    for each in configurations:
        (gpu_type,) = each.gpus
        now = best.get(gpu_type)
        if now is None or abs(each.total - requested) < abs(now.total - requested):
            best[gpu_type] = each
    return tuple(best.values())


def _number(value: Any, column: str, path: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ContractError(Problem(path, f"{column} is {shown(value)}, not a number"))
    return float(value)


def _some(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:8]) + (f" and {len(listed) - 8} more" if len(listed) > 8 else "")
