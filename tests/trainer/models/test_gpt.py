"""How the built-in GPT begins."""

import pytest
import torch
from ballast_trainer.models.gpt import build_gpt


def built(index, **args):
    """A layer of a GPT of six, from one state of the random numbers."""
    torch.manual_seed(3)
    return build_gpt(layers=6, dim=16, heads=2, context=8, **args).build_layer(index)


@pytest.mark.parametrize("index", [1, 4])
def test_weights_of_deep_blocks_begin_smaller(index):
    """The linear maps of the l-th block by the square root of l; biases and norms as without it."""
    plain, scaled = built(index), built(index, depth_scaled=True)
    torch.testing.assert_close(scaled.mlp.up.weight * index**0.5, plain.mlp.up.weight)
    torch.testing.assert_close(scaled.attention.qkv.weight * index**0.5, plain.attention.qkv.weight)
    torch.testing.assert_close(scaled.mlp.up.bias, plain.mlp.up.bias)
    torch.testing.assert_close(scaled.mlp_norm.weight, plain.mlp_norm.weight)


def test_the_tokens_vectors_begin_as_wide_as_asked():
    """Positions keep their own."""
    plain, wide = built(0), built(0, embedding_std=1.0)
    torch.testing.assert_close(wide.token.weight * 0.02, plain.token.weight)
    torch.testing.assert_close(wide.position.weight, plain.position.weight)
