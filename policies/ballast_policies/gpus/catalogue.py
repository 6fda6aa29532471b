"""The catalogue of GPUs: memory, FLOP/s, bandwidth and links from vendors' data sheets.

The rows are ``data/gpus.toml``, whose head has the units and what each figure means. Which of them a node
has, the labels say that the vendors' own components put on it.
"""

import dataclasses
import functools
import math
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from types import MappingProxyType
from typing import Any

PRECISIONS = ("fp64", "fp32", "tf32", "fp16", "bf16", "fp8")
VENDORS = ("nvidia", "amd")


class CatalogueError(ValueError):
    """A row of the catalogue cannot be used; the text names it and the field."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuModel:
    """One GPU, as a device plugin counts them.

    Attributes:
        products: what a vendor's product label may be.
        device_ids: PCI device ids that no other GPU has.
        memory_bytes: bytes.
        memory_bandwidth: peak, bytes/s; None: not known, as below.
        flops: precision -> peak operations/s without sparsity; what is not known is left out.
        link_bandwidth: NVLink or Infinity Fabric, all links and both directions, bytes/s.
        source: the vendor's document.
    """

    name: str
    vendor: str
    products: tuple[str, ...]
    device_ids: tuple[str, ...]
    memory_bytes: float
    memory_bandwidth: float | None
    flops: Mapping[str, float]
    link_bandwidth: float | None
    source: str
    year: int


@functools.cache
def built_in_gpus() -> tuple[GpuModel, ...]:
    """Every GPU of the catalogue, in its order."""
    file = resources.files("ballast_policies.gpus") / "data" / "gpus.toml"
    return parse_gpus(file.read_text(encoding="utf-8"))


def gpu_named(text: str, gpus: Iterable[GpuModel] | None = None) -> GpuModel | None:
    """The GPU with this catalogue name or product label, whatever its case; None: not in the catalogue.

    Spaces, as in the names that drivers report, stand for the dashes or underscores of labels. A name without
    the memory, as ``v100``, is several GPUs' and none's.
    """
    wanted = _plain(text)
    for gpu in built_in_gpus() if gpus is None else gpus:
        if wanted in (_plain(name) for name in (gpu.name, *gpu.products)):
            return gpu
    return None


def gpus_containing(text: str) -> tuple[GpuModel, ...]:
    """The GPUs that parts of a name, as ``v100``, ``H100 80GB`` or ``mi300``, may mean, in their order."""
    beginnings = [part for part in _plain(text).split("-") if part]

    def may_be(name: str) -> bool:
        parts = _plain(name).split("-")
        return all(any(part.startswith(beginning) for part in parts) for beginning in beginnings)

    return tuple(gpu for gpu in built_in_gpus() if beginnings and any(map(may_be, (gpu.name, *gpu.products))))


def speed_scales(names: Sequence[str], precision: str = "fp16") -> dict[str, float]:
    """Name -> how fast GPUs of it train, in no unit: the root of their peak operations x bytes a second.

    Layers take turns at either limit, so the geometric mean of the two compares GPUs better than one alone
    (by ``python -m ballast_lab.unseen``). A name that several GPUs have is the geometric mean of theirs.

    Args:
        names: as :func:`gpu_named` or :func:`gpus_containing` takes them.
        precision: of the operations; fp32 where one of the names has no GPU that states it.

    Returns:
        Without names that the catalogue does not know.
    """
    known = {name: _with_bandwidth(name) for name in names}
    stated = [any(precision in gpu.flops for gpu in gpus) for gpus in known.values() if gpus]
    used = precision if all(stated) else "fp32"
    found = {}
    for name, gpus in known.items():
        scales = [gpu.flops[used] * (gpu.memory_bandwidth or 0.0) for gpu in gpus if used in gpu.flops]
        if scales:
            found[name] = math.exp(sum(0.5 * math.log(scale) for scale in scales) / len(scales))
    return found


def _with_bandwidth(name: str) -> list[GpuModel]:
    exact = gpu_named(name)
    meant = gpus_containing(name) if exact is None else (exact,)
    return [gpu for gpu in meant if gpu.memory_bandwidth]


def parse_gpus(text: str) -> tuple[GpuModel, ...]:
    """The rows of a TOML file as ``data/gpus.toml``.

    Raises:
        CatalogueError: it is no TOML, a field is missing, unknown or impossible, or two rows share a name.
    """
    try:
        rows = tomllib.loads(text).get("gpu")
    except tomllib.TOMLDecodeError as error:
        raise CatalogueError(f"the catalogue of GPUs is not TOML: {error}") from error
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise CatalogueError("the catalogue of GPUs has no rows. To fix: one [[gpu]] for each GPU")
    gpus = tuple(_gpu(dict(row)) for row in rows)
    names: dict[str, str] = {}
    for gpu in gpus:
        ids = (f"device id {each}" for each in gpu.device_ids)
        for name in {*map(_plain, (gpu.name, *gpu.products)), *ids}:
            if name in names:
                raise CatalogueError(f"{gpu.name}: {name!r} is {names[name]}'s too. To fix: give it once")
            names[name] = gpu.name
    return gpus


def _plain(name: str) -> str:
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


def _gpu(row: dict[str, Any]) -> GpuModel:
    where = str(row.get("name"))
    flops = row.pop("tflops", {})
    if not isinstance(flops, dict) or not set(flops) <= set(PRECISIONS):
        raise CatalogueError(
            f"{where}: tflops is {flops!r}. To fix: a number for any of {', '.join(PRECISIONS)}"
        )
    memory = _scaled(row.pop("memory_gb", None), 1e9, f"{where}: memory_gb")
    bandwidth, links = row.pop("memory_gb_per_second", None), row.pop("link_gb_per_second", None)
    year = row.pop("year", None)
    texts = {field: row.pop(field, None) for field in ("name", "vendor", "source")}
    lists = {field: row.pop(field, []) for field in ("products", "device_ids")}
    if row:
        raise CatalogueError(f"{where}: unknown fields {sorted(row)}")
    if not all(isinstance(text, str) and text for text in texts.values()) or texts["vendor"] not in VENDORS:
        raise CatalogueError(f"{where}: name, source and vendor ({' or '.join(VENDORS)}) are required")
    if not all(isinstance(each, list) and all(isinstance(v, str) for v in each) for each in lists.values()):
        raise CatalogueError(f"{where}: products and device_ids are lists of text")
    if not isinstance(year, int) or isinstance(year, bool):
        raise CatalogueError(f"{where}: year is {year!r}, not the year of the source")
    return GpuModel(
        **texts,
        products=tuple(lists["products"]),
        device_ids=tuple(lists["device_ids"]),
        memory_bytes=memory,
        memory_bandwidth=None
        if bandwidth is None
        else _scaled(bandwidth, 1e9, f"{where}: memory_gb_per_second"),
        flops=MappingProxyType(
            {key: _scaled(flops[key], 1e12, f"{where}: {key}") for key in PRECISIONS if key in flops}
        ),
        link_bandwidth=None if links is None else _scaled(links, 1e9, f"{where}: link_gb_per_second"),
        year=year,
    )


def _scaled(value: Any, unit: float, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise CatalogueError(f"{where} is {value!r}, not a number above 0")
    return value * unit


NVIDIA_PRODUCT = "nvidia.com/gpu.product"
"""Label of NVIDIA's GPU feature discovery; a MIG slice or a shared GPU has a suffix, and is none of ours."""

AMD_PREFIXES = ("amd.com/gpu.", "beta.amd.com/gpu.")
AMD_PARTITION = "amd.com/compute-memory-partition"
"""Label of AMD's node labeller: e.g. ``spx_nps1``, a whole GPU; ``cpx_nps4`` is divided into several."""


def gpu_of_node(labels: Mapping[str, str]) -> GpuModel | None:
    """The GPU of a node.

    AMD's labeller has written both ``amd.com/gpu.product-name: VALUE`` and, a count of each,
    ``beta.amd.com/gpu.product-name.VALUE: "8"``; the device id is looked at where no product is known.

    Returns:
        None where the node has no such label, its GPU is not in the catalogue, it has several kinds, or its
        GPUs are divided: a part has neither the memory nor the speed of the whole.
    """
    kinds = _amd(labels)
    if NVIDIA_PRODUCT in labels:
        nvidia = (gpu for gpu in built_in_gpus() if gpu.vendor == "nvidia")
        kinds.append(gpu_named(labels[NVIDIA_PRODUCT], nvidia))
    return kinds[0] if len({kind.name if kind else "" for kind in kinds}) == 1 else None


def _amd(labels: Mapping[str, str]) -> list[GpuModel | None]:
    if not labels.get(AMD_PARTITION, "spx").lower().startswith("spx"):
        return [None]
    amd = [gpu for gpu in built_in_gpus() if gpu.vendor == "amd"]
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
