"""A further loss of a layer, beside the model's: its gradient enters where the layer's output is computed.

So no stage needs to send it on, and the loss that is printed stays the model's own.  The loss counts as part
of the microbatch's: the trainer divides the gradients of both by the number of microbatches.
"""

from typing import Any

import torch

_scale = [1.0]


def set_loss_scale(factor: float) -> None:
    """The factor on the model's loss in the step that runs, which side losses share (fp16)."""
    _scale[0] = factor


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        return gradient, torch.full_like(ctx.like, _scale[0])


def with_side_loss(output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``output``, whose backward also computes the gradients of ``loss``, a scalar."""
    attached: torch.Tensor = _Attached.apply(output, loss)  # type: ignore[no-untyped-call]
    return attached
