"""Base of the changes of transformer blocks, whose strength grows over time."""

from ballast_policies.contract.job import DynamicConfig
from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.protocol import UnchangedHooks
from ballast_trainer.dynamics.schedule import ChangeSteps
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.models.blocks import lacking


class ChangingModule(nn.Module):
    """A part of a block whose compute depends on the progress of the change.

    Attributes:
        strength: 0 before the change starts, up to ``target`` from ``endStep`` on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.strength = 0.0


class BlockChange(UnchangedHooks):
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
        """Why a layer stays as it is; empty: it is changed."""
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
        """At the last step of a job."""
        return self._target * self._steps.progress(total_steps - 1)

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Change a newly built layer."""
        return module if self.lacks(index, module) else self.change_block(module, index)

    def conform(self, step: int, layers: LayerSet) -> None:
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
        for layer in layers:
            for module in layer.module.modules():
                if isinstance(module, self.part):
                    module.strength = strength
