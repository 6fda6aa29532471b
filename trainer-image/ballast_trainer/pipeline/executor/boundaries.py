"""Shapes and types of the tensors between stages, agreed once per pipeline."""

import dataclasses
from collections.abc import Callable, Mapping

import torch


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """One microbatch's activation between two stages.

    Attributes:
        shape, dtype: of the activation, and of its gradient.
        requires_grad: whether a gradient comes back; not below the first layer that is trained.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> "Boundary":
        """Of an activation."""
        return cls(shape=tuple(tensor.shape), dtype=tensor.dtype, requires_grad=tensor.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Room to receive it in."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)


def agree_on_boundaries(
    *,
    stages: int,
    stacks: Mapping[int, torch.nn.Module],
    example: torch.Tensor,
    device: torch.device,
    share: Callable[[int, Boundary | None], Boundary],
) -> tuple[Boundary, ...]:
    """The boundaries between ``stages`` stages, the same on every rank; collective.

    Each stage runs once on zeros of the shape that the one before returns.

    Args:
        stages: of the whole pipeline.
        stacks: the modules of the stages that this rank holds.
        example: one microbatch of inputs, for the first stage.
        device: where this rank computes.
        share: gives all ranks what the holder of a stage found, ``share(stage, found here)``.
    """
    boundaries: list[Boundary] = []
    for stage in range(stages - 1):
        found = None
        if stage in stacks:
            value = example
            if stage > 0:
                before = boundaries[-1]
                value = torch.zeros(before.shape, dtype=before.dtype, device=device)
                value.requires_grad_(before.requires_grad)
            found = Boundary.of(stacks[stage](value))
        boundaries.append(share(stage, found))
    return tuple(boundaries)
