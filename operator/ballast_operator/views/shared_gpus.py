"""Nodes whose GPUs are offered to several pods at once, by the labels of NVIDIA's GPU feature discovery.

With time slicing or MPS the device plugin offers each GPU as several replicas
(https://docs.nvidia.com/datacenter/cloud-native/gpu-operator/latest/gpu-sharing.html). To Kubernetes each of
them looks like a GPU.
"""

from collections.abc import Mapping

REPLICAS = "nvidia.com/gpu.replicas"
"""Replicas of each GPU; 1: whole GPUs."""

STRATEGY = "nvidia.com/gpu.sharing-strategy"
"""``none``, ``time-slicing`` or ``mps``."""

PRODUCT = "nvidia.com/gpu.product"
SHARED_SUFFIX = "-SHARED"
"""Of the product where GPUs are shared under the name of whole ones."""


def shared_gpus(labels: Mapping[str, str]) -> str:
    """How the node's GPUs are shared, as text; empty: they are whole, or the node does not say.

    A gang must not be started there: the plugin may give two of its ranks the same GPU, which NCCL refuses
    (https://github.com/NVIDIA/nccl/issues/418), and speed, memory and cost would be those of a part of a GPU.
    """
    replicas, strategy = labels.get(REPLICAS, "1"), labels.get(STRATEGY, "none")
    several = replicas.isdecimal() and int(replicas) > 1
    if not several and strategy in ("", "none") and not labels.get(PRODUCT, "").endswith(SHARED_SUFFIX):
        return ""
    how = f"by {strategy}" if strategy not in ("", "none") else "by other pods"
    count = f", {replicas} replicas of each" if several else ""
    return f"its GPUs are shared {how}{count}, and ranks need whole GPUs"
