"""The microbatch that this rank's layers compute right now, its step and its targets.

Set by the stack of layers around each layer's forward; a dynamic case inside a layer reads it.  Outside of a
step's own microbatches (a trial of a plan) there is none.
"""

import dataclasses
from collections.abc import Callable

import torch


@dataclasses.dataclass(slots=True)
class Running:
    """This rank's forward; ``microbatch`` is None in a trial; ``targets_of``: a step, by microbatch.

    ``loss_scale``: factor on the model's loss in the step (fp16); ``loss_share``: on a microbatch's loss in
    that of its update, over all replicas.
    """

    step: int = 0
    microbatch: int | None = None
    targets_of: Callable[[int], tuple[torch.Tensor, ...]] | None = None
    loss_scale: float = 1.0
    loss_share: float = 1.0

    def set(self, step: int, microbatch: int | None) -> None:
        """A forward begins."""
        self.step, self.microbatch = step, microbatch

    def targets(self) -> torch.Tensor | None:
        """The targets of the microbatch that runs; None where there is none."""
        if self.microbatch is None or self.targets_of is None:
            return None
        return self.targets_of(self.step)[self.microbatch]


CURRENT_FORWARD = Running()
"""Forward of this process, whose ranks compute one at a time."""
