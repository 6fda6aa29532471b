"""The optimizer step: learning rate, global clipping, one optimizer per layer."""

import math

import torch

from ballast_trainer.config import TrainingConfig
from ballast_trainer.runtime.layers import LayerSet
from ballast_trainer.runtime.profile import Meter


def squared_gradient_norm(layers: LayerSet) -> float:
    """Sum of squares of the gradients held by this rank."""
    gradients = [parameter.grad for parameter in layers.parameters() if parameter.grad is not None]
    if not gradients:
        return 0.0
    norms = torch._foreach_norm(gradients)
    return float(torch.stack(norms).double().square().sum())


def learning_rate(config: TrainingConfig, step: int) -> float:
    """Learning rate of ``step``: linear warm-up, then constant."""
    if step >= config.warmup_steps:
        return config.learning_rate
    return config.learning_rate * (step + 1) / config.warmup_steps


def optimizer_step(
    layers: LayerSet, config: TrainingConfig, meter: Meter, *, step: int, squared_norm: float
) -> None:
    """Clip by the norm over all ranks, step every layer's optimizer, clear the gradients.

    Args:
        layers: the layers held by this rank.
        config: learning rate and clipping.
        meter: told the seconds of each layer.
        step: the step that runs, 0-based.
        squared_norm: sum of squares of all gradients, over all ranks.
    """
    rate = learning_rate(config, step)
    scale = 1.0
    if config.clip_norm is not None:
        scale = min(1.0, config.clip_norm / (math.sqrt(squared_norm) + 1e-6))
    began = meter.start_optimizer()
    for layer in layers:
        if layer.optimizer is None:
            continue
        gradients = [p.grad for p in layer.module.parameters() if p.grad is not None]
        if gradients:
            if scale < 1.0:
                torch._foreach_mul_(gradients, scale)
            for group in layer.optimizer.param_groups:
                group["lr"] = rate
            layer.optimizer.step()
            layer.optimizer.zero_grad(set_to_none=True)
        began = meter.add_optimizer(layer.index, began)
