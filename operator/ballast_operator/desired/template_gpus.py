"""GPUs that a template asks for by itself: only those of a pod's ranks, in its first container, count."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any


def gpus_elsewhere(template: Mapping[str, Any], gpu_resources: Sequence[str], gpus_per_pod: int = 1) -> str:
    """The field that asks for GPUs beside those of the pod's ranks, and what to change; empty: none does."""
    content = template.get("spec") or {}
    for path, container in _containers(content):
        first = path == "containers[0]"
        resources = container.get("resources") or {}
        for part in ("limits", "requests"):
            for name in gpu_resources:
                value = (resources.get(part) or {}).get(name)
                if value is None or str(value) in ("0", str(gpus_per_pod) if first else "0"):
                    continue
                return (
                    f"spec.template.spec.{path}.resources.{part}[{name}]: {str(value)[:40]!r}; the first "
                    f"container of a pod gets parallelism.gpusPerPod={gpus_per_pod} GPUs, and no other "
                    "container any. To fix: leave it out; pipeline.maxStages says how many GPUs the job has"
                )
    return ""


def _containers(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(content.get(kind) or []):
            yield f"{kind}[{index}]", container
