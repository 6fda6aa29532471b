"""What a job holds of each pool, from ``status.allocation`` as JSON."""

from collections.abc import Mapping
from typing import Any

from ballast_policies.rounds import PoolPart


def held_parts(allocation: Mapping[str, Any]) -> tuple[PoolPart, ...]:
    """The GPUs by pool, in the order of the ranks; none without an allocation."""
    if not allocation.get("pool"):
        return ()
    per_pod = allocation.get("gpusPerPod", 1)
    found = [
        PoolPart(pool=part["pool"], gpu_type=part["gpuType"], gpus=len(part.get("pods") or ()) * per_pod)
        for part in allocation.get("parts") or ()
    ]
    if found:
        return tuple(found)
    gpus, gpu_type = allocation.get("gpus", 0), allocation.get("gpuType", "")
    return (PoolPart(pool=allocation["pool"], gpu_type=gpu_type, gpus=gpus),)
