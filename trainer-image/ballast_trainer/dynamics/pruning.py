"""Gradual global magnitude pruning (Zhu and Gupta 2017, equation 1).

At the steps t0, t0 + dt, ..., t0 + n dt the sparsity of all linear weights together becomes
``S_t = S_f + (S_i - S_f) (1 - (t - t0) / (n dt))^3``: the weights of smallest magnitude over the
whole model go, so layers get cheaper unevenly.  A pruned weight, its gradient and its optimizer
state are zero from then on.
"""

import math
from typing import Any

import torch
from ballast_policies.contract.job import DynamicConfig
from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.magnitude import largest_masks
from ballast_trainer.dynamics.protocol import UnchangedHooks
from ballast_trainer.dynamics.schedule import ChangeSteps
from ballast_trainer.dynamics.sparse_linear import PrunableLinear
from ballast_trainer.layers.layer import Layer, LayerSet


def gradual_sparsity(progress: float, final: float, initial: float = 0.0) -> float:
    """Sparsity at ``progress`` in [0, 1] of the way from the first pruning step to the last."""
    return final + (initial - final) * (1 - progress) ** 3


def prunable(module: nn.Module) -> list[PrunableLinear]:
    """The prunable layers inside a module, in the order of its definition."""
    return [child for child in module.modules() if isinstance(child, PrunableLinear)]


class Pruning(UnchangedHooks):
    """Prunes up to ``target`` of the weights from ``startStep`` to ``endStep``."""

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        self._steps = ChangeSteps.of(config)
        self._target = config.target
        self._layer_count = layer_count

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Replace each linear layer by a prunable one that takes over its parameters."""
        if isinstance(module, nn.Linear):
            return PrunableLinear(module)
        for child in list(module.modules()):
            for name, linear in list(child.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(child, name, PrunableLinear(linear))
        return module

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Prune to the sparsity that is due at ``step``."""
        if not self._steps.acts_at(step):
            return False
        sparsity = gradual_sparsity(self._steps.progress(step), self._target)
        weights = {
            layer.index: torch.cat([linear.dense().reshape(-1) for linear in found])
            for layer in layers
            if (found := prunable(layer.module))
        }
        total = torch.tensor(
            [sum(w.numel() for w in weights.values())], dtype=torch.int64, device=world.device
        )
        keep = math.floor(int(world.sum_tensor(total)) * (1 - sparsity))
        masks = largest_masks(world, weights, keep, self._layer_count)
        for index, mask in masks.items():
            _prune(layers[index], mask)
        return True

    def after_backward(self, layers: LayerSet) -> None:
        """A pruned weight has no gradient."""
        for layer in layers:
            for linear in prunable(layer.module):
                if linear.weight is not None and linear.weight.grad is not None:
                    linear.weight.grad.mul_(linear.mask)

    def after_optimizer(self, layers: LayerSet) -> None:
        """The weights have changed."""
        for layer in layers:
            for linear in prunable(layer.module):
                linear.weight_changed()


def _prune(layer: Layer, flat_mask: torch.Tensor) -> None:
    offset = 0
    for linear in prunable(layer.module):
        mask = flat_mask[offset : offset + linear.mask.numel()].view_as(linear.mask)
        offset += mask.numel()
        old = linear.learnt
        state = {} if layer.optimizer is None else layer.optimizer.state.get(old, {})
        full = {key: linear.dense(v) for key, v in state.items() if _is_shaped(v, old)}
        linear.prune(mask)
        compacted = {key: linear.compact(value) for key, value in full.items()}
        layer.replace_parameter(old, linear.learnt, compacted)


def _is_shaped(value: Any, parameter: nn.Parameter) -> bool:
    return isinstance(value, torch.Tensor) and value.shape == parameter.shape
