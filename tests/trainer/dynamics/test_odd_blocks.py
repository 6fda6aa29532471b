"""Blocks that are built in unusual ways: what cannot be pruned is refused, what can computes as before."""

import pytest
import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, PruningSettings, Structure
from ballast_trainer.dynamics.pruning import neurons
from ballast_trainer.dynamics.pruning.neurons import as_linear
from ballast_trainer.dynamics.registry import build_dynamic
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm


class NarrowFirst(nn.Module):
    """Names what narrows before what widens."""

    def __init__(self, width=8, inner=24):
        super().__init__()
        self.down, self.up = nn.Linear(inner, width), nn.Linear(width, inner)

    def forward(self, hidden):
        return self.down(torch.relu(self.up(hidden)))


class Layer:
    """As little of a layer as pruning needs."""

    optimizer = None

    def replace_parameter(self, old, new, state):
        pass


@pytest.mark.parametrize("inner", [24, 8])
def test_the_neurons_are_found_in_whatever_order_an_mlp_names_its_layers(inner):
    """What is left computes as the whole with the others' outputs at zero."""
    mlp = NarrowFirst(inner=inner)
    assert neurons.lacks(mlp, mlp) == ""
    up, down = mlp.up, mlp.down
    hidden = torch.randn(2, 3, 8)
    keep = torch.ones(inner, dtype=torch.bool)
    keep[::2] = False
    wanted = functional.linear(torch.relu(up(hidden)) * keep, down.weight, down.bias)
    neurons.prepare(mlp)
    (found,) = neurons.prepared(mlp)
    assert (found.had, found.out) == (inner, mlp.down)
    found.remove(keep, Layer())
    torch.testing.assert_close(mlp(hidden), wanted)


def test_an_mlp_whose_inside_has_a_fixed_width_is_refused():
    """A norm between the layers knows how many neurons there are."""
    mlp = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 8))
    assert "fails with a neuron less" in neurons.lacks(mlp, mlp)
    usual = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 8))
    assert neurons.lacks(usual, usual) == ""


class Scaled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


@pytest.mark.parametrize(
    "linear",
    [Scaled(4, 4), weight_norm(nn.Linear(4, 4)), nn.MultiheadAttention(4, 2).out_proj],
    ids=["own forward", "parametrized", "of MultiheadAttention"],
)
def test_a_linear_layer_that_computes_otherwise_is_left_alone(linear):
    """Its weight alone does not say what it computes."""
    assert as_linear(linear) is None
    settings = PruningSettings(structure=Structure.WEIGHTS)
    change = build_dynamic(DynamicConfig(kind="pruning", target=0.9, pruning=settings), 3)
    assert "no linear layer" in change.lacks(1, nn.Sequential(linear))
