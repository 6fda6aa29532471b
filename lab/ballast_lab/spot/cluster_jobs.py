"""The jobs of a live cluster as a replay of prices takes them: for ``ballast whatif --prices FOLDER``."""

import dataclasses
import datetime
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ballast_operator.kube.kinds import Object

from ballast_lab.spot.settings import SpotJob

SECONDS_PER_DAY = 86_400.0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedJobs:
    """Jobs of a cluster from a moment on.

    Attributes:
        jobs: with all their steps, in order of creation, the first at 0.
        left_out: why others are not there, as text.
        paid: what these jobs have cost on the cluster so far.
        finished: how many of them have ended.
    """

    jobs: tuple[SpotJob, ...]
    left_out: tuple[str, ...]
    paid: float
    finished: int


def replayed_jobs(
    items: Sequence[Object], gpu_types: Iterable[str], *, days: float, now: datetime.datetime
) -> ReplayedJobs:
    """TrainingJobs of ``items`` that were created in the last ``days`` days, on ``gpu_types``."""
    types, found, left_out = set(gpu_types), [], []
    for item in items:
        created = item["metadata"].get("creationTimestamp")
        begun = now if created is None else datetime.datetime.fromisoformat(created)
        if (now - begun).total_seconds() > days * SECONDS_PER_DAY:
            continue
        name = f"{item['metadata'].get('namespace', '')}/{item['metadata']['name']}"
        gpus, speeds = _speeds(item, types)
        if not speeds:
            known = ", ".join(sorted(types))
            left_out.append(f"{name}: no speed of it is known on {known}. To fix: state spec.throughput")
            continue
        found.append((begun, name, gpus, speeds, item))
    found.sort(key=lambda entry: (entry[0], entry[1]))
    jobs, paid, finished = [], 0.0, 0
    for begun, name, gpus, speeds, item in found:
        status: Mapping[str, Any] = item.get("status") or {}
        deadline = item["spec"].get("deadline")
        until = math.nan
        if deadline is not None:
            until = (datetime.datetime.fromisoformat(deadline) - begun).total_seconds()
        paid += status.get("costSoFar") or 0.0
        finished += status.get("state") in ("Succeeded", "Failed")
        jobs.append(
            SpotJob(
                name=name,
                arrival=(begun - found[0][0]).total_seconds(),
                steps=float(item["spec"]["totalSteps"]),
                gpus=gpus,
                speeds=speeds,
                deadline_seconds=until if until > 0 else None,
            )
        )
    return ReplayedJobs(jobs=tuple(jobs), left_out=tuple(left_out), paid=paid, finished=finished)


def _speeds(item: Object, types: set[str]) -> tuple[int, dict[str, float]]:
    """(GPUs of the gang, GPU type -> steps/s): measured where it runs, else as stated for the least size."""
    spec, status = item["spec"], item.get("status") or {}
    by_size: dict[int, dict[str, float]] = {}
    for entry in spec.get("throughput") or []:
        if entry["gpuType"] in types and entry["stepsPerSecond"] > 0:
            by_size.setdefault(entry["stages"], {})[entry["gpuType"]] = entry["stepsPerSecond"]
    held = status.get("allocation") or {}
    measured = (status.get("progress") or {}).get("stepsPerSecond") or 0.0
    if held.get("gpuType") in types and measured > 0 and not held.get("parts"):
        by_size.setdefault(held["gpus"], {})[held["gpuType"]] = measured
        if by_size[held["gpus"]].keys() != {held["gpuType"]}:
            return held["gpus"], by_size[held["gpus"]]
    if not by_size:
        return 0, {}
    most = max(len(speeds) for speeds in by_size.values())
    gpus = min(size for size, speeds in by_size.items() if len(speeds) == most)
    return gpus, by_size[gpus]
