"""Memory of GPUs: what each pool has, and which jobs fit there at which size."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ballast_policies.gpus.catalogue import gpu_named
from ballast_policies.gpus.labels import AMD_PARTITION, AMD_PREFIXES, NVIDIA_PRODUCT, gpu_of_node
from ballast_policies.planning.memory.need import MemoryNeed

from ballast_operator.api.base import memory_bytes
from ballast_operator.api.node_pool import NodePool
from ballast_operator.views.nodes import NodeView
from ballast_operator.views.spec import JobSpec

GPU_LABELS = (NVIDIA_PRODUCT, AMD_PARTITION, *AMD_PREFIXES)
"""How keys of labels begin that tell a node's GPU."""


def pool_memory(pool: NodePool, nodes: Sequence[NodeView]) -> float | None:
    """Bytes of each of the pool's GPUs; None: not known.

    As stated; else by the catalogue: the least of its nodes' GPUs, or that of its selector's labels, or the
    one that its GPU type names.
    """
    if pool.memory_per_gpu is not None:
        return memory_bytes(pool.memory_per_gpu)
    alike = {
        tuple(sorted(pair for pair in node.labels.items() if pair[0].startswith(GPU_LABELS)))
        for node in nodes
    }
    labels = [dict(pairs) for pairs in alike] or [pool.node_selector]
    found = [gpu.memory_bytes for gpu in map(gpu_of_node, labels) if gpu is not None]
    if found:
        return min(found)
    named = gpu_named(pool.gpu_type)
    return named.memory_bytes if named is not None else None


def pools_apart(pools: Sequence[NodePool], memory: Mapping[str, float]) -> Mapping[str, str]:
    """Pool -> mark, of pools whose GPU type has pools with another memory."""
    by_type: dict[str, set[float | None]] = {}
    for pool in pools:
        by_type.setdefault(pool.gpu_type, set()).add(memory.get(pool.name))
    return {pool.name: f"memory {memory.get(pool.name)}" for pool in pools if len(by_type[pool.gpu_type]) > 1}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GangMemory:
    """Which pools have GPUs with enough memory for a job.

    Attributes:
        need: as measured; None: nothing was.
        pools: pool -> bytes of each of its GPUs, where that is known.
    """

    spec: JobSpec
    need: MemoryNeed | None
    pools: Mapping[str, float]

    def fits(self, pool: str, gpus: int) -> bool:
        """Whether a gang of ``gpus`` fits the GPUs of the pool; where something is not known, it does."""
        has = self.pools.get(pool)
        if has is None:
            return True
        if self.spec.memory_per_gpu is not None:
            return self.spec.memory_per_gpu <= has
        return self.need is None or self.need.fits(self.spec.positions(gpus), has)

    @property
    def limits(self) -> bool:
        """Whether memory may keep the job from a pool at all."""
        return bool(self.pools) and (self.spec.memory_per_gpu is not None or self.need is not None)

    def too_small(self, pools: Iterable[str], gpus: int) -> frozenset[str]:
        """Those of the pools that a gang of ``gpus`` does not fit."""
        return frozenset(pool for pool in pools if not self.fits(pool, gpus)) if self.limits else frozenset()

    def shortfall(self, gpus: int, allowed: Sequence[str], wide: Sequence[str]) -> str:
        """What a gang of ``gpus`` needs, and what the ``allowed`` pools have; ``wide`` ones have the GPUs."""
        known = {pool: self.pools[pool] for pool in allowed if pool in self.pools}
        largest = max(known.values())
        if self.spec.memory_per_gpu is not None:
            needs = f"memoryPerGpu asks for {gigabytes(self.spec.memory_per_gpu)}"
            fix = "lower memoryPerGpu"
        else:
            assert self.need is not None
            layer, size = self.need.layers.largest
            if size > largest:
                needs = f"layer {layer} needs {gigabytes(size)}"
                fix = "make microbatches or layers smaller"
            else:
                known = {pool: self.pools[pool] for pool in wide}
                largest, least = max(known.values()), self.need.least(self.spec.positions(gpus))
                needs = f"on {gpus} GPUs its layers take at least {gigabytes(least)} of the fullest one"
                fix = "raise pipeline.maxStages, make microbatches smaller"
        have = ", ".join(f"{pool} {gigabytes(has)}" for pool, has in sorted(known.items()))
        return (
            f"{needs}, the largest GPU has {gigabytes(largest)} (its pools: {have}). "
            f"To fix: {fix}, or add a pool of larger GPUs"
        )

    def left_out(self, pools: Iterable[str], gpus: int) -> str:
        """Which of the pools a gang of ``gpus`` is not offered, as text; empty: it fits all."""
        small = sorted(self.too_small(pools, gpus))
        if not small:
            return ""
        least = self.spec.memory_per_gpu
        if least is None:
            assert self.need is not None
            least = self.need.least(self.spec.positions(gpus))
        have = ", ".join(f"{pool} (has {gigabytes(self.pools[pool])})" for pool in small)
        return f"on {gpus} GPUs it needs {gigabytes(least)} of each: not offered {have}"


def gigabytes(count: float) -> str:
    """Bytes as people read them: 16 GB."""
    return f"{count / 1e9:.3g} GB" if count >= 1e9 else f"{count / 1e6:.3g} MB"
