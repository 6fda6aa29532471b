"""Layer freezing: a growing prefix of the layers stops learning.

A frozen layer computes no weight gradients, and below the first layer that learns no gradient is
computed or sent at all.  PipeTransformer and Egeria freeze from the front for that reason.
"""

import math

from ballast_policies.contract.job import DynamicConfig

from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.protocol import UnchangedHooks
from ballast_trainer.dynamics.schedule import ChangeSteps
from ballast_trainer.layers.layer import LayerSet


class Freezing(UnchangedHooks):
    """Freezes up to ``target`` of the layers, linearly from ``startStep`` to ``endStep``.

    The last layer always learns.
    """

    needs_rebuild = True

    def __init__(self, config: DynamicConfig, layer_count: int) -> None:
        self._steps = ChangeSteps.of(config)
        self._target = config.target
        self._layer_count = layer_count

    def frozen_count(self, step: int) -> int:
        """How many layers are frozen when ``step`` runs."""
        last = self._steps.last_at(step)
        if last is None:
            return 0
        progress = self._steps.progress(step)
        count = math.floor(self._target * self._layer_count * progress + 1e-9)
        return min(count, self._layer_count - 1)

    def conform(self, step: int, layers: LayerSet) -> None:
        """Freeze the layers that are frozen before ``step``."""
        frozen = self.frozen_count(step - 1) if step > 0 else 0
        self._freeze(layers, frozen)

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Freeze the layers that are due at ``step``."""
        now = self.frozen_count(step)
        before = self.frozen_count(step - 1) if step > 0 else 0
        if now == before:
            return False
        self._freeze(layers, now)
        return True

    @staticmethod
    def _freeze(layers: LayerSet, count: int) -> None:
        for layer in layers:
            if layer.index < count:
                for parameter in layer.module.parameters():
                    parameter.requires_grad_(False)
                    parameter.grad = None
