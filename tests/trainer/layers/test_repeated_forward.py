"""Layers that keep their input alone, and repeat their forward once for a microbatch's backward."""

import gc
import weakref

import pytest
import torch
from ballast_trainer.layers.layer_stack import forward_to_repeat
from ballast_trainer.pipeline.executor.split_backward import SplitBackward
from torch import nn
from torch.nn import functional


class Counted(nn.Module):
    """Two matrix products with a softmax, which keeps its own output; counts its forwards."""

    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)
        self.runs = 0
        self.mixed = lambda: None

    def forward(self, value):
        self.runs += 1
        mixed = self.first(value).softmax(-1)
        self.mixed = weakref.ref(mixed)
        return self.second(mixed)


def gradients(layer, value, *, halves, repeats=True):
    """Of the input and of all weights."""
    value = value.clone().requires_grad_()
    layer.zero_grad()
    result = forward_to_repeat(layer, layer, value) if repeats else layer(value)
    loss = result.square().sum()
    if halves:
        split = SplitBackward([loss], [value], layer.parameters())
        split.for_input([None])
        split.for_weights()
    else:
        loss.backward()
    return [value.grad, *(parameter.grad.clone() for parameter in layer.parameters())]


@torch.jit.script
def softmax(value: torch.Tensor) -> torch.Tensor:
    """In TorchScript, which has errors of its own for those that pass through it."""
    return value.sin().softmax(-1)


class Scripted(Counted):
    """Ends in what is scripted."""

    def forward(self, value):
        return softmax(super().forward(value))


class Drawing(Counted):
    """Ends in what keeps its random numbers before it has drawn them."""

    def forward(self, value):
        value = super().forward(value)
        torch.manual_seed(0)
        return functional.rrelu(value, training=True)


@pytest.mark.parametrize(
    ("kind", "halves"), [(Counted, False), (Counted, True), (Scripted, False), (Drawing, False)]
)
def test_gradients_are_those_without_a_repeat_and_the_forward_is_repeated_once(kind, halves):
    """Also where the backward is in two halves, with several groups of weights in the second."""
    torch.manual_seed(0)
    layer, value = kind(), torch.randn(4, 8)
    plain = gradients(layer, value, halves=halves, repeats=False)
    layer.runs = 0
    again = gradients(layer, value, halves=halves)
    assert layer.runs == 2
    for one, other in zip(plain, again, strict=True):
        assert torch.equal(one, other)


@pytest.mark.slow
def test_nothing_that_was_repeated_outlives_the_backward():
    """No cycle keeps it until the garbage collector runs."""
    layer, value = Counted(), torch.randn(4, 8)
    gc.collect()
    gc.disable()
    try:
        gradients(layer, value, halves=False)
        assert layer.mixed() is None
    finally:
        gc.enable()


def test_the_forward_keeps_its_input_alone():
    """What it has computed is gone before the backward."""
    layer = Counted()
    result = forward_to_repeat(layer, layer, torch.randn(4, 8, requires_grad=True))
    assert result.requires_grad
    assert layer.mixed() is None


def test_a_layer_that_changes_its_input_in_place_is_refused():
    """What it would start from is gone; the message says what to do."""

    def doubled(value):
        return (value.mul_(2)) ** 2

    result = forward_to_repeat(doubled, doubled, torch.ones(3, requires_grad=True) * 1)
    with pytest.raises(RuntimeError, match=r"in place.*recompute: false"):
        result.sum().backward()


@pytest.mark.parametrize("other", [lambda value: value + 1, lambda value: value.repeat(2).exp().sin()])
def test_a_forward_that_is_another_when_it_is_repeated_is_refused(other):
    """It keeps fewer tensors, or larger ones."""
    result = forward_to_repeat(lambda value: value.exp().sin(), other, torch.ones(3, requires_grad=True))
    with pytest.raises(RuntimeError, match="not the same when it is repeated"):
        result.sum().backward()
