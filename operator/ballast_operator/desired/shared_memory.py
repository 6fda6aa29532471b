"""``/dev/shm`` of pods with several ranks: a volume in memory, for NCCL and data loaders.

A container has 64 MiB of it unless a volume is mounted there.  What ranks write to it counts toward the
memory of the container that writes.
"""

from typing import Any

SHARED_MEMORY_PATH = "/dev/shm"
VOLUME = "ballast-shared-memory"
MEBIBYTES_PER_RANK = 1024
"""Limit of the volume, for each rank of the pod."""


def with_shared_memory(content: dict[str, Any], container: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The container with the volume mounted, which is added to the pod's spec ``content``.

    Unchanged where the template mounts something there, or has a volume of this name.
    """
    mounts, volumes = list(container.get("volumeMounts") or []), list(content.get("volumes") or [])
    mounted = {str(mount.get("mountPath", "")).rstrip("/") for mount in mounts}
    if SHARED_MEMORY_PATH in mounted or VOLUME in {volume.get("name") for volume in volumes}:
        return container
    empty = {"medium": "Memory", "sizeLimit": f"{ranks * MEBIBYTES_PER_RANK}Mi"}
    content["volumes"] = [*volumes, {"name": VOLUME, "emptyDir": empty}]
    return {**container, "volumeMounts": [*mounts, {"name": VOLUME, "mountPath": SHARED_MEMORY_PATH}]}
