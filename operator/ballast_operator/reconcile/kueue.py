"""Jobs in a queue of Kueue: they hold GPUs only while Kueue admits their Workload.

Kueue counts, Ballast places. The Workload asks for the largest gang of the job, in whole pods; which GPUs
they get is not Kueue's to say. It is made, looked at and deleted, never changed: one that Kueue evicts is
deleted once its gang is gone, which frees its quota, and a new one takes the next place in the queue.
"""

from collections.abc import Collection
from typing import Any

from ballast_policies.scheduling.refusals import Refusal

from ballast_operator.api.conditions import JobReason
from ballast_operator.desired import counted_pod, owned
from ballast_operator.errors import Conflict, NotFound, Rejected
from ballast_operator.kube.client import Cluster
from ballast_operator.kube.kinds import WORKLOAD, Object, controlled_by
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView, hold


async def ask_kueue(
    cluster: Cluster, view: JobView, gpu_resources: Collection[str], now: Time
) -> Refusal | None:
    """Refusal of GPUs to the job by Kueue; None: its Workload is admitted, or it needs none.

    That of a job which has left its queue is deleted, also while the gang runs on.

    ``gpu_resources``: those that the pools have.

    Raises:
        Unavailable: the API server does not answer.
    """
    assert view.spec is not None
    namespace, name = view.key[0], f"trainingjob-{view.name}"[:253]
    holds = bool(view.queue) and view.status.allocation is not None
    try:
        found = await cluster.get(WORKLOAD, namespace, name)
    except NotFound:
        found = None
    if found is not None and not controlled_by(found, view.uid):
        message = f"Workload {name} is not the job's. To fix: delete or rename it, or rename the job"
        return Refusal(JobReason.NAME_TAKEN, message)
    wanted = view.queue and not view.status.finished and hold(view.spec.asked, view.status, now) is None
    problem = _waits(view, found) if found is not None else ""
    if found is not None and not holds and (not wanted or _is_over(view, found)):
        await cluster.delete(WORKLOAD, namespace, name, uid=found["metadata"]["uid"])
        return Refusal(JobReason.QUEUED, problem)
    if found is not None or not wanted:
        return Refusal(JobReason.QUEUED, problem) if problem else None
    if not gpu_resources:
        return Refusal(JobReason.QUEUED, "Kueue is asked once the pools are known")
    if len(gpu_resources) > 1:
        have = f"the pools have {len(gpu_resources)}: {', '.join(sorted(gpu_resources))}"
        return Refusal(JobReason.QUEUED, f"Kueue counts GPUs of one resource, and {have}")
    (resource,) = gpu_resources
    try:
        await cluster.create(WORKLOAD, _workload(view, name, resource))
    except NotFound:
        fix = "install Kueue 0.15 or later, or take the label kueue.x-k8s.io/queue-name away"
        return Refusal(JobReason.QUEUED, f"the cluster has no Workloads of Kueue. To fix: {fix}")
    except Conflict:
        pass  # one that was deleted is on its way out
    except Rejected as error:
        return Refusal(JobReason.QUEUED, f"its Workload is refused: {error}"[:1000])
    return Refusal(JobReason.QUEUED, f"its Workload {name} waits in queue {view.queue}")


def _workload(view: JobView, name: str, resource: str) -> dict[str, Any]:
    assert view.spec is not None
    template = {"spec": counted_pod(view.spec, resource)}
    pods = {"name": "main", "count": _pods(view), "template": template}
    return owned(view, WORKLOAD, name, spec={"queueName": view.queue, "podSets": [pods]})


def _pods(view: JobView) -> int:
    """Pods of the largest gang."""
    assert view.spec is not None
    return -(-view.spec.largest_gang // view.spec.gpus_per_pod)


def _is_over(view: JobView, workload: Object) -> bool:
    """True if a Workload without a gang gives way to a new one; one that is deactivated stays."""
    active = workload["spec"].get("active") is not False
    return active and (_said(workload, "Evicted")[0] == "True" or bool(_asks_otherwise(view, workload)))


def _waits(view: JobView, workload: Object) -> str:
    """Reason that its job must hold no GPUs; empty: it is admitted."""
    name = workload["metadata"]["name"]
    evicted, why = _said(workload, "Evicted")
    if evicted == "True":
        return f"Kueue has evicted its Workload {name}: {why}"
    if other := _asks_otherwise(view, workload):
        return f"its Workload {name} asks for {other}: it queues again"
    if _said(workload, "Admitted")[0] == "True":
        return ""
    why = _said(workload, "QuotaReserved")[1] or "Kueue has not looked at it yet"
    return f"its Workload {name} waits in queue {view.queue}: {why}"


def _asks_otherwise(view: JobView, workload: Object) -> str:
    """Request of the Workload, where the job has been changed since; empty: it has not."""
    queue, (pods, *_) = workload["spec"].get("queueName", ""), workload["spec"]["podSets"]
    if (queue, pods.get("count")) == (view.queue, _pods(view)):
        return ""
    return f"{pods.get('count')} pods of queue {queue}, the job for {_pods(view)} of {view.queue}"


def _said(workload: Object, kind: str) -> tuple[str, str]:
    """(status, message) of a condition."""
    for condition in (workload.get("status") or {}).get("conditions") or ():
        if condition["type"] == kind:
            return condition["status"], str(condition.get("message", ""))[:500]
    return "", ""
