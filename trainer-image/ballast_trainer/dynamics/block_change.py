"""Base of the changes of transformer blocks, whose strength grows over time and with depth."""

from ballast_policies.contract.job import DynamicConfig
from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.protocol import UnchangedHooks
from ballast_trainer.dynamics.schedule import ChangeSteps
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.models.gpt import Block


class ChangingModule(nn.Module):
    """A part of a block whose compute depends on the progress of the change.

    Attributes:
        strength: 0 before the change starts, up to ``target`` from ``endStep`` on.
        depth: the layer's place in the model, 0 for the first layer to 1 for the last.
    """

    def __init__(self, depth: float) -> None:
        super().__init__()
        self.strength = 0.0
        self.depth = depth


class BlockChange(UnchangedHooks):
    """Wraps each transformer block, and keeps the wrappers informed of the change's progress."""

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        self._steps = ChangeSteps.of(config)
        self._target = config.target
        self._layer_count = layer_count

    def change_block(self, block: Block, depth: float) -> nn.Module:
        """The block with its :class:`ChangingModule` in place, or its replacement."""
        raise NotImplementedError

    def change_other(self, module: nn.Module, index: int) -> nn.Module:
        """The replacement of a layer that is not a block; most are unchanged."""
        return module

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Change a newly built layer."""
        if isinstance(module, Block):
            return self.change_block(module, index / (self._layer_count - 1))
        return self.change_other(module, index)

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
                if isinstance(module, ChangingModule):
                    module.strength = strength
