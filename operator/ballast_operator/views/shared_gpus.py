"""GPUs that two jobs share (``nodePools[].sharing``): nodes that suit, and who is on a GPU as well."""

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterable, Mapping

from ballast_policies.rounds.values import dedupe_shared_gpus
from ballast_policies.scheduling.gang_spec import job_id

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.kube.caches import job_of
from ballast_operator.kube.kinds import Key, Object
from ballast_operator.views.clock import Time
from ballast_operator.views.nodes import (
    REPLICAS,
    STRATEGY,
    NodeView,
    foreign_use,
    is_ours,
    own_use,
    shared_gpus,
)


def dedupe_shared_allocations(allocations: Iterable[JobAllocation]) -> list[JobAllocation]:
    """The allocations without the second of two on one GPU.

    The first is one that pays, if there is one: the other's pod has ended, or its node is still to come.
    """
    paying_first = sorted(allocations, key=lambda held: not held.pays)
    return dedupe_shared_gpus(
        paying_first, lambda held: held.nodes[0] if held.shared_gpu is not None and held.nodes else ""
    )


JOBS_PER_GPU = 2
"""Jobs on a GPU, at most."""

TIME_SLICING = ("", "time-slicing")
"""Values of the label of the strategy; an old feature discovery has none."""


def as_shared(node: NodeView, resource: str) -> NodeView:
    """The node in a pool with sharing: open, unless it is closed for another reason or does not suit."""
    closed = "" if node.closed == shared_gpus(node.labels) else node.closed
    return dataclasses.replace(node, closed=closed or why_not_shared(node, resource))


def why_not_shared(node: NodeView, resource: str) -> str:
    """Reason that two jobs cannot share a GPU of the node, as text; empty: they can.

    Only on a node with one GPU is it certain that two pods are on the same one: the device plugin chooses.
    """
    replicas, strategy = node.labels.get(REPLICAS, ""), node.labels.get(STRATEGY, "")
    if replicas != str(JOBS_PER_GPU):
        found = f"is {replicas}" if replicas else "is missing"
        return f"its pool shares GPUs, and its label {REPLICAS} {found} in place of {JOBS_PER_GPU}"
    if strategy not in TIME_SLICING:
        return f"its pool shares GPUs by time slicing, and its label {STRATEGY} is {strategy}"
    if node.gpus(resource) != JOBS_PER_GPU:
        offered = node.gpus(resource)
        return (
            f"its pool shares GPUs, which needs nodes of one GPU each: it offers {offered} of {resource} "
            f"in place of {JOBS_PER_GPU}"
        )
    return ""


def taken_by_others(
    pods: Iterable[Object], allocations: Mapping[Key, JobAllocation], resource: str, *, but: Collection[Key]
) -> Counter[str]:
    """Node -> replicas that pods hold, or launches count on, of other jobs than ``but`` and of no job."""
    pods = [pod for pod in pods if not is_ours(pod) or job_of(pod) not in but]
    held = {key: gang for key, gang in allocations.items() if key not in but}
    return foreign_use(pods, resource) + own_use(pods, held, resource, but=("", ""))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sharer:
    """A job that is on the GPU as well.

    Attributes:
        job: namespace/name.
    """

    job: str
    since: Time


def sharer_of(key: Key, node: str, allocations: Mapping[Key, JobAllocation]) -> Sharer | None:
    """Job of ``allocations`` on the GPU of ``node`` besides the job ``key``; None: it is alone."""
    for other, held in sorted(allocations.items()):
        if other != key and held.shared_gpu is not None and node in held.nodes and held.pays:
            return Sharer(job=job_id(other), since=held.since)
    return None
