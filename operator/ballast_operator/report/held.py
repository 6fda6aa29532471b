"""GPUs that a job holds of each pool, from ``status.allocation`` as JSON."""

from collections.abc import Mapping
from typing import Any

from ballast_policies.rounds.values import PoolPart

from ballast_operator.api.job_allocation import is_coming
from ballast_operator.kube.kinds import Object


def held_parts(allocation: Mapping[str, Any]) -> tuple[PoolPart, ...]:
    """Its GPUs by pool, in the order of the ranks; none without an allocation."""
    return _parts(allocation, frozenset())


def paid_parts(allocation: Mapping[str, Any]) -> tuple[PoolPart, ...]:
    """As :func:`held_parts`, without GPUs on nodes that do not exist yet, and of pods that have ended."""
    pods, nodes = allocation.get("pods") or (), allocation.get("nodes") or ()
    ended = frozenset(allocation.get("ended") or ()) & frozenset(pods)
    coming = (pod for pod, node in zip(pods, nodes, strict=False) if is_coming(node))
    return _parts(allocation, ended.union(coming))


def _parts(allocation: Mapping[str, Any], without: frozenset[str]) -> tuple[PoolPart, ...]:
    if not allocation.get("pool"):
        return ()
    per_pod = int(allocation.get("gpusPerPod") or 1)
    found = [
        PoolPart(
            pool=part["pool"],
            gpu_type=part["gpuType"],
            gpus=len(set(part.get("pods") or ()) - without) * per_pod,
        )
        for part in allocation.get("parts") or ()
    ]
    if found:
        return tuple(found)
    gpus = int(allocation.get("gpus", 0)) - len(without) * per_pod
    return (PoolPart(pool=allocation["pool"], gpu_type=allocation.get("gpuType", ""), gpus=gpus),)


def partner(allocation: Mapping[str, Any]) -> str:
    """The job that is on its GPU as well; empty: none."""
    return str((allocation.get("sharedGpu") or {}).get("partner", ""))


def shared_node(allocation: Mapping[str, Any]) -> str:
    """The node of the GPU that it shares, or may share; empty: its GPUs are its own."""
    nodes = allocation.get("nodes") or ("",)
    return "" if allocation.get("sharedGpu") is None else str(nodes[0])


def with_nodes(why: str, consolidated: Object | None) -> str:
    """Reason for a gang's placement, with its condition ``Consolidated`` if it is spread."""
    if consolidated is None or consolidated.get("status") != "False":
        return why
    return f"{why}; {consolidated['message']}"
