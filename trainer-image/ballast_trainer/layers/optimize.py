"""The optimizer step: learning rate, global clipping, one optimizer per layer, in one call."""

import collections
import copy
import math
from collections.abc import Iterable, Sequence

import torch
from ballast_policies.contract.job.training import TrainingConfig
from torch import nn

from ballast_trainer.causes import OPTIMIZER_NOTE, with_place
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.layers.layer import OWN_OPTIMIZERS, Layer, LayerSet
from ballast_trainer.layers.optimizer_state import is_plain
from ballast_trainer.models.registry import load_callable
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.seeding import host_seeded, mixed_key, seed_layer

BASE_RATE = "initial_lr"
"""Entry of an optimizer's parameter groups: the rate before warm-up and decay, named as in torch."""
_SETS_ITS_RATE = (
    "changes its learning rate in a step (a scheduler of torch in a hook, perhaps), and the trainer sets it "
    "before each. To fix: training.rateFactor, or warmupSteps and decay"
)
_UPDATE = 0x0971
_TOGETHER = (torch.optim.AdamW, torch.optim.SGD)


def squared_gradient_norm(parameters: Iterable[nn.Parameter]) -> float:
    """Sum of squares of the parameters' gradients; a GPU is waited for once, however many there are."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    norms: list[torch.Tensor] = []
    # A norm in bf16 would be off by up to 1/512, otherwise for each replica's part of a gradient.
    low = [gradient for gradient in gradients if gradient.itemsize == 2]
    if low:
        norms += torch._foreach_norm(low, 2, dtype=torch.float32)
    if len(low) < len(gradients):
        norms += torch._foreach_norm([gradient for gradient in gradients if gradient.itemsize > 2])
    return float(torch.stack(norms).double().square().sum()) if norms else 0.0


def rate_factor(config: TrainingConfig, step: int, total_steps: int) -> float:
    """The learning rate of ``step`` over ``learningRate``: a function of the step alone.

    So re-plans, restarts and other numbers of ranks cannot disturb it.  Linear warm-up to 1 over
    ``warmupSteps``; then 1, or a line or half a cosine down to ``decayTo`` at ``decaySteps``
    (``totalSteps`` unless given), which stays.  Or what ``rateFactor`` returns.

    Args:
        config: warm-up and decay.
        step: 0-based.
        total_steps: of the job.

    Raises:
        ConfigurationError: ``rateFactor`` cannot be called so, or returns no factor.
    """
    if config.rate_factor is not None:
        return _own_factor(config.rate_factor, step, total_steps)
    if step < config.warmup_steps:
        return (step + 1) / config.warmup_steps
    if config.decay == "constant":
        return 1.0
    end = config.decay_steps if config.decay_steps is not None else total_steps
    gone = min(1.0, (step - config.warmup_steps) / (end - config.warmup_steps))
    left = 1.0 - gone if config.decay == "linear" else (1.0 + math.cos(math.pi * gone)) / 2
    return config.decay_to + (1.0 - config.decay_to) * left


def _own_factor(name: str, step: int, total_steps: int) -> float:
    called, field = load_callable("training.rateFactor", name), "training.rateFactor"
    wanted = "To fix: return a number from 0 on, for a step from 0 and totalSteps"
    try:
        with host_seeded():
            factor, again = (float(called(step, total_steps)) for _ in range(2))
    except Exception as error:
        reason = f"{name} raised {type(error).__name__}: {error} at step {step} of {total_steps}. {wanted}"
        raise ConfigurationError(field, reason) from error
    if not (math.isfinite(factor) and factor >= 0):
        raise ConfigurationError(field, f"{name} returns {factor} at step {step} of {total_steps}. {wanted}")
    if factor != again:
        reason = f"{name} returns {factor}, then {again} at step {step} of {total_steps}"
        remedy = "To fix: a function of these two alone, since a restart has nothing that it remembers"
        raise ConfigurationError(field, f"{reason}. {remedy}")
    return factor


def learning_rate(config: TrainingConfig, step: int, total_steps: int) -> float:
    """Learning rate of ``step``."""
    return config.learning_rate * rate_factor(config, step, total_steps)


def optimizer_step(
    layers: LayerSet,
    config: TrainingConfig,
    meter: Meter,
    *,
    step: int,
    total_steps: int,
    squared_norm: float,
    loss_scale: float = 1.0,
) -> None:
    """Clip by the norm over all ranks, step every layer's optimizer, clear the gradients.

    Args:
        layers: the layers held by this rank.
        config: learning rate and clipping.
        meter: receives the seconds of each layer.
        step: the step that runs, 0-based.
        total_steps: of the job.
        squared_norm: sum of squares of all gradients, over all ranks, before division by ``loss_scale``.
        loss_scale: divisor of the gradients.
    """
    factor = rate_factor(config, step, total_steps)
    scale = 1.0 / loss_scale
    if config.norm_limit is not None:
        scale *= min(1.0, config.norm_limit / (math.sqrt(squared_norm) / loss_scale + 1e-6))
    layers.settle()
    began = meter.start_optimizer()
    learning = [layer for layer in layers if layer.optimizer is not None]
    # Layer by layer where that is measured, and for masters, whose gradients are copies of twice the bytes:
    # else the calls take longer than small layers do.
    one_by_one = meter.by_layer or config.has_masters
    for together in [[layer] for layer in learning] if one_by_one else _alike(learning):
        gradients = [gradient for layer in together for gradient in layer.gradients().values()]
        if gradients:
            if scale != 1.0:
                # As a tensor on a CPU, which rounds a number to the gradients' type, e.g. bf16.
                on_cpu = layers.device.type == "cpu"
                torch._foreach_mul_(gradients, torch.tensor(scale, dtype=torch.float64) if on_cpu else scale)
            update(together, factor, step)
        began = meter.add_optimizer(together[0].index, began)


def _alike(layers: Iterable[Layer]) -> list[list[Layer]]:
    """Layers that one call can update: those of one of torch's own optimizers, with equal settings."""
    found: list[tuple[object, list[Layer]]] = []
    for layer in layers:
        optimizer, settings = layer.optimizer, None
        # Of the user's own it is not known whether a parameter may stand beside others.
        if optimizer is not None and is_plain(optimizer, _TOGETHER) and len(optimizer.param_groups) == 1:
            group = optimizer.param_groups[0]
            settings = type(optimizer), {name: group[name] for name in group if name != "params"}
        if settings is not None and found and found[-1][0] == settings:
            found[-1][1].append(layer)
        else:
            found.append((settings, [layer]))
    return [together for _, together in found]


def update(layers: Sequence[Layer], factor: float = 1.0, step: int = 0) -> None:
    """Let the optimizers learn from the gradients, which are gone afterwards; ``factor``: on their rates.

    Those of several layers must be alike.

    Raises:
        ConfigurationError: one sets its rate itself, or does not take complex weights.
    """
    optimizers = [layer.optimizer for layer in layers if layer.optimizer is not None]
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    for group in groups:
        # A user's optimizer may give its groups different rates.
        group["lr"] = group.setdefault(BASE_RATE, group["lr"]) * factor
    rates = [group["lr"] for group in groups]
    handed = [layer.handed_to_masters() for layer in layers]
    optimizer = optimizers[0] if len(optimizers) == 1 else _joined(optimizers)
    config = layers[0].config
    if config.optimizer not in OWN_OPTIMIZERS:
        # It may draw random numbers: the same on every replica, and wherever the layer is.
        first = layers[0].index
        seed_layer(next(layers[0].module.parameters()).device, mixed_key(config.seed, _UPDATE, step), first)
    try:
        optimizer.step()
    except Exception as error:
        learning = (p for group in groups for p in group["params"] if p.grad is not None)
        of_type = isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError)
        if of_type and any(p.is_complex() for p in learning):
            reason = (
                f"{config.optimizer} ends with an error of its own where weights are complex: "
                f"{with_place(error)}. To fix: an optimizer that takes them, such as adamw"
            )
            raise ConfigurationError("training.optimizer", reason) from error
        error.add_note(f"{OPTIMIZER_NOTE} {config.optimizer}")
        raise
    if any(group["lr"] is not rate for group, rate in zip(groups, rates, strict=True)):
        raise ConfigurationError("training.optimizer", f"{config.optimizer} {_SETS_ITS_RATE}")
    optimizer.zero_grad(set_to_none=True)
    if config.optimizer not in OWN_OPTIMIZERS:
        # It may leave some out, whose gradients would add up.
        for layer in layers:
            layer.drop_gradients()
    rounded = [tensor for tensors, _ in handed for tensor in tensors]
    if rounded:
        torch._foreach_copy_(rounded, [master for _, masters in handed for master in masters])


def _joined(optimizers: Sequence[torch.optim.Optimizer]) -> torch.optim.Optimizer:
    """An optimizer of all their parameters that have gradients; the state stays theirs."""
    joined = copy.copy(optimizers[0])
    state = {
        parameter: optimizer.state[parameter]
        for optimizer in optimizers
        for parameter in optimizer.param_groups[0]["params"]
        if parameter.grad is not None
    }
    joined.param_groups = [{**optimizers[0].param_groups[0], "params": list(state)}]
    joined.state = collections.defaultdict(dict, state)
    return joined


def drop_gradients(layers: LayerSet) -> None:
    """Forget a step's gradients without learning from them."""
    layers.settle()
    for layer in layers:
        layer.drop_gradients()
