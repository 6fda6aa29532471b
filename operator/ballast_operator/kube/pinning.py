"""The node that a pod takes GPUs of, also before it is bound."""

from ballast_operator.kube.kinds import Object


def pinned_node(pod: Object) -> str:
    """The node a pod is bound or pinned to; empty where it is neither."""
    content = pod.get("spec") or {}
    if content.get("nodeName"):
        return str(content["nodeName"])
    required = ((content.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    for term in required.get("nodeSelectorTerms") or []:
        for field in term.get("matchFields") or []:
            one = field.get("operator", "In") == "In" and len(field.get("values") or []) == 1
            if field.get("key") == "metadata.name" and one:
                return str(field["values"][0])
    return ""
