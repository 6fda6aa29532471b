"""The interface of a dynamic case: a change of the model while it trains.

A change is a pure function of the step and of the layers' tensors, so that it is the same under
every partition and after every restart; any further state travels as buffers of the
layer.  Activations between layers keep their shape, since stages exchange them by fixed shapes.
"""

from typing import Protocol

from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.layer import LayerSet


class Dynamic(Protocol):
    """One kind of change.

    Attributes:
        needs_rebuild: whether a change of it alters which gradients stages exchange.
        measures: name of the figure that it measures of the data, printed as an event; None: none.
    """

    needs_rebuild: bool
    measures: str | None

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Make a newly built layer able to change; returns the module to use."""

    def conform(self, step: int, layers: LayerSet) -> None:
        """Bring layers that were built, received or loaded to the state before ``step``."""

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Carry out the changes due before ``step``; collective. Returns whether layers' costs changed."""

    def measured(self, layers: LayerSet) -> dict[int, float]:
        """Its newest figure by layer, of the layers held that have one."""

    def after_backward(self, layers: LayerSet) -> None:
        """Called when a step's gradients are complete, before their norm is taken."""

    def after_optimizer(self, layers: LayerSet) -> None:
        """Called after each optimizer step, before the next forward."""


class UnchangedHooks:
    """Default for the hooks that most changes do not need."""

    needs_rebuild = False
    measures: str | None = None

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """The module, unchanged."""
        return module

    def conform(self, step: int, layers: LayerSet) -> None:
        """Nothing to do."""

    def measured(self, layers: LayerSet) -> dict[int, float]:
        """Nothing."""
        return {}

    def after_backward(self, layers: LayerSet) -> None:
        """Nothing to do."""

    def after_optimizer(self, layers: LayerSet) -> None:
        """Nothing to do."""
