"""A backward in two halves gives the gradients of a whole one."""

import pytest
import torch
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.pipeline.executor.split_backward import SplitBackward
from torch import nn


def block():
    torch.manual_seed(3)
    return build_gpt(layers=4, dim=16, heads=2, context=8, dropout=0.0).build_layer(1)


class TwoUses(nn.Module):
    """One weight in two places."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.linear = nn.Linear(16, 16)

    def forward(self, value):
        return self.linear(torch.tanh(self.linear(value)))


class Overwriting(torch.autograd.Function):
    """A product whose backward writes into what it is given, as fused kernels do."""

    @staticmethod
    def forward(ctx, value, scale):
        ctx.save_for_backward(value, scale)
        return value * scale

    @staticmethod
    def backward(ctx, flowing):
        value, scale = ctx.saved_tensors
        of_scale = (flowing * value).sum((0, 1))
        return flowing.mul_(scale), of_scale


class Fused(nn.Module):
    """A layer with such a function between two of torch's."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.before, self.after = nn.Linear(16, 16), nn.Linear(16, 16)
        self.scale = nn.Parameter(torch.randn(16))

    def forward(self, value):
        return self.after(torch.tanh(Overwriting.apply(self.before(value), self.scale)))


class Added(nn.Module):
    """Two weights whose gradients are the one that flows in, in the same memory."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.before = nn.Linear(16, 16)
        self.one, self.two = nn.Parameter(torch.randn(2, 8, 16)), nn.Parameter(torch.randn(2, 8, 16))

    def forward(self, value):
        return self.before(value) + self.one + self.two


def compiled():
    module = block()
    module.compile(backend="aot_eager")
    return module


def frozen():
    module = block()
    for parameter in module.attention.parameters():
        parameter.requires_grad_(False)
    return module


def gradients(module, *, wants_input, split, rounds=2):
    """Input gradients and weight gradients after ``rounds`` microbatches, and what came with which half."""
    torch.manual_seed(5)
    inputs, halves = [], []
    for _ in range(rounds):
        source = torch.randn(2, 8, 16).requires_grad_(wants_input)
        result, gradient = module(source), torch.randn(2, 8, 16)
        if split:
            backward = SplitBackward([result], [source], module.parameters())
            before = weights(module)
            backward.for_input([gradient])
            halves.append(weights(module) is not None and same(before, weights(module)))
            backward.for_weights()
        else:
            result.backward(gradient)
        inputs.append(source.grad)
    return inputs, weights(module), halves


def weights(module):
    return [None if p.grad is None else p.grad.clone() for p in module.parameters()]


def same(left, right):
    return all(
        (a is None and b is None) or (a is not None and b is not None and torch.equal(a, b))
        for a, b in zip(left, right, strict=True)
    )


@pytest.mark.parametrize(
    ("make", "wants_input", "splits"),
    [
        (block, True, True),
        (frozen, True, True),
        (block, False, False),
        (TwoUses, True, False),
        (lambda: nn.GRU(16, 16, batch_first=True), True, None),
        (Added, True, True),
        (Fused, True, None),
        pytest.param(compiled, True, False, marks=pytest.mark.slow),
    ],
    ids=[
        "block",
        "partly frozen",
        "no gradient of the input",
        "a weight used twice",
        "recurrent",
        "weights of the state's shape",
        "a function that overwrites",
        "compiled",
    ],
)
def test_two_halves_are_the_whole(make, wants_input, splits):
    """To the last bit but for the order of a sum; weights wait for their half wherever that is possible."""
    torch.manual_seed(3)
    whole, halved = make(), make()
    halved.load_state_dict(whole.state_dict())

    def tensors_only(module):
        inner = module.forward
        module.forward = lambda value: inner(value)[0]
        return module

    if isinstance(whole, nn.GRU):
        whole, halved = tensors_only(whole), tensors_only(halved)
    inputs, wanted, _ = gradients(whole, wants_input=wants_input, split=False)
    split_inputs, got, waited = gradients(halved, wants_input=wants_input, split=True)
    for mine, theirs in zip(split_inputs, inputs, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)
    for mine, theirs in zip(got, wanted, strict=True):
        assert (mine is None) == (theirs is None)
        if theirs is not None:
            torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-5)
    if splits is not None:
        assert waited == [splits] * 2
