"""Saved weights of GPT-2's ``Conv1D``, inputs first: pruning makes linear layers of them, outputs first.

So a checkpoint from before pruning was switched on, or off, has them the other way round.
"""

import torch
from torch import nn

from ballast_trainer.dynamics.pruning.neurons import came_from_conv1d, is_conv1d
from ballast_trainer.dynamics.pruning.sparse_linear import without_masks
from ballast_trainer.layers.layer import MODULE, OPTIMIZER


def as_pruned_now(tensors: dict[str, torch.Tensor], module: nn.Module) -> dict[str, torch.Tensor]:
    """A layer's saved tensors for a ``module`` for which pruning was switched on or off since.

    Args:
        tensors: by key, as :class:`~ballast_trainer.layers.layer.Layer` names them.
        module: the new module that will load them.
    """
    now = {path: False for path, part in module.named_modules() if is_conv1d(part)}
    now |= {path: True for path, part in module.named_modules() if came_from_conv1d(part)}
    saved = {path: _outputs_first(tensors, path) for path in now}
    dense = without_masks(tensors, module)
    for path, outputs_first in now.items():
        beside = [saved[other] for other in saved if _parent(other) == _parent(path)]
        known = [first for first in (saved[path], *beside) if first is not None]
        if known and known[0] != outputs_first:
            name = f"{path}.weight" if path else "weight"
            for key, value in dense.items():
                if key == MODULE + name or (key.startswith(f"{OPTIMIZER}{name}.") and value.dim() == 2):
                    dense[key] = value.t().contiguous()
    return dense


def _outputs_first(tensors: dict[str, torch.Tensor], path: str) -> bool | None:
    """Which way round a weight was saved; None: it is square, and does not tell."""
    prefix = f"{MODULE}{path}." if path else MODULE
    if f"{prefix}mask" in tensors:
        return True
    weight, bias = tensors.get(f"{prefix}weight"), tensors.get(f"{prefix}bias")
    if weight is None or bias is None or weight.shape[0] == weight.shape[1]:
        return None
    return bool(weight.shape[0] == len(bias))


def _parent(path: str) -> str:
    return path.rpartition(".")[0]
