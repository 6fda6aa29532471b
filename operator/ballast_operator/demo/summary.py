"""The demo's result as one value: what ``ballast demo --output json`` prints.

Everything is computed from the :class:`Story`; nothing is known in advance.
"""

from collections.abc import Mapping
from typing import Any

from ballast_policies.allocation.problem import Allocation

from ballast_operator.demo.story import PodSeen, Story

JsonObject = dict[str, Any]


def summarise(story: Story, *, aware: Allocation | None, blind: Allocation | None) -> JsonObject:
    """Summary of a finished (or broken off) demo.

    Args:
        story: all that was seen.
        aware: the policy's allocation of the jobs over the pools.
        blind: what the same policy gives when it takes all GPU types for equal.
    """
    repacks = [repack for name in sorted(story.job_objects) for repack in _repacks(story, name)]
    return {
        "jobs": {name: _job(story, name) for name in sorted(story.job_objects)},
        "repacks": repacks,
        "rebalances": [entry for name in sorted(story.reports) for entry in _rebalances(story, name)],
        "waiting_job_started_after_repack_s": _waiting_seconds(story, repacks),
        "max_gpus_in_use_over_capacity": story.max_gpus_over_capacity,
        "allocation": _allocation(aware),
        "type_blind_allocation": _allocation(blind),
    }


def _status(story: Story, name: str) -> Mapping[str, Any]:
    status: Mapping[str, Any] = story.job_objects[name].get("status") or {}
    return status


def _job(story: Story, name: str) -> JsonObject:
    status = _status(story, name)
    allocation = status.get("allocation") or {}
    reports = [seen.report for seen in story.reports.get(name, [])]
    losses = [report.loss for report in reports if report.loss is not None]
    return {
        "state": status.get("state"),
        "gpuType": allocation.get("gpuType") or _last_known(story, name, "gpuType"),
        "gpus": allocation.get("gpus") or _last_gang(story, name),
        "steps": reports[-1].step if reports else 0,
        "loss_first": losses[0] if losses else None,
        "loss_last": losses[-1] if losses else None,
        "restarts": sum((status.get("restarts") or {}).values()),
    }


def _last_known(story: Story, name: str, field: str) -> Any:
    return (_status(story, name).get("lastDecision") or {}).get(field)


def _last_gang(story: Story, name: str) -> int:
    """GPUs of the pods that were alive at the job's end: those that no repack released."""
    released = {pod for repack in _status(story, name).get("repacks") or [] for pod in repack["releasedPods"]}
    launches: dict[str, list[PodSeen]] = {}
    for pod in story.pods_of(name):
        launches.setdefault(pod.name.rsplit("-", 1)[0], []).append(pod)
    last = list(launches.values())[-1] if launches else []
    return sum(pod.gpus for pod in last if pod.name not in released)


def _repacks(story: Story, name: str) -> list[JsonObject]:
    found = []
    for repack in _status(story, name).get("repacks") or []:
        survivors = [survivor["name"] for survivor in repack["survivors"]]
        uids = {pod: {p.uid for p in story.pods_of(name) if p.name == pod} for pod in survivors}
        restarts = {p.name: p.container_restarts for p in story.pods_of(name)}
        found.append(
            {
                "job": name,
                "released_pods": list(repack["releasedPods"]),
                "survivors": survivors,
                "survivor_uids_unchanged": all(
                    len(uids[pod]) == 1 and restarts.get(pod) == 0 for pod in survivors
                ),
                "pause_ms": repack.get("pauseMs"),
                "step_seconds_before": repack.get("stepSecondsBefore"),
                "step_seconds_after": repack.get("stepSecondsAfter"),
            }
        )
    return found


def _rebalances(story: Story, name: str) -> list[JsonObject]:
    found, seen = [], 0
    for entry in story.reports[name]:
        report = entry.report
        # The imbalance afterwards is measured over the next steps: wait for the report that has it.
        if report.rebalances > seen and report.imbalance_after is not None:
            seen = report.rebalances
            found.append(
                {
                    "job": name,
                    "step": report.last_rebalance_step,
                    "imbalance_before": report.imbalance_before,
                    "imbalance_after": report.imbalance_after,
                    "pause_ms": report.rebalance_pause_ms,
                }
            )
    return found


def _waiting_seconds(story: Story, repacks: list[JsonObject]) -> float | None:
    """Seconds from the first release of pods to the first report of a job that had been waiting for GPUs."""
    released = {pod for repack in repacks for pod in repack["released_pods"]}
    ends = [pod.deleted for pod in story.pods.values() if pod.name in released and pod.deleted is not None]
    if not ends:
        return None
    freed = min(ends)
    first_steps = [
        reports[0].at
        for name, reports in story.reports.items()
        if reports
        and story.job_states[name][0][0] < freed
        and all(p.created >= freed for p in story.pods_of(name))
    ]
    return round(min(first_steps) - freed, 2) if first_steps else None


def _allocation(allocation: Allocation | None) -> JsonObject | None:
    if allocation is None:
        return None
    return {
        "policy": allocation.policy,
        "fractions": {job: dict(row) for job, row in allocation.allocation.items()},
        "effective_steps_per_second": dict(allocation.throughput),
        "normalised": dict(allocation.levels),
    }
