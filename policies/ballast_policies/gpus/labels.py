"""Which GPU a node has, by the labels that the vendors' own components put on it."""

from collections.abc import Iterable, Mapping

from ballast_policies.gpus.catalogue import GpuModel, built_in_gpus, gpu_named

NVIDIA_PRODUCT = "nvidia.com/gpu.product"
"""Of NVIDIA's GPU feature discovery; a MIG slice or a shared GPU has a suffix, and is none of ours."""

AMD_PREFIXES = ("amd.com/gpu.", "beta.amd.com/gpu.")
AMD_PARTITION = "amd.com/compute-memory-partition"
"""Of AMD's node labeller: e.g. ``spx_nps1``, a whole GPU; ``cpx_nps4`` is divided into several."""


def gpu_of_node(labels: Mapping[str, str], gpus: Iterable[GpuModel] | None = None) -> GpuModel | None:
    """The GPU of a node.

    AMD's labeller has written both ``amd.com/gpu.product-name: VALUE`` and, a count of each,
    ``beta.amd.com/gpu.product-name.VALUE: "8"``; the device id is looked at where no product is known.

    Args:
        labels: of the node.
        gpus: default: the built-in catalogue.

    Returns:
        None where the node has no such label, its GPU is not in the catalogue, it has several kinds, or its
        GPUs are divided: a part has neither the memory nor the speed of the whole.
    """
    known = built_in_gpus() if gpus is None else tuple(gpus)
    kinds = _nvidia(labels, known) + _amd(labels, known)
    return kinds[0] if len({kind.name if kind else "" for kind in kinds}) == 1 else None


def _nvidia(labels: Mapping[str, str], known: Iterable[GpuModel]) -> list[GpuModel | None]:
    if NVIDIA_PRODUCT not in labels:
        return []
    return [gpu_named(labels[NVIDIA_PRODUCT], (gpu for gpu in known if gpu.vendor == "nvidia"))]


def _amd(labels: Mapping[str, str], known: Iterable[GpuModel]) -> list[GpuModel | None]:
    if not labels.get(AMD_PARTITION, "spx").lower().startswith("spx"):
        return [None]
    amd = [gpu for gpu in known if gpu.vendor == "amd"]
    by_product = [gpu_named(product, amd) for product in _amd_values(labels, "product-name")]
    if by_product and None not in by_product:
        return by_product
    ids = _amd_values(labels, "device-id")
    by_id = [next((gpu for gpu in amd if each.lower() in gpu.device_ids), None) for each in ids]
    return by_id or by_product


def _amd_values(labels: Mapping[str, str], of: str) -> set[str]:
    """Values of one property, as the label's value or as the end of its key."""
    values = set()
    for prefix in AMD_PREFIXES:
        key = f"{prefix}{of}"
        values |= {labels[key]} if key in labels else set()
        values |= {other.removeprefix(f"{key}.") for other in labels if other.startswith(f"{key}.")}
    return values
