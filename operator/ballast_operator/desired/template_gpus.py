"""GPUs beside those of a pod's ranks, in its first container: a template's own, and what admission adds."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ballast_operator.views.nodes import pod_gpus


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


def gpus_added(wanted: Mapping[str, Any], made: Mapping[str, Any], gpu_resources: Sequence[str]) -> str:
    """The containers by which the API server's pod has more GPUs than it was sent with; empty: it has not.

    A LimitRange gives its default to each container that does not name the resource; a webhook may add a
    container. Nobody would count these GPUs, and another gang would wait for them on that node.
    """
    for name in gpu_resources:
        asked, has = (pod_gpus(dict(pod), name) for pod in (wanted, made))
        if has <= asked:
            continue
        before = dict(_asking(wanted, name))
        added = [f"{who} {count}" for who, count in _asking(made, name) if before.get(who) != count]
        return (
            f"a LimitRange or a webhook gives the pod {has} {name} instead of {asked}: "
            f"{', '.join(added)[:500]}. To fix: except the job's pods from it, or give the template's "
            f"further containers resources.limits[{name}]=0"
        )
    return ""


def _asking(pod: Mapping[str, Any], gpu_resource: str) -> Iterator[tuple[str, str]]:
    """(container by name, how many GPUs it asks for)."""
    for _, container in _containers(pod.get("spec") or {}):
        resources = container.get("resources") or {}
        limits, requests = (resources.get(part) or {} for part in ("limits", "requests"))
        count = requests.get(gpu_resource, limits.get(gpu_resource))
        if count is not None and str(count) != "0":
            yield f"container {container.get('name')}", str(count)


def _containers(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(content.get(kind) or []):
            yield f"{kind}[{index}]", container
