"""Sparse compute gives what the masked dense layer gives, and keeps only what is left."""

import pytest
import torch
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.dynamics.pruning.sparse_linear import SPARSE_FROM, PrunableLinear
from ballast_trainer.layers.layer import Layer
from ballast_trainer.layers.packing import pack
from torch import nn


def masked_pair(sparsity, seed=0):
    """A prunable layer under a random mask, and its dense twin with the same zeros."""
    torch.manual_seed(seed)
    linear = nn.Linear(24, 40)
    twin = nn.Linear(24, 40)
    twin.load_state_dict(linear.state_dict())
    mask = torch.rand(40, 24) >= sparsity
    with torch.no_grad():
        twin.weight.mul_(mask)
    prunable = PrunableLinear(linear)
    prunable.prune(mask)
    return prunable, twin, mask


@pytest.mark.parametrize("sparsity", [0.0, 0.5, 0.9, 0.99])
def test_forward_and_backward_equal_the_masked_dense_layer(sparsity):
    """Outputs, input gradients, bias gradients and the kept weights' gradients to 1e-5."""
    prunable, twin, mask = masked_pair(sparsity)
    assert (prunable.values is not None) == (sparsity > SPARSE_FROM)
    inputs = torch.randn(3, 5, 24)
    results = []
    for layer in (prunable, twin):
        x = inputs.clone().requires_grad_()
        out = layer(x)
        (out * torch.linspace(-1, 1, out.numel()).view_as(out)).sum().backward()
        results.append((out.detach(), x.grad, layer.bias.grad))
    for ours, reference in zip(*results, strict=True):
        torch.testing.assert_close(ours, reference, atol=1e-5, rtol=1e-5)
    gradient = prunable.dense(prunable.learnt.grad) * mask
    torch.testing.assert_close(gradient, twin.weight.grad * mask, atol=1e-5, rtol=1e-5)


def test_a_sparse_layer_keeps_and_moves_only_its_values():
    """Parameters, gradients and optimizer state shrink, and so does the message of a move (P3)."""
    prunable, _, mask = masked_pair(0.95)
    layer = Layer(0, prunable, TrainingConfig())
    prunable(torch.randn(4, 24)).sum().backward()
    layer.optimizer.step()
    kept = int(mask.sum())
    assert prunable.learnt.shape == (kept,)
    state = layer.state()
    assert state["optimizer.values.exp_avg"].shape == (kept,)
    assert "module.weight" not in state
    dense = Layer(0, nn.Linear(24, 40), TrainingConfig())
    dense.module(torch.randn(4, 24)).sum().backward()
    dense.optimizer.step()
    weights_only = {name: value for name, value in state.items() if "bias" not in name}
    dense_only = {name: value for name, value in dense.state().items() if "bias" not in name}
    assert sum(v.nbytes for v in weights_only.values() if v.dtype != torch.bool) < 0.1 * sum(
        v.nbytes for v in dense_only.values()
    )
    assert pack(state).numel() < 0.5 * pack(dense.state()).numel()


def test_a_sparse_layer_is_loaded_into_a_new_dense_one():
    """The receiver of a move rebuilds structure, values and optimizer from the tensors alone."""
    prunable, _, _ = masked_pair(0.95)
    layer = Layer(0, prunable, TrainingConfig())
    prunable(torch.randn(4, 24)).sum().backward()
    layer.optimizer.step()
    layer.optimizer.zero_grad()
    prunable.weight_changed()
    received = Layer(0, PrunableLinear(nn.Linear(24, 40)), TrainingConfig())
    received.load(layer.state())
    x = torch.randn(7, 24)
    assert torch.equal(received.module(x), prunable(x))
    for name, value in layer.state().items():
        assert torch.equal(received.state()[name], value), name
    for one in (layer, received):
        one.module(x).sum().backward()
        one.optimizer.step()
    assert torch.equal(received.module.values, prunable.values)
    fixed = PrunableLinear(nn.Linear(24, 40).requires_grad_(False))
    Layer(0, fixed, TrainingConfig()).load(layer.state())
    assert not fixed.values.requires_grad


@pytest.mark.parametrize("pays", [True, False])
def test_pruning_further_keeps_the_values_that_stay(monkeypatch, pays):
    """From sparse to sparser: what is kept is what it was, also where a dense layer would stay dense."""
    prunable, _, mask = masked_pair(0.9)
    monkeypatch.setattr("ballast_trainer.dynamics.pruning.sparse_linear.sparse_pays_on", lambda device: pays)
    before = prunable.dense().clone()
    sparser = mask & (torch.rand(mask.shape) > 0.5)
    prunable.prune(sparser)
    assert torch.equal(prunable.dense(), before * sparser)
    assert prunable.learnt.shape == (int(sparser.sum()),)


class Reads(nn.Module):
    """A layer that multiplies by its linear layer's weight itself."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear

    def forward(self, x):
        scale = self.linear.in_features**-0.5
        return nn.functional.linear(x, self.linear.weight * scale, self.linear.bias) @ self.linear.weight


@pytest.mark.parametrize("sparsity", [0.5, 0.95])
def test_a_layer_may_read_the_weight_of_a_pruned_one(sparsity):
    """Where it is sparse, too: the dense weight, whose gradient is that of the values that are left."""
    prunable, twin, mask = masked_pair(sparsity)
    inputs = torch.randn(3, 24)
    results = [Reads(linear)(inputs) for linear in (prunable, twin)]
    torch.testing.assert_close(*results, atol=1e-5, rtol=1e-5)
    for result in results:
        result.square().sum().backward()
    gradient = prunable.dense(prunable.learnt.grad) * mask
    torch.testing.assert_close(gradient, twin.weight.grad * mask, atol=1e-4, rtol=1e-4)
    assert "linear.weight" not in Reads(prunable).state_dict() or sparsity < SPARSE_FROM
