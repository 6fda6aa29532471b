"""Capacity type of a node, spot or on demand, by the labels that clouds and autoscalers give it."""

from collections.abc import Mapping

from ballast_operator.api.node_pool import CapacityType

_SPOT, _ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND

LABELS: Mapping[str, Mapping[str, CapacityType]] = {
    "ballast.dev/capacity-type": {"spot": _SPOT, "ondemand": _ON_DEMAND},
    "karpenter.sh/capacity-type": {"spot": _SPOT, "ondemand": _ON_DEMAND, "reserved": _ON_DEMAND},
    "eks.amazonaws.com/capacitytype": {"spot": _SPOT, "ondemand": _ON_DEMAND, "capacityblock": _ON_DEMAND},
    "cloud.google.com/gke-spot": {"true": _SPOT, "false": _ON_DEMAND},
    "cloud.google.com/gke-preemptible": {"true": _SPOT, "false": _ON_DEMAND},
    "cloud.google.com/gke-provisioning": {"spot": _SPOT, "preemptible": _SPOT, "standard": _ON_DEMAND},
    "kubernetes.azure.com/scalesetpriority": {"spot": _SPOT, "regular": _ON_DEMAND},
    "node.kubernetes.io/lifecycle": {"spot": _SPOT, "ondemand": _ON_DEMAND, "normal": _ON_DEMAND},
}
"""Label, in lower case -> its values, in lower case without hyphens -> what they say; the first one counts.

ballast.dev's own; Karpenter's; EKS's; GKE's three; AKS's; and the one of kops and others.
"""


def capacity_type_of(labels: Mapping[str, str]) -> tuple[CapacityType, str] | None:
    """(what the labels say, the label that says so); None: none does."""
    found = {key.lower(): (key, value) for key, value in labels.items() if "/" in key}
    for name, values in LABELS.items():
        if name in found:
            key, value = found[name]
            said = values.get(value.lower().replace("-", "").replace("_", ""))
            if said is not None:
                return said, f"{key}={value}"
    return None
