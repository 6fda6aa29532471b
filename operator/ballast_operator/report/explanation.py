"""Explanation of why a job runs where it runs, or waits: for ``ballast explain``."""

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from ballast_policies.contract.messages import JOB_LABEL

from ballast_operator.api.conditions import NO_POLICY, JobCondition
from ballast_operator.errors import Forbidden
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import EVENT, JOB, POD, POLICY, Kind, Object, is_ours

LAST_EVENTS = 10
"""Events shown."""

_OPERATORS = (JobCondition.RECONCILED, JobCondition.DECIDED)
"""Conditions that are False where the operator cannot act on the job."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodLine:
    """A pod of the job."""

    name: str
    node: str
    phase: str
    leaving: bool


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Explanation:
    """Everything that is known about a job's place.

    Attributes:
        answer: one sentence.
        reason: the stable word behind it.
        trial: ``status.trial``.
        decision: ``status.lastDecision``.
        policy: the ClusterPolicies' readiness, as text.
        events: the newest last, "reason: message".
        left_out: why pods or events are not shown.
    """

    job: str
    namespace: str
    state: str
    reason: str
    answer: str
    allocation: dict[str, Any]
    trial: dict[str, Any]
    decision: dict[str, Any]
    progress: dict[str, Any]
    restarts: dict[str, int]
    pods: tuple[PodLine, ...]
    conditions: tuple[dict[str, Any], ...]
    policy: tuple[str, ...]
    events: tuple[str, ...]
    left_out: tuple[str, ...] = ()

    def to_json(self) -> str:
        """A line of JSON."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)


async def explain_job(cluster: Cluster, namespace: str, name: str) -> Explanation:
    """Read what there is to know about a job. Raises NotFound: there is no such job."""
    job = await cluster.get(JOB, namespace, name)
    pods, no_pods = await _seen(cluster, POD, namespace=namespace, label_selector=f"{JOB_LABEL}={name}")
    of_job = f"involvedObject.uid={job['metadata']['uid']}"
    events, no_events = await _seen(cluster, EVENT, namespace=namespace, field_selector=of_job)
    policies, no_policies = await read_policies(cluster)
    found = explanation(job, pods, policies, events)
    found = dataclasses.replace(found, left_out=tuple(filter(None, (no_pods, no_events))))
    return dataclasses.replace(found, policy=(f"not shown: {no_policies}",)) if no_policies else found


async def read_policies(cluster: Cluster) -> tuple[list[Object], str]:
    """(the ClusterPolicies, why there are none to be seen: rights in a namespace do not reach them)."""
    return await _seen(cluster, POLICY)


async def _seen(cluster: Cluster, kind: Kind, **where: str) -> tuple[list[Object], str]:
    try:
        items, _ = await cluster.list(kind, **where)
    except Forbidden as error:
        return [], str(error)
    return list(items), ""


def explanation(
    job: Object, pods: Sequence[Object], policies: Sequence[Object], events: Sequence[Object]
) -> Explanation:
    """The explanation, from objects."""
    status = job.get("status") or {}
    conditions = tuple(status.get("conditions") or ())
    reason, answer = _answer(status, conditions)
    if not is_ours(job):
        answer = f"spec.managedBy: {job['spec']['managedBy']} has it, and this operator leaves it alone"
    stuck = [c["message"] for c in conditions if c["type"] in _OPERATORS and c["status"] == "False"]
    ordered = sorted(events, key=lambda e: (e.get("lastTimestamp") or "", e["metadata"]["name"]))
    return Explanation(
        job=job["metadata"]["name"],
        namespace=job["metadata"].get("namespace", ""),
        state=status.get("state") or "New",
        reason=reason,
        answer="; ".join([answer, *stuck]),
        allocation=dict(status.get("allocation") or {}),
        trial=dict(status.get("trial") or {}),
        decision=dict(status.get("lastDecision") or {}),
        progress=dict(status.get("progress") or {}),
        restarts=dict(status.get("restarts") or {}),
        pods=tuple(_pod(pod) for pod in sorted(pods, key=lambda pod: pod["metadata"]["name"])),
        conditions=conditions,
        policy=tuple(_policy(policy) for policy in policies) or (NO_POLICY,),
        events=tuple(f"{e.get('reason', '')}: {e.get('message', '')}" for e in ordered[-LAST_EVENTS:]),
    )


def _answer(status: Object, conditions: Sequence[Object]) -> tuple[str, str]:
    by_type = {condition["type"]: condition for condition in conditions}
    for kind in ("Succeeded", "Failed"):
        if by_type.get(kind, {}).get("status") == "True":
            return by_type[kind]["reason"], by_type[kind]["message"]
    admitted, running = by_type.get("Admitted"), by_type.get("Running")
    if admitted is None:
        return "New", "no operator has looked at the job yet. To fix: see that ballast operator runs"
    if admitted["status"] == "False":
        return admitted["reason"], admitted["message"]
    if running is not None and running["status"] == "False":
        return running["reason"], f"{admitted['message']}; not running yet: {running['message']}"
    decision = status.get("lastDecision") or {}
    why = decision.get("why") or admitted["message"]
    return admitted["reason"], with_nodes(why, by_type.get("Consolidated"))


def with_nodes(why: str, consolidated: Object | None) -> str:
    """Reason for a gang's placement, with its condition ``Consolidated`` if it is spread."""
    if consolidated is None or consolidated.get("status") != "False":
        return why
    return f"{why}; {consolidated['message']}"


def _pod(pod: Object) -> PodLine:
    return PodLine(
        name=pod["metadata"]["name"],
        node=(pod.get("spec") or {}).get("nodeName", ""),
        phase=(pod.get("status") or {}).get("phase", ""),
        leaving=bool(pod["metadata"].get("deletionTimestamp")),
    )


def _policy(policy: Object) -> str:
    conditions = (policy.get("status") or {}).get("conditions") or []
    said = [f"{c['type']} {c['status']} ({c['reason']}): {c['message']}" for c in conditions]
    return f"{policy['metadata']['name']}: " + ("; ".join(said) or "not looked at yet")
