"""Bytes of layers at the places of a pipeline, for every number of kept ranks.

What layers take can depend on where they are: the first of four stages holds more microbatches than the last.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

import numpy as np

from ballast_policies.planning.partition import PlanningError


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PlaceBytes:
    """What layers take at n places of a pipeline.

    Attributes:
        rows: bytes of each layer at each place, shape (n, L).
        reserved: bytes needed besides, whichever the layers are, shape (n,).
    """

    rows: Sequence[Sequence[float]]
    reserved: Sequence[float]


class PlaceMemory:
    """Limits of the ranks' memory, and what layers take at each place.

    Args:
        limits: bytes of each rank in force, shape (R,).
        layer_bytes: of each layer, shape (L,), wherever it is.
        bytes_on: for n kept ranks, what layers take on the first to the n-th of them, if not ``layer_bytes``.
    """

    def __init__(
        self,
        limits: Sequence[float],
        layer_bytes: np.ndarray,
        bytes_on: Callable[[int], PlaceBytes] | None = None,
    ) -> None:
        self._limits, self._layer_bytes, self._bytes_on = limits, layer_bytes, bytes_on
        self._sums: dict[int, np.ndarray] = {}
        self._reserved: dict[int, np.ndarray] = {}
        self._flat: dict[int, np.ndarray] = {}

    def sums(self, ranks: int) -> np.ndarray:
        """[place, j]: bytes of the first j layers at each of ``ranks`` places.

        Raises:
            PlanningError: ``bytes_on`` answers with another shape than (ranks, L).
        """
        number = ranks if self._bytes_on is not None else 0
        if number not in self._sums:
            rows = np.broadcast_to(self._layer_bytes, (len(self._limits), len(self._layer_bytes)))
            if self._bytes_on is not None:
                at_places = self._bytes_on(ranks)
                rows = np.asarray(at_places.rows, dtype=float)
                wanted = (ranks, len(self._layer_bytes))
                if rows.shape != wanted:
                    raise PlanningError(f"bytes_on({ranks}) has the shape {rows.shape}: give {wanted}")
                self._reserved[ranks] = np.asarray(at_places.reserved, dtype=float)
            self._sums[number] = np.concatenate([np.zeros((len(rows), 1)), np.cumsum(rows, axis=1)], axis=1)
        return self._sums[number]

    def room(self, rank: int, places: np.ndarray, ranks: int) -> np.ndarray:
        """Bytes that the layers of ``rank`` may take at each place."""
        if self._bytes_on is None:
            return np.full(places.shape, self._limits[rank], dtype=float)
        self.sums(ranks)
        room: np.ndarray = self._limits[rank] - self._reserved[ranks][places]
        return room

    def search(
        self, ranks: int, places: np.ndarray, values: np.ndarray, side: Literal["left", "right"]
    ) -> np.ndarray:
        """``searchsorted`` of each value in the bytes of the first layers at its place."""
        sums = self.sums(ranks)
        if self._bytes_on is None:
            return np.searchsorted(sums[0], values, side=side)
        # One search in all rows: each is shifted above the one before.
        width, shift = sums.shape[1], 2 * float(sums.max()) + 1
        if ranks not in self._flat:
            self._flat[ranks] = (sums + shift * np.arange(len(sums))[:, None]).ravel()
        within = np.clip(values, -1, shift - 1) + shift * places
        return np.asarray(np.searchsorted(self._flat[ranks], within, side=side) - width * places)
