"""Results of earlier partitions' trials, so that the next move need not repeat them.

All ranks of the world take part in the same trials and record the same, so they decide alike from it.
"""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from ballast_policies.contract import Stage

from ballast_trainer.layers.boundaries import Boundary
from ballast_trainer.layers.layer import Layer

Shapes = tuple[tuple[int, ...], ...]
"""Of the tensors of a batch's inputs."""


@dataclasses.dataclass(frozen=True, slots=True)
class Findings:
    """What one rank has seen of the layers that it tried, by layer.

    Attributes:
        outputs: of layers that return a tensor.
        stateful: names of the modules whose buffers a forward changes.
    """

    outputs: Mapping[int, Boundary]
    stateful: Mapping[int, tuple[str, ...]]


class PartitionCache:
    """The cuts that have run, and what each layer would send to another stage."""

    def __init__(self) -> None:
        self._outputs: dict[int, Boundary] = {}
        self._stateful: dict[int, set[str]] = {}
        self._cuts: set[int] = set()
        self.shape: Shapes | None = None
        """Of the inputs that the trials have run; None: there is but one."""

    def of_inputs(self, shape: Shapes | None) -> None:
        """Trials from now on run inputs of this shape: what those of another have shown does not count."""
        if shape != self.shape:
            self.forget()
            self.shape = shape

    def forget(self) -> None:
        """The layers have changed."""
        self._outputs.clear()
        self._stateful.clear()
        self._cuts.clear()

    def add(self, stages: Sequence[Stage], found: Iterable[Findings]) -> None:
        """A partition was tried and works; ``found`` of all ranks."""
        if len({stage.rank for stage in stages}) == len(stages):
            # Several stages of one rank share its process: a cut between them separates nothing.
            self._cuts.update(stage.first_layer for stage in stages)
        for one in found:
            self._outputs.update(one.outputs)
            for layer, names in one.stateful.items():
                # Replicas must agree, even where their microbatches differ.
                self._stateful.setdefault(layer, set()).update(names)

    def boundaries(self, stages: Sequence[Stage]) -> tuple[Boundary, ...] | None:
        """Between the stages; None where a layer's output is not known."""
        ends = [stage.end_layer - 1 for stage in stages[:-1]]
        known = [self._outputs.get(end) for end in ends]
        return None if None in known else tuple(one for one in known if one is not None)

    def all_ran(self, stages: Sequence[Stage]) -> bool:
        """Whether every cut was part of a partition that worked, one stage a rank.

        Then no layer needs one of another stage: each cut has separated all layers before it from all behind.
        """
        ranks = {stage.rank for stage in stages}
        return len(ranks) == len(stages) and self._cuts.issuperset(stage.first_layer for stage in stages)

    def mark(self, layers: Iterable[Layer]) -> None:
        """Tell layers which of their modules have state."""
        for layer in layers:
            names = self._stateful.get(layer.index, set())
            layer.stateful = tuple(m for name, m in layer.module.named_modules() if name in names)
