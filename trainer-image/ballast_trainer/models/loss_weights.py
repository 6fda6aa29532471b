"""Weights of microbatches: a step's loss is the mean over all targets that count, not the mean of means.

A microbatch's mean loss is multiplied by (its weight) x (microbatches) / (weight of the step); the mean over
microbatches, which every schedule and all replicas compute, is then that of the whole batch.
"""

import math
from collections.abc import Callable

import torch
from torch.nn import functional

from ballast_trainer.data.collate import IGNORED
from ballast_trainer.errors import TrainerError
from ballast_trainer.trees import Tree, tensors_of

LossWeight = Callable[[torch.Tensor], float]


def counted_targets(targets: torch.Tensor) -> float:
    """Number of targets that are not -100: the weight of a mean cross entropy."""
    return float((targets != IGNORED).sum())


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Mean cross entropy in nats; logits [..., V], targets [...]."""
    return functional.cross_entropy(logits.flatten(0, -2), targets.flatten())


def weights_of(weight: LossWeight | None, targets: torch.Tensor, microbatches: int) -> list[float]:
    """The weight of each microbatch; ones where the loss gives none.

    Args:
        weight: of the targets of a microbatch.
        targets: of all microbatches.
        microbatches: how many they are.

    Raises:
        TrainerError: it gives no number from 0 on.
    """
    if weight is None:
        return [1.0] * microbatches
    found = [one_number(weight(part), "loss_weight") for part in targets.chunk(microbatches)]
    for value in found:
        if not 0 <= value < math.inf:
            raise TrainerError(
                f"loss_weight is {value} for the targets of a microbatch. To fix: return a number from 0 on"
            )
    return found


def one_number(found: object, what: str) -> float:
    """The number that a user's function returned, ``what`` in words. Raises TrainerError: it is none."""
    if isinstance(found, torch.Tensor) and found.numel() != 1:
        kind = f"tensor of shape {list(found.shape)}"
    else:
        try:
            return float(found)  # type: ignore[arg-type]
        except (TypeError, ValueError, RuntimeError):
            kind = type(found).__name__
    raise TrainerError(f"the {what} is a {kind}. To fix: return one number")


def weighted(value: torch.Tensor, output: Tree, factor: float) -> torch.Tensor:
    """The mean loss ``value`` of a microbatch times ``factor``; 0, with zero gradients, where that is 0.

    A mean over no target is NaN, and stays NaN times 0.
    """
    if factor == 1.0:
        return value
    if factor > 0:
        return value * factor
    nothing = [
        tensor.flatten()[:0].sum().to(value.dtype) for tensor in tensors_of(output) if tensor.requires_grad
    ]
    return torch.stack(nothing).sum() if nothing else value.new_zeros(())
