"""A simulation's result as the caches would have held it, for the page without a cluster."""

import datetime
import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping
from typing import Any

from ballast_operator.history.recent import MOST_SAMPLES, Recent
from ballast_operator.kube.caches import Caches
from ballast_operator.kube.kinds import JOB, POLICY

NAMESPACE = "simulation"

MOST_SIMULATED = 100_000
"""Jobs, and stretches on GPUs, that are shown."""


class NotASimulationError(ValueError):
    """The input is not what ``ballast simulate --jobs --output json`` prints."""


def simulated(result: Any) -> Recent:
    """A simulation's events, at its end in seconds from 0. Raises NotASimulationError: it is none."""
    try:
        return _simulated(result)
    except (LookupError, TypeError, ValueError, AttributeError, OverflowError, OSError) as error:
        fix = "give the file that `ballast simulate ... --jobs --output json` has printed"
        raise NotASimulationError(f"not a simulation's result: {error!r:.200}. To fix: {fix}") from error


def _simulated(result: Mapping[str, Any]) -> Recent:
    jobs = {job["name"]: job for job in result["jobs"]}
    cluster = {str(name): int(count) for name, count in result["cluster"].items()}
    segments = result.get("timeline") or [_whole(job) for job in jobs.values() if job["seconds_on"]]
    if len(segments) > MOST_SIMULATED or len(jobs) > MOST_SIMULATED:
        raise ValueError(
            f"{len(jobs)} jobs and {len(segments)} stretches; at most {MOST_SIMULATED} are shown"
        )
    end = max([0.0, *(_finite(each["end"]) for each in segments)])
    changes: defaultdict[tuple[float, int], list[tuple[str, str | None]]] = defaultdict(list)
    for job in jobs.values():
        changes[_finite(job["arrival"]), 1].append((job["name"], None))
    for each in segments:
        if each["job"] in jobs:  # others are outside what was measured
            changes[_finite(each["end"]), 0].append((each["job"], None))
            changes[_finite(each["start"]), 2].append((each["job"], str(each["gpu_type"])))
    now, versions, caches = 0.0, itertools.count(1), Caches()
    recent = Recent(caches, clock=lambda: now, sample_seconds=max(1.0, 1.1 * end / MOST_SAMPLES))
    held, launches = dict[str, str](), Counter[str]()
    for (now, order), changed in sorted(changes.items()):
        for name, kind in changed:
            launches[name] += order == 2
            held.pop(name, None)
            if kind is not None:
                held[name] = kind
            status = _status(jobs[name], kind, now, launches[name], str(result["policy"]))
            caches.wrote(JOB, _job(jobs[name], status, next(versions)))
        taken = Counter[str]()
        for name, kind in held.items():
            taken[kind] += int(jobs[name]["gpus"])
        caches.wrote(POLICY, _policy(cluster, taken, str(result["policy"]), next(versions)))
        recent.work_out()
    recent.clock = lambda: end
    return recent


def _whole(job: Mapping[str, Any]) -> dict[str, Any]:
    """Stretch from a job's first run to its end, where the result has no timeline."""
    kind = max(job["seconds_on"], key=lambda name: job["seconds_on"][name])
    start = _finite(job["first_run"] or 0.0)
    return {"job": job["name"], "gpu_type": kind, "start": start, "end": _finite(job["finish"] or start)}


def _finite(value: Any) -> float:
    number = float(value)
    if not 0 <= number < 1e11 or math.isnan(number):
        raise ValueError(f"{number} is no time of a simulation")
    return number


def _time(seconds: float) -> str:
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).isoformat()


def _job(job: Mapping[str, Any], status: Mapping[str, Any], version: int) -> dict[str, Any]:
    metadata = {
        "name": str(job["name"]),
        "namespace": NAMESPACE,
        "uid": str(job["name"]),
        "resourceVersion": str(version),
        "creationTimestamp": _time(_finite(job["arrival"])),
    }
    spec = {"totalSteps": int(job["steps"]), "weight": job["weight"], "model": {"name": str(job["type"])}}
    return {"metadata": metadata, "spec": spec, "status": status}


def _status(job: Mapping[str, Any], kind: str | None, now: float, launch: int, policy: str) -> dict[str, Any]:
    finish, gpus = job["finish"], int(job["gpus"])
    over = kind is None and finish is not None and now >= _finite(finish) * (1 - 1e-9) and launch > 0
    said = {"status": "True", "reason": "Assigned", "message": f"{gpus} x {kind}"}
    if kind is None:
        said = {"status": "False", "reason": "WaitingForCapacity", "message": f"waits for {gpus} GPUs"}
    conditions = [{"type": "Admitted", "lastTransitionTime": _time(now), **said}]
    if over:
        done = {"type": "Succeeded", "status": "True", "reason": "Finished", "message": "all steps are done"}
        conditions.append({**done, "lastTransitionTime": _time(now)})
    status: dict[str, Any] = {
        "state": "Succeeded" if over else "Running" if kind is not None else "Waiting",
        "conditions": conditions,
        "launches": launch,
        "progress": {"step": int(job["steps"]) if over else 0},
    }
    if over:
        seconds = {name: float(value) * gpus for name, value in job["seconds_on"].items()}
        total = sum(seconds.values()) or 1.0
        status["costSoFar"] = job["cost"]
        status["finishedAt"] = _time(now)
        status["poolCosts"] = [
            {"pool": name, "gpuType": name, "gpuSeconds": value, "cost": job["cost"] * value / total}
            for name, value in seconds.items()
        ]
    if kind is not None:
        status["allocation"] = {
            "pool": kind,
            "gpuType": kind,
            "gpus": gpus,
            "launch": launch,
            "pods": [f"{launch}-{rank}" for rank in range(gpus)],
            "nodes": [kind] * gpus,
            "since": _time(now),
        }
        status["lastDecision"] = {
            "planId": f"at {now:.0f} s",
            "chosen": f"{gpus} x {kind}",
            "why": f"simulated, by policy {policy}",
        }
    return status


def _policy(
    cluster: Mapping[str, int], taken: Mapping[str, int], policy: str, version: int
) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "reason": "InForce", "message": f"simulated, by {policy}"}
    capacity = [
        {"pool": name, "gpuType": name, "nodes": 0, "gpus": count, "gpusHeld": taken[name]}
        for name, count in cluster.items()
    ]
    return {
        "metadata": {"name": "simulation", "uid": "simulation", "resourceVersion": str(version)},
        "spec": {"nodePools": [], "objective": {"policy": policy}},
        "status": {"conditions": [ready], "capacity": capacity, "gpus": sum(cluster.values())},
    }
