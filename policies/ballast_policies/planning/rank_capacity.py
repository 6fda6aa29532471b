"""Speed and memory of each rank, and the bytes that layers take there."""

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from ballast_policies.planning.memory.stage_bytes import ROUNDING, StageBytes
from ballast_policies.planning.partition import Partition, PlanningError

SPEED_TOLERANCE = 0.25
"""Relative difference up to which ranks count as equally fast: what noise makes of a short measurement."""

TakenBytes = Callable[[int | np.ndarray, int | np.ndarray, int | np.ndarray], np.ndarray]
"""(rank, first layer, end layer), which broadcast -> bytes of these layers on it."""


def taken_by_sums(sums: np.ndarray) -> TakenBytes:
    """Bytes as sums over layers; [rank, j]: bytes of the first j layers, shape (p, L + 1)."""
    return lambda rank, first, end: np.asarray(sums[rank, end] - sums[rank, first])


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankCapacity:
    """Speed and memory of p ranks, and what L layers take of the memory.

    Attributes:
        speeds: relative speed of each rank, shape (p,); None: all 1.
        memory: bytes that each rank can hold, shape (p,); None: no limit.
        layer_bytes: bytes of each layer, shape (L,), which also travel with it; None: unknown.
        rank_bytes: bytes that each layer takes at most on each rank, shape (p, L), where they differ, e.g. by
            the microbatches in flight; compared with ``memory`` in place of ``layer_bytes``.
        reserved: bytes that each rank needs at most besides those of its layers, shape (p,); None: none.
        stage_bytes: what the layers of a rank take together, which ``rank_bytes`` and ``reserved`` bound from
            above for searches that add up layers; None: their sum.

    Raises:
        PlanningError: by what reads the memory: it has no bytes, or shapes do not match.
    """

    speeds: Sequence[float] | None = None
    memory: Sequence[int] | None = None
    layer_bytes: Sequence[int] | None = None
    rank_bytes: Sequence[Sequence[float]] | None = None
    reserved: Sequence[float] | None = None
    stage_bytes: StageBytes | None = None

    def speed_array(self, ranks: int) -> np.ndarray:
        """Speed of each of ``ranks`` ranks, shape (p,).

        Raises:
            PlanningError: the speeds are not positive, or not one for each rank.
        """
        speeds = np.ones(ranks) if self.speeds is None else np.asarray(self.speeds, dtype=float)
        if speeds.shape != (ranks,) or (speeds <= 0).any():
            raise PlanningError(f"speeds must be {ranks} positive numbers, got {speeds.tolist()}")
        return speeds

    def memory_array(self, ranks: int) -> np.ndarray:
        """Bytes that each rank can hold, shape (p,); infinite without a limit."""
        return np.full(ranks, np.inf) if self.memory is None else np.asarray(self.memory, dtype=float)

    def memory_for_layers(self, ranks: int) -> np.ndarray:
        """Bytes of each rank for :meth:`cumulative_bytes`, shape (p,): without what is reserved."""
        return self.memory_array(ranks) - (0.0 if self.reserved is None else np.asarray(self.reserved))

    def weights(self, layers: int) -> np.ndarray:
        """Cost of moving each layer, shape (L,): its bytes, or 1 where they are unknown."""
        return np.ones(layers) if self.layer_bytes is None else np.asarray(self.layer_bytes, dtype=float)

    def cumulative_bytes(self, layers: int, ranks: int) -> np.ndarray:
        """[rank, j]: bytes of the first j layers on that rank, shape (p, L + 1); 0 without a limit."""
        sums = np.zeros((ranks, layers + 1))
        if self.memory is None:
            return sums
        held = self.layer_bytes if self.rank_bytes is None else self.rank_bytes
        shape = (layers,) if self.rank_bytes is None else (ranks, layers)
        if held is None or np.shape(held) != shape or len(self.memory) != ranks:
            raise PlanningError(
                f"memory needs bytes for {layers} layers and a limit for each of {ranks} ranks"
            )
        sums[:, 1:] = np.cumsum(np.asarray(held, dtype=float), axis=-1)
        return sums

    def taken(self, layers: int, ranks: int) -> "TakenBytes":
        """Bytes of the ranks' memory that stages take, by formula or as a sum of layers; 0: no limit."""
        if self.memory is not None and self.stage_bytes is not None:
            return self.stage_bytes.taken
        return taken_by_sums(self.cumulative_bytes(layers, ranks))

    def bytes_taken(self, partition: Partition) -> np.ndarray:
        """Bytes that each rank holds under a partition, shape (p,); 0 without a limit."""
        taken, bounds = self.taken(partition.layers, partition.ranks), np.array(partition.bounds)
        return taken(np.arange(partition.ranks), bounds[:-1], bounds[1:])

    def fits(self, partition: Partition) -> bool:
        """True if every rank can hold its layers."""
        limits = self.memory_array(partition.ranks) * ROUNDING
        return bool((self.bytes_taken(partition) <= limits).all())


UNLIMITED = RankCapacity()
"""Ranks of equal speed without a memory limit."""
