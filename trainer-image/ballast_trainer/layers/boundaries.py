"""Shapes and types of what goes from stage to stage, agreed once per pipeline."""

import dataclasses
import pickle
from collections.abc import Sequence

import torch

from ballast_trainer.trees import Structure, Tree, flatten, unflatten

_SIZES = (torch.int64, torch.int32)
_MOST_RUNS = 4096
"""Runs of equal numbers in a tensor of sizes: the ``batch_sizes`` of a PackedSequence have no more of them
than it has sequences, however long these are. Every rank has those of all layers."""
_SENT_AS_THEY_ARE = frozenset(
    {torch.float32, torch.float64, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Sent:
    """A tensor of a message.

    Attributes:
        shape: of it.
        dtype: of it.
        requires_grad: a gradient comes back, not below the first trained layer.
        integers: an example of its values, which the next stage may take for sizes, as numbers and how often
            each is repeated; None: zeros will do.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool
    integers: tuple[torch.Tensor, torch.Tensor] | None = dataclasses.field(
        default=None, compare=False, repr=False
    )

    @classmethod
    def of(cls, tensor: torch.Tensor, *, example: bool = False) -> "Sent":
        """Form of such a tensor; ``example``: with its values, where they are few integers."""
        integers = None
        if example and tensor.dtype in _SIZES and not tensor.is_meta:
            numbers, lengths = torch.unique_consecutive(tensor.flatten(), return_counts=True)
            if len(numbers) <= _MOST_RUNS:
                # Copies: the memory of these is as large as the tensor's.
                integers = numbers.cpu().clone(), lengths.cpu().clone()
        return cls(tuple(tensor.shape), tensor.dtype, tensor.requires_grad, integers)

    def example(self, device: torch.device) -> torch.Tensor:
        """Example of such a tensor: of its integers, or of zeros."""
        if self.integers is not None:
            return torch.repeat_interleave(*self.integers).view(self.shape).to(device)
        zeros = torch.zeros(self.shape, dtype=self.dtype, device=device)
        return zeros.requires_grad_(self.requires_grad)

    def empty(self, device: torch.device) -> torch.Tensor:
        """Room to receive it in."""
        return torch.empty(self.shape, dtype=self.dtype, device=device)

    def __str__(self) -> str:
        """Name in messages."""
        return f"{self.dtype} {list(self.shape)}"


@dataclasses.dataclass(frozen=True, slots=True)
class Boundary:
    """A microbatch's activations between two stages: a tree, or where ``structure`` is None one tensor."""

    tensors: tuple[Sent, ...]
    structure: Structure = None

    @classmethod
    def of(cls, value: Tree, *, examples: bool = False) -> "Boundary":
        """Boundary of activations, with ``examples`` of sizes.

        Raises:
            TypeError: another rank could not make the same tree.
        """
        tensors, structure = flatten(value)
        if structure is not None:
            try:
                pickle.dumps(structure)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise TypeError(
                    f"{type(value).__name__} cannot go to another rank: {error}. To fix: define the "
                    "classes of what layers return at the top of a module"
                ) from None
        return cls(tuple(Sent.of(tensor, example=examples) for tensor in tensors), structure)

    @property
    def requires_grad(self) -> bool:
        """True if any gradient comes back."""
        return any(sent.requires_grad for sent in self.tensors)

    def travelling(self, *, backward: bool) -> list[Sent]:
        """The tensors of a message, or of the message back."""
        return [sent for sent in self.tensors if sent.requires_grad or not backward]

    def example(self, device: torch.device) -> Tree:
        """A tree in its form; on the meta device without memory."""
        return unflatten(self.structure, (sent.example(device) for sent in self.tensors))

    def takes(self, tensors: Sequence[torch.Tensor], structure: Structure) -> bool:
        """True if these fit the buffers that the next stage has for them."""
        return structure == self.structure and all(
            tuple(tensor.shape) == sent.shape and tensor.dtype == sent.dtype
            for tensor, sent in zip(tensors, self.tensors, strict=True)
        )

    def __str__(self) -> str:
        """Name in messages."""
        return ", ".join(map(str, self.tensors))


def wire(tensor: torch.Tensor) -> torch.Tensor:
    """A contiguous tensor as it is sent or received: bytes, of types that a backend may not know."""
    return tensor if tensor.dtype in _SENT_AS_THEY_ARE else tensor.view(-1).view(torch.uint8)
