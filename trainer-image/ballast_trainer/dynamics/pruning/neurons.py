"""Units of pruning that are removed, so that products become smaller, at any sparsity; neurons of MLPs.

An inner neuron is a row of each linear layer that widens, and the column of the one that narrows again; so
it can be removed wherever what lies between works element by element (GELU, SwiGLU).
"""

import dataclasses
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from ballast_trainer.layers.layer import Layer
from ballast_trainer.models.blocks import is_conv1d
from ballast_trainer.seeding import host_seeded

_HAD = "ballast_neurons"
"""Attribute of an MLP: how many neurons it had, and which of its linear layers narrows."""

_FUSED_SPLIT = "split_size"
"""Attribute of GPT-2's attention: rows of the fused map that belong to each of query, key and value."""

_ORIGIN = "ballast_origin"
"""Attribute of a parameter: what it was made from."""


def as_linear(module: nn.Module) -> nn.Linear | None:
    """``nn.Linear`` itself, GPT-2's ``Conv1D`` with its weight transposed; None: another module.

    A linear layer that computes otherwise (a forward of its own, a parametrized weight), or whose weight
    another module computes with (``nn.MultiheadAttention``), is another module.
    """
    if isinstance(module, NonDynamicallyQuantizableLinear):
        return None
    if isinstance(module, nn.Linear):
        usual = type(module).forward is nn.Linear.forward and "weight" in module._parameters
        return module if usual else None
    if not is_conv1d(module):
        return None
    weight, bias = module.weight, module.bias
    assert isinstance(weight, nn.Parameter) and isinstance(bias, nn.Parameter)
    linear = nn.Linear(weight.shape[0], weight.shape[1], device=weight.device, dtype=weight.dtype)
    with torch.no_grad():
        linear.weight.copy_(weight.t())
        linear.bias.copy_(bias)
    for parameter, origin in ((linear.weight, weight), (linear.bias, bias)):
        setattr(parameter, _ORIGIN, weakref.ref(origin))
    return linear


def came_from_conv1d(module: nn.Module) -> bool:
    """True if it is a linear layer, not loaded yet, that :func:`as_linear` has made of ``Conv1D``."""
    return hasattr(module._parameters.get("weight"), _ORIGIN)


def origin_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """The parameter of ``Conv1D`` that a new one has taken the place of; None: none, or it is gone."""
    reference: Callable[[], torch.Tensor | None] = getattr(tensor, _ORIGIN, lambda: None)
    return reference()


class ShrinkingLinear(nn.Linear):
    """A linear layer that loses rows or columns, and loads weights that have lost some."""

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        for name in ("weight", "bias"):
            stored, own = state_dict.get(prefix + name), getattr(self, name)
            if stored is not None and own is not None and stored.shape != own.shape:
                shaped = torch.empty_like(stored, device=own.device, dtype=own.dtype)
                setattr(self, name, nn.Parameter(shaped, requires_grad=own.requires_grad))
        super()._load_from_state_dict(state_dict, prefix, *args)


@dataclasses.dataclass(frozen=True, slots=True)
class Units:
    """The units of a part of a block: inner neurons of an MLP, or heads of an attention.

    Attributes:
        part: the module.
        into: maps that lead to them: the linear layer, parts in it, and rows of a unit in each part.
        out: the map that leads away from them.
        columns: of ``out`` that a unit has.
        scored: how many of the maps into them, the last ones, count in a unit's score, by their last part.
        had: how many units there were.
    """

    part: nn.Module
    into: tuple[tuple[nn.Linear, int, int], ...]
    out: nn.Linear
    columns: int
    scored: int
    had: int

    @property
    def kept(self) -> int:
        """Number of units that are left."""
        return int(self.out.weight.shape[1]) // self.columns

    def scores(self) -> torch.Tensor:
        """Score of each unit left, float32: the norm of what leads to it times that of what leads away."""
        into = torch.stack(
            [
                linear.weight.detach().float().square().sum(1).view(parts, -1, rows)[-1].sum(1)
                for linear, parts, rows in self.into[-self.scored :]
            ]
        ).sum(0)
        away = self.out.weight.detach().float().square().sum(0).view(-1, self.columns).sum(1)
        return torch.sqrt(into * away)

    def remove(self, keep: torch.Tensor, layer: Layer | None) -> None:
        """Keep the units of a bool mask, the best one at least; the optimizer state of the layer stays."""
        if not bool(keep.any()):
            keep = keep.clone()
            keep[self.scores().argmax()] = True
        for linear, parts, rows in self.into:
            outputs = keep.repeat_interleave(rows).repeat(parts)
            cut(layer, linear, "weight", outputs, 0)
            if linear.bias is not None:
                cut(layer, linear, "bias", outputs, 0)
        cut(layer, self.out, "weight", keep.repeat_interleave(self.columns), 1)
        self.follow_shapes()

    def follow_shapes(self) -> None:
        """Set the counts that the modules keep beside their weights, after these were cut or loaded."""
        for linear, parts, _ in self.into:
            linear.out_features = int(linear.weight.shape[0])
            if parts > 1 and hasattr(self.part, _FUSED_SPLIT):
                setattr(self.part, _FUSED_SPLIT, linear.out_features // parts)
        self.out.in_features = int(self.out.weight.shape[1])


def replace_linears(module: nn.Module, made: Callable[[nn.Linear], nn.Module]) -> None:
    """Put what is made of each linear layer inside a module in its place; names stay."""
    for child in list(module.modules()):
        for name, part in list(child.named_children()):
            linear = as_linear(part)
            if linear is not None:
                setattr(child, name, made(linear))


def shrinking(linear: nn.Linear) -> nn.Linear:
    """The layer itself, able to lose rows and columns."""
    linear.__class__ = ShrinkingLinear
    return linear


def prepare(mlp: nn.Module) -> None:
    """Make an MLP for which :func:`lacks` finds nothing able to lose neurons."""
    narrows_at = _narrows_at(mlp)
    assert isinstance(narrows_at, int)
    replace_linears(mlp, shrinking)
    setattr(mlp, _HAD, (_linears(mlp)[narrows_at].in_features, narrows_at))


def prepared(module: nn.Module) -> list[Units]:
    """The neurons of the MLPs in a layer that :func:`prepare` has seen."""
    found = []
    for mlp in module.modules():
        if hasattr(mlp, _HAD):
            had, narrows_at = getattr(mlp, _HAD)
            wide = _linears(mlp)
            narrow = wide.pop(narrows_at)
            into = tuple((linear, 1, 1) for linear in wide)
            found.append(Units(mlp, into, narrow, columns=1, scored=len(wide), had=had))
    return found


def _linears(mlp: nn.Module) -> list[ShrinkingLinear]:
    return [module for module in mlp.modules() if isinstance(module, ShrinkingLinear)]


def cut(layer: Layer | None, linear: nn.Linear, name: str, keep: torch.Tensor, dim: int) -> None:
    """Keep the rows (or columns) of a bool mask of a parameter, and of what the optimizer keeps of it."""
    old = getattr(linear, name)
    index = keep.nonzero(as_tuple=True)[0]
    # Read while the old one is in its place, to which state on its way from another rank goes.
    state = {} if layer is None or layer.optimizer is None else layer.optimizer.state.get(old, {})
    new = nn.Parameter(old.detach().index_select(dim, index), requires_grad=old.requires_grad)
    setattr(linear, name, new)
    if layer is not None:
        cut = {
            key: value.index_select(dim, index)
            for key, value in state.items()
            if isinstance(value, torch.Tensor) and value.shape == old.shape
        }
        layer.replace_parameter(old, new, cut)


def lacks(block: nn.Module, mlp: nn.Module) -> str:
    """Reason that the inner neurons of a block's MLP cannot be told apart; empty: they can."""
    found = _narrows_at(mlp)
    return found if isinstance(found, str) else ""


def _narrows_at(mlp: nn.Module) -> int | str:
    """Index of the linear layer, as the MLP defines them, that narrows again; a text if none is found.

    An MLP is run with a neuron less to find out, since it may name what narrows first, and what lies between
    may be of the width that all neurons have.
    """
    linears = {name: linear for name, part in mlp.named_modules() if (linear := as_linear(part)) is not None}
    shapes = [tuple(linear.weight.shape) for linear in linears.values()]
    fitting = [at for at, shape in enumerate(shapes) if len(shapes) > 1 and _widen(shapes, at, shape)]
    if not fitting:
        return (
            f"an MLP ({type(mlp).__name__}) that does not widen by linear layers of one shape and then "
            f"narrow by one: its weights are {shapes}"
        )
    own = dict(mlp.named_modules())
    if any(linear is not own[name] for name, linear in linears.items()):
        # GPT-2's maps are of transformers, which narrows by the last one.
        return fitting[-1]
    running = [at for at in reversed(fitting) if not _error(mlp, linears, at, fewer=0)]
    if not running:
        # It cannot be run without data.
        return fitting[-1]
    errors = [_error(mlp, linears, at, fewer=1) for at in running]
    if "" in errors:
        return running[errors.index("")]
    return f"an MLP ({type(mlp).__name__}) that fails with a neuron less ({errors[0]})"


def _widen(shapes: list[tuple[int, ...]], at: int, narrow: tuple[int, ...]) -> bool:
    """True if all other layers have the shape that goes with one that narrows."""
    return all(shape == narrow[::-1] for other, shape in enumerate(shapes) if other != at)


def _error(mlp: nn.Module, linears: Mapping[str, nn.Linear], narrows_at: int, *, fewer: int) -> str:
    """Error of an MLP with so many neurons less, run on tensors without data; empty: none."""
    tensors = {
        name: torch.empty_like(value, device="meta")
        for name, value in (*mlp.named_parameters(), *mlp.named_buffers())
    }
    for at, (name, linear) in enumerate(linears.items()):
        prefix = f"{name}." if name else ""
        rows, columns = linear.weight.shape
        if at == narrows_at:
            columns -= fewer
        else:
            rows -= fewer
            if linear.bias is not None:
                tensors[f"{prefix}bias"] = torch.empty(rows, device="meta")
        tensors[f"{prefix}weight"] = torch.empty(rows, columns, device="meta")
    width = list(linears.values())[narrows_at].weight.shape[0]
    try:
        with torch.no_grad(), host_seeded():
            torch.func.functional_call(mlp, tensors, (torch.zeros(1, 2, width, device="meta"),))
    except Exception as error:  # a user's module may do anything with its input
        return str(error) or type(error).__name__
    return ""
