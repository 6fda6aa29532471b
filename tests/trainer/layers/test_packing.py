"""Messages of a move: exact, and small where tensors are mostly zero."""

import hypothesis
import pytest
import torch
from ballast_trainer.layers.packing import as_bytes, pack, unpack
from hypothesis import strategies

SHAPES = strategies.lists(strategies.integers(0, 5), max_size=3).map(tuple)
DTYPES = strategies.sampled_from(
    [
        *(torch.float32, torch.float64, torch.bfloat16, torch.float8_e4m3fn, torch.complex64),
        *(torch.int64, torch.int16, torch.bool, torch.uint8),
    ]
)


@hypothesis.given(
    strategies.dictionaries(
        strategies.text(min_size=1, max_size=5),
        strategies.tuples(SHAPES, DTYPES, strategies.floats(0, 1)),
        max_size=4,
    ),
    strategies.integers(0, 2**31),
)
def test_what_is_packed_is_unpacked_bit_for_bit(shapes, seed):
    """Any names, shapes, types and densities."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for name, (shape, dtype, density) in shapes.items():
        values = (torch.randn(shape, generator=generator) * 100).clamp(-448, 448)
        tensors[name] = torch.where(torch.rand(shape, generator=generator) < density, values, 0.0).to(dtype)
    unpacked = unpack(pack(tensors))
    assert list(unpacked) == list(tensors)
    for name, tensor in tensors.items():
        assert unpacked[name].dtype == tensor.dtype
        assert torch.equal(as_bytes(unpacked[name]), as_bytes(tensor))


def test_negative_zero_and_not_a_number_survive():
    """The bits are kept, not only the values."""
    special = torch.tensor([0.0, -0.0, float("nan"), float("inf"), 0.0, 0.0, 0.0, 0.0])
    unpacked = unpack(pack({"x": special}))["x"]
    assert torch.equal(unpacked.view(torch.int32), special.view(torch.int32))


def test_zeros_are_not_sent():
    """A tensor of 5 % takes a bit per element and the values that are left."""
    tensor = torch.zeros(64_000)
    tensor[::20] = 1.5
    assert pack({"x": tensor}).numel() < 0.25 * tensor.nbytes


def test_a_message_cut_short_is_refused():
    """A failed move must not load half a layer."""
    message = pack({"x": torch.randn(100)})
    with pytest.raises(ValueError, match="the message ends"):
        unpack(message[:-4])
