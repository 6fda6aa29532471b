"""Shapes and types of the tensors between stages, agreed once per pipeline."""

import dataclasses

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

    def example(self) -> torch.Tensor:
        """A tensor of it without memory."""
        made = torch.empty(self.shape, dtype=self.dtype, device="meta")
        return made.requires_grad_(self.requires_grad)
