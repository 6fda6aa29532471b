"""A layer's tensors by key for checkpoints: each part is stored once, any number of ranks can load it.

A whole tensor keeps its name; a part is called ``name@index/size:dimxblocks``, which is enough
to assemble the whole and to cut it differently.
"""

import re
from collections.abc import Iterable

import torch

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.layer import MODULE, OPTIMIZER, Layer
from ballast_trainer.layers.slicing import Slicing, slicings

_PART = re.compile(r"(?P<name>.+)@(?P<index>\d+)/(?P<size>\d+):(?P<dim>\d+)x(?P<blocks>\d+)")


def _slicing_of(name: str, value: torch.Tensor, cut: dict[str, Slicing]) -> Slicing | None:
    """How a tensor of a layer's state is cut: as its parameter, unless it is a mere number."""
    if value.dim() == 0:
        return None
    parameter = name.removeprefix(MODULE)
    if name.startswith(OPTIMIZER):
        parameter = name.removeprefix(OPTIMIZER).rpartition(".")[0]
    return cut.get(parameter)


def stored_tensors(layer: Layer, axis: Axis) -> dict[str, torch.Tensor]:
    """The tensors of a layer that this rank stores: its parts, and on the first rank also the whole ones."""
    cut, stored = slicings(layer.module), {}
    for name, value in layer.state().items():
        slicing = _slicing_of(name, value, cut)
        if slicing is not None:
            stored[f"{name}@{axis.index}/{axis.size}:{slicing.dim}x{slicing.blocks}"] = value
        elif axis.index == 0:
            stored[name] = value
    return stored


def needed_keys(keys: Iterable[str], axis: Axis) -> set[str]:
    """Of a layer's stored keys, those that this rank has to read: its own parts, or all of other sizes."""
    needed = set()
    for key in keys:
        part = _PART.fullmatch(key)
        if part is None or int(part["size"]) != axis.size or int(part["index"]) == axis.index:
            needed.add(key)
    return needed


def assembled(stored: dict[str, torch.Tensor], layer: Layer, axis: Axis) -> dict[str, torch.Tensor]:
    """The tensors that ``layer`` loads on this rank, from those that :func:`needed_keys` names."""
    whole: dict[str, torch.Tensor] = {}
    mine: dict[str, torch.Tensor] = {}
    parts: dict[str, dict[int, torch.Tensor]] = {}
    ways: dict[str, Slicing] = {}
    for key, value in stored.items():
        part = _PART.fullmatch(key)
        if part is None:
            whole[key] = value
        elif int(part["size"]) == axis.size:
            mine[part["name"]] = value
        else:
            parts.setdefault(part["name"], {})[int(part["index"])] = value
            ways[part["name"]] = Slicing(dim=int(part["dim"]), blocks=int(part["blocks"]))
    for name, pieces in parts.items():
        whole[name] = ways[name].whole([pieces[index] for index in sorted(pieces)])
    cut = slicings(layer.module)
    for name, value in whole.items():
        slicing = _slicing_of(name, value, cut)
        mine[name] = value if slicing is None else slicing.part(value, axis.index, axis.size)
    return mine
