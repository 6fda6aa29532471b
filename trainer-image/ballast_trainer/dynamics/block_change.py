"""Base of the changes of transformer blocks, whose strength grows over time, and what they share.

A block over some positions of each sequence; and a further loss of a layer, whose gradient enters where the
layer's output is computed.  So no stage needs to send it on, and the loss that is printed stays the model's
own.  The loss counts as part of the microbatch's.
"""

from collections.abc import Iterator
from typing import Any

import torch
from ballast_policies.contract.job.dynamics import DynamicConfig
from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.protocol import Dynamic
from ballast_trainer.dynamics.schedule import ChangeSteps
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.models.blocks import lacking


class ChangingModule(nn.Module):
    """A part of a block that changes: ``strength`` goes from 0 to ``target``, its value from ``endStep``."""

    def __init__(self) -> None:
        super().__init__()
        self.strength = 0.0


class BlockChange(Dynamic):
    """Changes transformer blocks, and keeps their changing parts informed of its progress.

    Attributes:
        needs: members of :class:`~ballast_trainer.models.blocks.TransformerBlock` that a block must have.
        every_blocks: one of this many layers is changed.
        first_layer: index below which none is changed.
        part: the class of this change's parts in a block.
    """

    part: type[ChangingModule] = ChangingModule
    needs: tuple[str, ...] = ()
    every_blocks = 1
    first_layer = 0

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        self._steps = ChangeSteps.of(config)
        self._target = 1.0 if config.target is None else config.target
        self._layer_count = layer_count

    def change_block(self, block: nn.Module, index: int) -> nn.Module:
        """The block with its :class:`ChangingModule` in place, or its replacement."""
        raise NotImplementedError

    def lacks(self, index: int, module: nn.Module) -> str:
        """Reason that a layer stays as it is; empty: it is changed."""
        if index < self.first_layer:
            return f"an index below firstLayer: {self.first_layer}"
        if index % self.every_blocks:
            return f"an index that everyBlocks: {self.every_blocks} passes over"
        return lacking(module, self.needs)

    def without_effect(self, total_steps: int) -> str:
        """Its strength stays 0."""
        weak = "" if self.most_strength(total_steps) > 0 else "its target stays 0 to the job's last step"
        return self._steps.too_late(total_steps) or weak

    def most_strength(self, total_steps: int) -> float:
        """Strength at the last step of a job."""
        return self._target * self._steps.progress(total_steps - 1)

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Change a newly built layer."""
        return module if self.lacks(index, module) else self.change_block(module, index)

    def reapply(self, step: int, layers: LayerSet) -> None:
        """Set the state before ``step``."""
        self._tell(layers, step - 1)

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Set the state from ``step`` on."""
        if not self._steps.acts_at(step):
            return False
        self._tell(layers, step)
        return True

    def _tell(self, layers: LayerSet, step: int) -> None:
        strength = self._target * self._steps.progress(step)
        for _, part in self.parts(layers):
            part.strength = strength

    def parts(self, layers: LayerSet) -> Iterator[tuple[int, Any]]:
        """The changing parts of the layers held, each with its layer's index."""
        modules = ((layer.index, module) for layer in layers for module in layer.module.modules())
        return (pair for pair in modules if isinstance(pair[1], self.part))


def run_at(
    block: nn.Module, hidden: torch.Tensor, chosen: torch.Tensor, most: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run a block on the chosen positions, which attend among each other; the others keep their states.

    Sequences with fewer are filled up at the end, where causal attention hides the filling.

    Args:
        block: a :class:`~ballast_trainer.models.blocks.TransformerBlock`.
        hidden: [B, S, D].
        chosen: bool [B, S]; at least one.
        most: of a sequence; None: they are counted, for which the host waits.

    Returns:
        The states [B, S, D], of the others unchanged, and the block's output [B, S, D], of the others too.
    """
    typed: Any = block
    longest = int(chosen.sum(1).max()) if most is None else most
    if longest == hidden.shape[1]:
        every = torch.arange(longest, device=hidden.device)[None].expand(hidden.shape[0], -1)
        after = typed.run_at(hidden, every)
    else:
        # The chosen ones first, in the order of the sequence.
        order = torch.sort((~chosen).to(torch.int8), dim=1, stable=True).indices[:, :longest]
        index = order.unsqueeze(-1).expand(-1, -1, hidden.shape[-1])
        part = typed.run_at(hidden.gather(1, index), order)
        after = hidden.to(part.dtype).scatter(1, index, part)
    return torch.where(chosen.unsqueeze(-1), after, hidden.to(after.dtype)), after


class _Attached(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
        ctx.like = loss.detach()
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        factor = CURRENT_FORWARD.loss_scale * CURRENT_FORWARD.loss_share
        return gradient, torch.full_like(ctx.like, factor)


def with_side_loss(output: torch.Tensor, loss: torch.Tensor) -> torch.Tensor:
    """``output``, whose backward also computes the gradients of ``loss``, a scalar."""
    attached: torch.Tensor = _Attached.apply(output, loss)  # type: ignore[no-untyped-call]
    return attached
