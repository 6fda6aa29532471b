"""Layers cut over groups of any size compute what the whole one does; all ranks are in one process."""

import copy

import pytest
import torch
import torch.distributed as dist
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.models.gpt import Block
from ballast_trainer.tensor_parallel.layers import split_layer
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.func import functional_call
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.trainer.models import families

DIM, HEADS = 32, 16


@pytest.fixture
def group(request):
    """A process group of so many ranks, of which this process is the first."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=request.param)
    yield request.param
    dist.destroy_process_group()


def own_block():
    return Block(DIM, HEADS, 0.0)


def llama_block():
    """As the family's own plan cuts it, with fewer heads of keys than of queries."""
    pytest.importorskip("transformers")
    from ballast_trainer.models.hugging_face import from_config

    sizes = {"num_attention_heads": HEADS, "num_key_value_heads": 8, "head_dim": 4}
    return from_config(**families.arguments("llama") | sizes).build_layer(1)


def cut(layer, ranks):
    """The layer as each rank has it."""
    return [
        split_layer(copy.deepcopy(layer), Axis(ranks=tuple(range(ranks)), index=rank))
        for rank in range(ranks)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("group", [2, 8], indirect=True)
@pytest.mark.parametrize("make", [own_block, llama_block])
def test_outputs_and_gradients_are_those_of_the_whole_layer(group, make):
    """Of the input on every rank, and of each rank's part of the weights."""
    torch.manual_seed(0)
    whole = make().double().train()
    inputs = torch.randn(3, 7, DIM, dtype=torch.float64, requires_grad=True)
    output = whole(inputs)
    towards = torch.randn_like(output)
    output.backward(towards)
    of_gradients = copy.deepcopy(whole)
    with torch.no_grad():
        for parameter, learnt in zip(of_gradients.parameters(), whole.parameters(), strict=True):
            parameter.copy_(learnt.grad)
    parts, expected = (
        [dict(part.named_parameters()) for part in cut(layer, group)] for layer in (whole, of_gradients)
    )
    given = inputs.detach()
    with LocalTensorMode(group):
        weights = {
            name: LocalTensor({rank: part[name].detach() for rank, part in enumerate(parts)}).requires_grad_()
            for name in parts[0]
        }
        spread = LocalTensor({rank: given.clone() for rank in range(group)}).requires_grad_()
        found = functional_call(cut(whole, group)[0], weights, (spread,))
        found.backward(LocalTensor({rank: towards.clone() for rank in range(group)}))
        gradients = {name: weight.grad for name, weight in weights.items()}
    for rank in range(group):
        torch.testing.assert_close(found._local_tensors[rank].detach(), output.detach())
        torch.testing.assert_close(spread.grad._local_tensors[rank], inputs.grad)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient._local_tensors[rank], expected[rank][name].detach())
    smaller = [
        name for name, weight in parts[0].items() if weight.numel() == weights_of(whole, name) // group
    ]
    assert len(smaller) >= 4


def weights_of(layer, name):
    return layer.get_parameter(name).numel()
