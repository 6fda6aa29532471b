"""Migration inside a tensor group: others compute a late rank's units, and nothing is lost."""

import pytest
import torch
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.slicing import Slicing
from ballast_trainer.models.gpt import Block
from ballast_trainer.tensor_parallel.layers import split_layer
from ballast_trainer.tensor_parallel.migration import handed_over, numbers_per_unit
from ballast_trainer.tensor_parallel.parallel_pair import pairs
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import first_daily
from tests.trainer.tensor_parallel.ranks import on_ranks, step_of_a_block, train_step, whole_block

CASES = {
    2: [0.0, 0.6],
    3: [0.5, 0.0, 0.0],
    4: [0.0, 0.7, 0.0, 0.4],
}


@pytest.mark.processes
@pytest.mark.parametrize(
    "kind",
    first_daily(
        [
            0.2,
            "qwen3",
            "gpt2",
            "bitnet",
            "longcat_flash",
            0.0,
            "deepseek_v2",
            "gpt_neox",
            "phi",
            "gemma2",
            "phi3",
            "olmo3",
        ],
        5,
    ),
)
@pytest.mark.parametrize("size", first_daily(CASES, 1))
def test_migrated_columns_give_the_whole_blocks_outputs_and_gradients(size, kind):
    """Outputs and all gradients equal the whole block's to 1e-6 of their largest, for 2, 3 and 4 ranks.

    Of our block with a dropout, and of layers of transformers: gates, grouped queries, norms of heads,
    transposed weights, norms of all features, latent queries and keys.
    """
    block, values = whole_block(kind)
    outputs, inputs = train_step(block, values)
    for found in on_ranks(step_of_a_block, size, CASES[size], kind):
        assert difference(found["outputs"], outputs) < 1e-6
        assert difference(found["inputs"], inputs) < 1e-6
        for name, parameter in block.named_parameters():
            assert difference(found["gradients"][name], parameter.grad) < 1e-6, name


def difference(found, expected):
    return float((found - expected).abs().max() / expected.abs().max())


@pytest.mark.processes
def test_migration_one_broadcast_more_a_step_for_each_late_rank():
    """All-reduces are as many as without migration, and helpers compute exactly what is handed over."""
    plain = on_ranks(step_of_a_block, 3, [0.0, 0.0, 0.0], 0.0)
    moved = on_ranks(step_of_a_block, 3, [0.0, 0.5, 0.0], 0.0)
    assert plain[0]["calls"] == {"all_reduce": 2 * 2 * 2}, "2 pairs x 2 microbatches x (forward, backward)"
    for rank in range(3):
        assert moved[rank]["calls"] == {**plain[rank]["calls"], "broadcast": 1}
    for pair in range(2):
        assert moved[1]["handed_over"][pair] > 0
        assert sum(found["helped"][pair] for found in moved) == moved[1]["handed_over"][pair]
    assert plain[0]["handed_over"] == [0, 0]


@pytest.mark.processes
@pytest.mark.parametrize("kind", ["deepseek_v2", 0.0])
def test_gradients_of_units_that_were_handed_over_return_once_a_step(kind):
    """Also where latent queries and keys are two inputs of a pair."""
    plain = on_ranks(step_of_a_block, 2, [0.0, 0.0], kind)[1]
    moved = on_ranks(step_of_a_block, 2, [0.0, 0.6], kind)[1]
    pairs_ = zip(moved["handed_over"], moved["numbers_per_unit"], strict=True)
    assert moved["reduced"] - plain["reduced"] == 4 * sum(count * numbers for count, numbers in pairs_) > 0


@given(st.floats(0, 0.95), st.sampled_from([2, 4]))
def test_a_layer_hands_over_the_work_asked_for(fraction, size):
    """Heads are coarse; with the MLP's units the layer's weights come within one unit of what was asked."""
    block = split_layer(Block(32, 8, 0.0), Axis(ranks=tuple(range(size))))
    found = pairs([block])
    counts = handed_over(found, fraction)
    total = sum(numbers_per_unit(pair) * pair.units for pair in found)
    moved = sum(numbers_per_unit(pair) * count for pair, count in zip(found, counts, strict=True))
    assert all(0 <= count < pair.units for count, pair in zip(counts, found, strict=True))
    mlp = found[1]
    if counts[1] < mlp.units - 1:
        assert abs(moved - fraction * total) <= numbers_per_unit(mlp) * 0.51


@given(st.integers(1, 4), st.sampled_from([1, 3]), st.integers(0, 1), st.integers(1, 3))
def test_parts_make_the_whole(size, blocks, dim, width):
    """Cutting a tensor over any number of ranks and putting it together again gives the same tensor."""
    shape = [5, 5]
    shape[dim] = size * blocks * width
    whole = torch.arange(25 * size * blocks * width, dtype=torch.float32)[: shape[0] * shape[1]].view(shape)
    unequal = (size * width,) * (blocks - 2) + (size * width * min(blocks, 2),)
    for ways in (blocks, unequal):
        slicing = Slicing(dim=dim, blocks=ways)
        parts = [slicing.part(whole, index, size) for index in range(size)]
        assert torch.equal(slicing.whole(parts), whole)
