"""Lossless packing of a layer's tensors into one message, without zeros where most are zero.

Layout: length of the description (8 bytes), description (JSON rows of name, type, shape, kept
count), then the bytes of each tensor, each part padded so that the next can be read in place.  A
tensor of which fewer than :data:`SPARSE_BELOW` elements differ from zero goes as a bit per element
and the values that differ: a pruned layer moves at the cost of its remaining values.  Tensors whose
bytes travel in another message are described alone.
"""

import json
import math
from collections.abc import Collection, Iterable, Mapping

import torch

SPARSE_BELOW = 0.75
"""Density below which a bit per element costs less than the zeros do."""


_ELSEWHERE = -1
"""Kept count of a tensor whose bytes travel in another message."""

_ALIGNED = 16
"""Bytes to which each part of a message is padded: the largest element."""


def pack(
    tensors: Mapping[str, torch.Tensor],
    elsewhere: Collection[str] = (),
    *,
    device: torch.device | str = "cpu",
) -> torch.Tensor:
    """The tensors as a uint8 vector on ``device``; of those named in ``elsewhere`` the description alone."""
    rows: list[tuple[str, str, list[int], int | None]] = []
    parts: list[torch.Tensor] = []
    flats = {
        name: value.detach().to(device).resolve_conj().contiguous().reshape(-1)
        for name, value in tensors.items()
        if name not in elsewhere
    }
    counts = _counts_to_send(flats)
    for name, value in tensors.items():
        kept: int | None = _ELSEWHERE
        if name in flats:
            flat, kept = flats[name], counts.get(name)
            if flat.dtype == torch.bool:
                flat = _bits(flat)
            elif kept is not None:
                filled = flat.ne(0)
                parts.append(_bits(filled))
                flat = flat[filled]
            if flat.numel():
                parts.append(flat.view(torch.uint8))
        rows.append((name, str(value.dtype).removeprefix("torch."), list(value.shape), kept))
    header = json.dumps(rows).encode()
    length = torch.tensor([len(header)], dtype=torch.int64).view(torch.uint8)
    described = torch.cat([length, torch.frombuffer(bytearray(header), dtype=torch.uint8)])
    return torch.cat(_padded([described.to(device), *parts]))


def _counts_to_send(flats: Mapping[str, torch.Tensor]) -> dict[str, int]:
    """Number of elements that differ from zero, of tensors whose zeros cost more than a bit per element."""
    # Of elements of a byte the bits would save little, and not all types of them can be counted.
    counted = {name: flat for name, flat in flats.items() if flat.itemsize > 1 and flat.numel()}
    if not counted:
        return {}
    # Looked at together: on a GPU each look waits for all of its work.
    filled = torch.stack([torch.count_nonzero(flat) for flat in counted.values()]).tolist()
    sparse = {
        name: count
        for (name, flat), count in zip(counted.items(), filled, strict=True)
        if count < SPARSE_BELOW * flat.numel()
    }
    return {name: count for name, count in sparse.items() if not _has_negative_zero(flats[name])}


def unpack(data: torch.Tensor) -> dict[str, torch.Tensor]:
    """The tensors of a message, on its device, most as views; on ``meta`` those that it only describes.

    Raises:
        ValueError: the bytes are not a message of :func:`pack`.
    """
    length = int(data[:8].cpu().clone().view(torch.int64))
    if not 0 <= length <= data.numel() - 8:
        raise ValueError(f"a message of {data.numel()} bytes cannot have a description of {length}")
    rows = json.loads(data[8 : 8 + length].cpu().numpy().tobytes())
    offset = 8 + length + -(8 + length) % _ALIGNED
    tensors = {}

    def take(size: int) -> torch.Tensor:
        nonlocal offset
        part = data[offset : offset + size]
        offset += size + -size % _ALIGNED
        if offset > data.numel():
            raise ValueError(f"the message ends at byte {data.numel()}, expected {offset} or more")
        return part

    for name, dtype_name, shape, kept in rows:
        dtype, count = getattr(torch, dtype_name), math.prod(shape)
        if kept == _ELSEWHERE:
            tensors[name] = torch.empty(shape, dtype=dtype, device="meta")
            continue
        if dtype == torch.bool:
            flat = _from_bits(take(-(-count // 8)), count)
        elif kept is None:
            flat = take(count * dtype.itemsize).view(dtype)
        else:
            filled = _from_bits(take(-(-count // 8)), count)
            flat = torch.zeros(count, dtype=dtype, device=data.device)
            flat[filled] = take(kept * dtype.itemsize).view(dtype)
        tensors[name] = flat.reshape(shape)
    return tensors


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes as a uint8 vector without a description, in its memory where that is contiguous."""
    return tensor.detach().resolve_conj().contiguous().reshape(-1).view(torch.uint8)


def _padded(parts: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The parts of a message, with zeros between them."""
    found = []
    for part in parts:
        found.append(part)
        if len(part) % _ALIGNED:
            found.append(part.new_zeros(-len(part) % _ALIGNED))
    return found


def _bits(flat: torch.Tensor) -> torch.Tensor:
    """Eight elements a byte, the first in its highest bit."""
    padded = torch.nn.functional.pad(flat.to(torch.uint8), (0, -len(flat) % 8))
    return (padded.view(-1, 8) << _places(flat.device)).sum(1, dtype=torch.uint8)


def _from_bits(packed: torch.Tensor, count: int) -> torch.Tensor:
    return (packed[:, None] >> _places(packed.device) & 1).view(-1)[:count].to(torch.bool)


def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(7, -1, -1, dtype=torch.uint8, device=device)


def _has_negative_zero(flat: torch.Tensor) -> bool:
    parts = torch.view_as_real(flat) if flat.is_complex() else flat
    return parts.is_floating_point() and bool((parts.eq(0) & parts.signbit()).any())
