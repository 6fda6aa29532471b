"""Precision: the types of weights and of what layers compute, and the loss scale that keeps fp16 gradients.

With ``bf16`` or ``fp16`` the layers run under autocast, so activations between stages have the type that
the layers return.  Weights are fp32; with ``dtype: bf16`` they and their gradients are bf16, and the
optimizer updates fp32 copies, as in Megatron-LM, or them, as in torchtitan.
fp16 gradients below 6e-8 vanish: the loss is multiplied by a scale before the backward, gradients
are divided by it before clipping (Micikevicius et al. 2018, section 3.2).
"""

import contextlib
import math
from collections.abc import Callable

import torch
from torch import nn
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.utils.parametrizations import _SpectralNorm

from ballast_trainer.causes import note_given
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.trees import Tree, mapped

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}

FIRST_SCALE = 65536.0
GROWTH_STEPS = 2000
"""Steps without an overflow after which the scale doubles; an overflow halves it."""


def check_precision(precision: str, device: torch.device) -> None:
    """Refuse a precision that the device does not support. Raises ConfigurationError: fp16 on a CPU."""
    if precision == "fp16" and device.type != "cuda":
        reason = f"'fp16' needs a CUDA device, this rank has {device.type!r}. To fix: use 'bf16' or 'fp32'"
        raise ConfigurationError("training.precision", reason)


def computing_in(precision: str, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """The context that layers run in."""
    if precision == "fp32":
        return contextlib.nullcontext()
    return torch.autocast(device.type, dtype=_TYPES[precision])


def in_bf16(module: nn.Module) -> dict[str, torch.Tensor]:
    """Make a layer's parameters bf16; returns by name what they were, in fp32.

    Those of batch norms stay fp32, as in Apex: their kernels want one type with the running statistics.

    Raises:
        ConfigurationError: torch's spectral_norm computes weights from buffers in fp32.
    """
    for part in module.modules():
        # Others may convert theirs.
        if isinstance(part, _SpectralNorm) and any(b.dtype is torch.float32 for b in part.buffers()):
            reason = f"SpectralNorm computes bf16 weights of a {type(module).__name__} from buffers in fp32"
            raise ConfigurationError("training.dtype", f"{reason}. To fix: leave dtype out")
    norms = (part for part in module.modules() if isinstance(part, _NormBase))
    kept = {id(parameter) for norm in norms for parameter in norm.parameters()}
    found = {
        name: parameter.detach().float()
        for name, parameter in module.named_parameters()
        if parameter.dtype in (torch.float32, torch.bfloat16) and id(parameter) not in kept
    }
    lowered = {id(module.get_parameter(name)) for name in found}
    # Recurrent modules let their kernels' copies of the weights follow.
    module._apply(lambda tensor: tensor.to(torch.bfloat16) if id(tensor) in lowered else tensor)
    return found


def inputs_in_bf16(value: Tree) -> Tree:
    """The inputs of a model whose weights are bf16."""
    return mapped(lambda tensor: tensor.bfloat16() if tensor.dtype is torch.float32 else tensor, value)


def in_full_precision(loss: Loss) -> Loss:
    """``loss`` of outputs in full precision; its errors tell what it was given."""

    def full(output: Tree, target: torch.Tensor) -> torch.Tensor:
        try:
            return loss(mapped(_full, output), target)
        except Exception as error:
            note_given(error, outputs=output, targets=target)
            raise

    return full


def _full(value: torch.Tensor) -> torch.Tensor:
    return value.float() if value.dtype in (torch.bfloat16, torch.float16) else value


class LossScale:
    """The factor on the loss, the same on every rank; always 1 unless the precision is fp16.

    It follows from the gradient norms of all ranks, which all ranks know, so it needs no message of
    its own.  Powers of two scale exactly.

    Attributes:
        value: the factor in force.
    """

    def __init__(self, precision: str) -> None:
        self._moves = precision == "fp16"
        self.value = FIRST_SCALE if self._moves else 1.0
        self._good_steps = 0

    @property
    def state(self) -> tuple[float, int]:
        """The factor, 0 where there is none, and steps since it last changed."""
        return self.value if self._moves else 0.0, self._good_steps

    def restore(self, state: tuple[float, int]) -> None:
        """Continue from the ``state`` of a checkpoint, maybe of another precision, or of another rank."""
        if self._moves and state[0] > 0:
            self.value, self._good_steps = float(state[0]), int(state[1])

    def scaled(self, loss: Loss) -> Loss:
        """``loss`` of outputs in full precision, multiplied by the factor in force when it is called."""
        whole = in_full_precision(loss)

        def scaled_loss(output: Tree, target: torch.Tensor) -> torch.Tensor:
            value = whole(output, target)
            return value * self.value if self._moves else value

        return scaled_loss

    def step_is_sound(self, squared_norm: float, *, step: int) -> bool:
        """True if the gradients of a step may reach the weights; moves the factor.

        Args:
            squared_norm: sum of squares of the scaled gradients, over all ranks.
            step: the step that runs, 0-based.

        Raises:
            TrainerError: they are not finite, and no smaller factor would help.
        """
        if math.isfinite(squared_norm):
            self._good_steps += 1
            if self._moves and self._good_steps >= GROWTH_STEPS:
                self.value, self._good_steps = self.value * 2, 0
            return True
        if not self._moves or self.value <= 1.0:
            raise TrainerError(
                f"the gradients of step {step + 1} are not finite (sum of squares {squared_norm}); "
                "the weights are not updated. To fix: lower training.learningRate, "
                "warm up longer, or look for what is not finite in the data or divides by zero in the loss"
            )
        self.value, self._good_steps = self.value / 2, 0
        return False
