"""The demo's result as one value, the output of ``ballast demo --output json``.

Everything is computed from the :class:`Story`; nothing is known in advance.
"""

from collections.abc import Mapping
from typing import Any

from ballast_policies.allocation.problem import Allocation

from ballast_operator.demo.story import PodSeen, Story

JsonObject = dict[str, Any]
REPACKING = "Repacking"
"""State of a job whose proposal to hand pods back has been taken up."""


def summarise(story: Story, *, aware: Allocation | None, agnostic: Allocation | None) -> JsonObject:
    """Summary of a finished (or broken off) demo.

    Args:
        story: the recorded events.
        aware: the policy's allocation of the jobs over the pools.
        agnostic: the same policy's allocation when all GPU types count as equal.
    """
    repacks = [repack for name in sorted(story.job_objects) for repack in _repacks(story, name)]
    after_release, after_proposal = _waiting(story, repacks)
    return {
        "jobs": {name: _job(story, name) for name in sorted(story.job_objects)},
        "repacks": repacks,
        "rebalances": [entry for name in sorted(story.reports) for entry in _rebalances(story, name)],
        "waiting_job_started_after_repack_s": _rounded(after_release),
        "waiting_job_started_after_proposal_s": _rounded(after_proposal),
        "max_gpus_in_use_over_capacity": story.max_gpus_over_capacity,
        "allocation": _allocation(aware),
        "type_blind_allocation": _allocation(agnostic),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)


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


def _waiting(story: Story, repacks: list[JsonObject]) -> tuple[float | None, float | None]:
    """How long the first job that a repack let in took to its first report.

    Returns:
        Seconds from the moment the released pods were gone, and from the proposal to release them
        (the moment the shrinking job's state became Repacking); None where no job waited for a repack.
    """
    best: tuple[float, float | None] | None = None
    for name, reports in story.reports.items():
        pods = story.pods_of(name)
        if not reports or not pods:
            continue
        for repack in repacks:
            gone = [p.deleted for p in story.pods.values() if p.name in repack["released_pods"]]
            if any(at is None for at in gone):
                continue
            freed = max(at for at in gone if at is not None)
            arrived = story.job_states[name][0][0]
            if not arrived < freed <= pods[0].created:
                continue
            proposals = [
                at for at, state in story.job_states[repack["job"]] if state == REPACKING and at <= freed
            ]
            since_proposal = reports[0].at - proposals[-1] if proposals else None
            if best is None or reports[0].at - freed < best[0]:
                best = (reports[0].at - freed, since_proposal)
    return best or (None, None)


def _allocation(allocation: Allocation | None) -> JsonObject | None:
    if allocation is None:
        return None
    return {
        "policy": allocation.policy,
        "fractions": {job: dict(row) for job, row in allocation.allocation.items()},
        "effective_steps_per_second": dict(allocation.throughput),
        "normalised": dict(allocation.levels),
    }
