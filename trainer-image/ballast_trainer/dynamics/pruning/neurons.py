"""Inner neurons of MLPs as the unit of pruning: products become smaller, at any sparsity.

A neuron is a row of each linear layer that widens, and the column of the one that narrows again; so it can be
removed wherever what lies between works element by element (GELU, SwiGLU).
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ballast_trainer.layers.layer import Layer


def as_linear(module: nn.Module) -> nn.Linear | None:
    """``nn.Linear`` itself, GPT-2's ``Conv1D`` with its weight transposed; None: another module."""
    if isinstance(module, nn.Linear):
        return module
    if type(module).__name__ != "Conv1D":
        return None
    weight, bias = module.weight, module.bias
    assert isinstance(weight, nn.Parameter) and isinstance(bias, nn.Parameter)
    linear = nn.Linear(weight.shape[0], weight.shape[1], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight.t())
        linear.bias.copy_(bias)
    return linear


class ShrinkingLinear(nn.Linear):
    """A linear layer that loses rows or columns, and loads weights that have lost some."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            stored, own = state_dict.get(prefix + name), getattr(self, name)
            if stored is not None and own is not None and stored.shape != own.shape:
                shaped = torch.empty_like(stored, device=own.device, dtype=own.dtype)
                setattr(self, name, nn.Parameter(shaped, requires_grad=own.requires_grad))
        super()._load_from_state_dict(state_dict, prefix, *args)


class PrunableMlp(nn.Module):
    """An MLP whose inner neurons can be removed, [..., D] -> [..., D].

    Attributes:
        neurons: how many it had.
    """

    def __init__(self, mlp: nn.Module) -> None:
        """Take over an MLP for which :func:`lacks` finds nothing."""
        super().__init__()
        for child in list(mlp.modules()):
            for name, part in list(child.named_children()):
                linear = as_linear(part)
                if linear is not None:
                    linear.__class__ = ShrinkingLinear
                    setattr(child, name, linear)
        self.mlp = mlp
        self.neurons = self.kept

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """As the MLP."""
        mixed: torch.Tensor = self.mlp(hidden)
        return mixed

    @property
    def kept(self) -> int:
        """How many neurons are left."""
        return int(self._narrow.weight.shape[1])

    def scores(self) -> torch.Tensor:
        """Of each neuron left, float32: the norm of what leads to it times that of what leads away."""
        into = torch.stack([linear.weight.detach().float().square().sum(1) for linear in self._wide]).sum(0)
        away = self._narrow.weight.detach().float().square().sum(0)
        return torch.sqrt(into * away)

    def remove(self, keep: torch.Tensor, layer: Layer) -> None:
        """Keep the neurons of a bool mask, the best one at least; their optimizer state stays.

        Args:
            keep: by neuron that is left.
            layer: that the MLP is in.
        """
        keep = with_best(keep, self.scores)
        for linear in self._wide:
            cut_outputs(layer, linear, keep)
        cut(layer, self._narrow, "weight", keep, 1)
        self._narrow.in_features = int(keep.sum())

    @property
    def _linears(self) -> list[nn.Linear]:
        return [module for module in self.mlp.modules() if isinstance(module, nn.Linear)]

    @property
    def _wide(self) -> list[nn.Linear]:
        return self._linears[:-1]

    @property
    def _narrow(self) -> nn.Linear:
        return self._linears[-1]


def with_best(keep: torch.Tensor, scores: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The mask of units to keep, or the unit of the best score where it keeps none."""
    if bool(keep.any()):
        return keep
    keep = keep.clone()
    keep[scores().argmax()] = True
    return keep


def cut_outputs(layer: Layer, linear: nn.Linear, keep: torch.Tensor) -> None:
    """Keep the outputs of a bool mask: rows of the weight, and of the bias where there is one."""
    cut(layer, linear, "weight", keep, 0)
    if linear.bias is not None:
        cut(layer, linear, "bias", keep, 0)
    linear.out_features = int(keep.sum())


def cut(layer: Layer, linear: nn.Linear, name: str, keep: torch.Tensor, dim: int) -> None:
    """Keep the rows (or columns) of a bool mask of a parameter, and of what the optimizer keeps of it."""
    old = getattr(linear, name)
    index = keep.nonzero(as_tuple=True)[0]
    new = nn.Parameter(old.detach().index_select(dim, index), requires_grad=old.requires_grad)
    state = {} if layer.optimizer is None else layer.optimizer.state.get(old, {})
    cut = {
        key: value.index_select(dim, index)
        for key, value in state.items()
        if isinstance(value, torch.Tensor) and value.shape == old.shape
    }
    setattr(linear, name, new)
    layer.replace_parameter(old, new, cut)


def _parts(mlp: nn.Module) -> tuple[list[nn.Linear], nn.Linear | None]:
    linears = [linear for module in mlp.modules() if (linear := as_linear(module)) is not None]
    return (linears[:-1], linears[-1]) if linears else ([], None)


def lacks(mlp: nn.Module) -> str:
    """Why the inner neurons of an MLP cannot be told apart; empty: they can."""
    wide, narrow = _parts(mlp)
    shapes = [tuple(linear.weight.shape) for linear in [*wide, *([narrow] if narrow is not None else [])]]
    if (
        narrow is None
        or not wide
        or len({linear.weight.shape for linear in wide}) != 1
        or wide[0].weight.shape != (narrow.weight.shape[1], narrow.weight.shape[0])
    ):
        return (
            f"an MLP ({type(mlp).__name__}) that does not widen by linear layers of one shape and then "
            f"narrow by one: its weights are {shapes}"
        )
    return ""
