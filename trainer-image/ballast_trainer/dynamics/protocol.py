"""The interface of a dynamic case: a change of the model while it trains.

A change is a pure function of the step and of the layers' tensors, so that it is the same under
every partition and after every restart; any further state travels as buffers of the
layer.  Activations between layers keep their shape, since stages exchange them by fixed shapes.
"""

from collections.abc import Mapping
from typing import Any

from torch import nn

from ballast_trainer.distributed.process_group import World
from ballast_trainer.layers.layer import LayerSet


class Dynamic:
    """One kind of change, and what most kinds do: nothing.

    Attributes:
        kind: its name in the configuration; set as it is built.
        needs_rebuild: whether a change of it alters which gradients stages exchange.
        measures: name of the event of the figures that it measures; None: none.
        order: changes with a lower one prepare a layer first: wrappers of whole blocks come last.
        every_layer_between: all layers between the first and the last have to be changed, not some.
    """

    kind = ""
    needs_rebuild = False
    measures: str | None = None
    order = 0
    every_layer_between = False

    def lacks(self, index: int, module: nn.Module) -> str:
        """Property that the change needs and a layer lacks, as text after "has"; empty: it is changed."""
        return ""

    def without_effect(self, total_steps: int) -> str:
        """Reason that its settings change nothing in a job of so many steps; empty: they do."""
        return ""

    def prepare(self, index: int, module: nn.Module) -> nn.Module:
        """Make a newly built layer able to change; returns the module to use."""
        return module

    def resumed(self, step: int, layers: LayerSet, world: World) -> None:
        """Called once as the job starts or resumes at ``step``, after :meth:`reapply`; collective."""

    def reapply(self, step: int, layers: LayerSet) -> None:
        """Reapply the changes before ``step`` to layers that were built, received or loaded."""

    def apply(self, step: int, layers: LayerSet, world: World) -> bool:
        """Carry out the changes due before ``step``; collective. Returns whether layers' costs changed."""
        raise NotImplementedError

    def measured(self, layers: LayerSet) -> dict[str, dict[int, Any]]:
        """Its newest figures by name and layer, of the layers held; ``layers`` is the main one."""
        return {}

    def idle(self, figures: Mapping[str, Mapping[int, Any]]) -> str:
        """Reason that it changes nothing by the newest figures of all layers, as text; empty: it does."""
        return ""

    def after_backward(self, layers: LayerSet) -> None:
        """Called when a step's gradients are complete, before their norm is taken."""

    def after_optimizer(self, layers: LayerSet) -> None:
        """Called after each optimizer step, before the next forward."""


def is_built_in(dynamic: Dynamic) -> bool:
    """True if it is one of this package's, whose changes of a layer read nothing of other layers."""
    return type(dynamic).__module__.startswith(__name__.partition(".")[0] + ".")


def gathered(own: dict[str, dict[int, Any]], world: World) -> dict[str, dict[int, Any]]:
    """Figures by name and layer, of all ranks; collective."""
    figures: dict[str, dict[int, Any]] = {}
    for part in world.gather(own):
        for name, values in part.items():
            figures.setdefault(name, {}).update(values)
    return {name: dict(sorted(values.items())) for name, values in figures.items()}
