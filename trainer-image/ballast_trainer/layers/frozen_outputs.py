"""Outputs of frozen layers, kept by sample: a sample that comes again passes them without being computed.

PipeTransformer (He et al., 2021) and Egeria (Wang et al., 2023) keep the activations of their frozen prefix.
A sample is known by the bytes of its input, so that what is kept is right whatever the order of the data.  A
rank keeps the outputs of the last frozen layer that it holds; messages between stages stay as they are.
"""

import contextlib
import hashlib
import logging
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

import torch

from ballast_trainer.trees import Tree, chunks, tensors_of

logger = logging.getLogger(__name__)

_ROUNDING = {torch.float32: 1e-5, torch.float64: 1e-10}
"""Difference over the largest that a sample's outputs may have if it is computed with others or alone."""
_ROUNDING_BELOW = 5e-2
"""The same where layers compute in 16 bits."""


class Compute(Protocol):
    """Frozen layers of a stack."""

    def __call__(self, rows: Tree, first: int, *, redraw: bool = False) -> Tree:
        """The output of the last one, given the inputs of layer ``first``; ``redraw``: by other seeds."""


class FrozenOutputs:
    """Outputs that this rank has kept, in a limit of bytes; ``refusals``: why not, by last frozen layer."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit = limit_bytes
        self._kept: dict[bytes, tuple[int, torch.Tensor]] = {}
        self._bytes = 0
        self._microbatches: tuple[Tree, ...] = ()
        self._names: dict[int, list[bytes]] = {}
        self._shown: set[tuple[int, int]] = set()
        self.refusals: dict[int, str] = {}

    @contextlib.contextmanager
    def during(self, inputs: Tree, microbatches: int) -> Iterator[None]:
        """A step of training runs with these inputs, of the host; outside of it nothing is kept."""
        self._microbatches = chunks(inputs, microbatches)
        self._names.clear()
        try:
            yield
        finally:
            self._microbatches = ()

    @property
    def runs(self) -> bool:
        """True if a step of training runs."""
        return bool(self._microbatches)

    def keep_only(self, layers: Collection[int]) -> None:
        """Drop what layers other than these have put out: they have thawed, or left this rank."""
        self._kept = {name: kept for name, kept in self._kept.items() if kept[0] in layers}
        self._bytes = sum(kept.nbytes for _, kept in self._kept.values())
        self._shown.clear()
        self.refusals.clear()

    def samples(self) -> dict[int, int]:
        """Number of samples whose outputs are kept, by layer."""
        return Counter(layer for layer, _ in self._kept.values())

    def output(self, microbatch: int, source: Tree, layers: Sequence[int], compute: Compute) -> Tree:
        """The output of frozen layers, computed for samples of which nothing is kept.

        Args:
            microbatch: of the step that runs.
            source: input of the first of them; kept by sample where it is a tensor.
            layers: the frozen layers, consecutive.
            compute: runs them.
        """
        first, last = layers[0], layers[-1]
        names = self._names_of(microbatch)
        if (first, last) not in self._shown:
            self._shown.add((first, last))
            reason = self._unsuited(source, first, len(names), compute)
            if reason:
                self.refusals[last] = reason
                logger.warning("freezing.cacheBytes: layers %d to %d are computed: %s", first, last, reason)
        if last in self.refusals:
            return compute(source, first)
        starts = [self._start(name, first, last) for name in names]
        rows: list[torch.Tensor] = [source[0]] * len(names)
        for start in sorted(set(starts)):
            places = [place for place, own in enumerate(starts) if own == start]
            if start == first:
                found = source[places] if len(places) < len(names) else source
            else:
                found = torch.stack([self._kept[names[place]][1] for place in places]).to(source.device)
            if start <= last:
                found = compute(found, start)
            for place, row in zip(places, found, strict=True):
                rows[place] = row
                if start <= last:
                    self._keep(names[place], last, row)
        return torch.stack(rows)

    def _names_of(self, microbatch: int) -> list[bytes]:
        if microbatch not in self._names:
            inputs = [one.detach().contiguous() for one in tensors_of(self._microbatches[microbatch])]
            self._names[microbatch] = [
                hashlib.blake2b(
                    b"".join(row.reshape(-1).view(torch.uint8).numpy().tobytes() for row in rows),
                    digest_size=20,
                ).digest()
                for rows in zip(*inputs, strict=True)
            ]
        return self._names[microbatch]

    def _start(self, name: bytes, first: int, last: int) -> int:
        """The layer from which a sample is computed."""
        layer = self._kept[name][0] if name in self._kept else -1
        return layer + 1 if first <= layer <= last else first

    def _keep(self, name: bytes, layer: int, row: torch.Tensor) -> None:
        before = self._kept.pop(name, None)
        if before is not None:
            self._bytes -= before[1].nbytes
        if self._bytes + row.nbytes <= self._limit:
            self._kept[name] = layer, row.detach().to("cpu", copy=True)
            self._bytes += row.nbytes

    def _unsuited(self, source: Tree, first: int, samples: int, compute: Compute) -> str:
        """Reason that the layers' output is no function of the sample alone, by one sample; empty: it is."""
        if not isinstance(source, torch.Tensor):
            return f"their input is a {type(source).__name__}, no single tensor"
        if source.dim() == 0 or len(source) != samples:
            return f"their input has shape {tuple(source.shape)}, and the microbatch {samples} samples"
        together, alone = compute(source, first), compute(source[:1], first, redraw=True)
        if not isinstance(together, torch.Tensor):
            return f"their output is a {type(together).__name__}, no single tensor"
        if together.dim() == 0 or len(together) != samples or alone.shape[1:] != together.shape[1:]:
            return f"their output has shape {tuple(together.shape)}, and the microbatch {samples} samples"
        largest = float(together.abs().max())
        apart = float((together[:1] - alone).abs().max())
        low = torch.is_autocast_enabled(source.device.type)
        rounding = _ROUNDING_BELOW if low else _ROUNDING.get(together.dtype, _ROUNDING_BELOW)
        if not apart <= rounding * max(largest, 1e-30):
            return (
                f"a sample's output differs by {apart:.3g} as it is computed alone and with other random "
                "numbers. To fix: no dropout in layers that freeze, no statistics over the batch"
            )
        return ""
