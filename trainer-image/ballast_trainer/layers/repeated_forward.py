"""A layer that keeps only its input, and repeats its forward once for a microbatch's backward.

What the repeat has computed is kept until autograd has no more use for it: of an undivided backward,
until each operation's backward is done; of one in two halves, from the input's half, which repeats, to the
weights' half, as without repeats.  ``torch.utils.checkpoint`` repeats in each call of autograd instead: of a
split backward in the input's half and once more for each group of weights.
"""

import weakref
from collections.abc import Callable

import torch

from ballast_trainer.trees import Tree, mapped, tensors_of


def forward_to_repeat(
    run: Callable[[Tree], Tree],
    again: Callable[[Tree], Tree],
    value: Tree,
    count: Callable[[list[torch.Tensor]], None] | None = None,
) -> Tree:
    """``run(value)``, whose graph keeps ``value`` alone until the backward needs more.

    Args:
        run: the layer.
        again: the layer once more, with the same results; called in the backward, at most once.
        value: its input.
        count: is told the tensors that the repeat keeps; None: they are not counted.

    Raises:
        RuntimeError: in the backward: ``run`` has changed its input, or ``again`` keeps other tensors.
    """
    repeat = _Repeat(again, value, count)
    with torch.autograd.graph.saved_tensors_hooks(repeat.pack, repeat.unpack):
        return run(value)


class _Place:
    """Where autograd finds a tensor that it has saved; empty until the forward is repeated."""

    __slots__ = ("__weakref__", "tensor")

    def __init__(self) -> None:
        self.tensor: torch.Tensor | None = None


class _AllRepeatedError(BaseException):
    """Ends a repeat once nothing that is missing follows; no layer's ``except Exception`` takes it."""


class _Repeat:
    """The saved tensors of one forward: the graph holds their places, and each place its tensor."""

    def __init__(
        self,
        again: Callable[[Tree], Tree],
        value: Tree,
        count: Callable[[list[torch.Tensor]], None] | None,
    ) -> None:
        self._again, self._value, self._count = again, value, count
        self._versions = [tensor._version for tensor in tensors_of(value)]
        self._places: list[weakref.ref[_Place]] = []
        self._kinds: list[tuple[torch.Size, torch.dtype]] = []

    def pack(self, tensor: torch.Tensor) -> _Place:
        """A place for what autograd saves."""
        place = _Place()
        self._places.append(weakref.ref(place))
        self._kinds.append((tensor.shape, tensor.dtype))
        return place

    def unpack(self, place: _Place) -> torch.Tensor:
        """The tensor of a place, after a repeat if it has none."""
        if place.tensor is None:
            self._fill()
        assert place.tensor is not None
        return place.tensor

    def _fill(self) -> None:
        value = self._value
        if [tensor._version for tensor in tensors_of(value)] != self._versions:
            raise RuntimeError(
                "training.recompute repeats a layer's forward from its input, but the layer has changed its "
                "input in place. To fix: let it compute a new tensor, or set training.recompute: false"
            )
        filled = 0

        def fill(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal filled
            kind = (tensor.shape, tensor.dtype)
            if filled == len(self._places) or kind != self._kinds[filled]:
                raise RuntimeError(_other(f"tensor {filled + 1} that it keeps is {_named(*kind)}"))
            place = self._places[filled]()
            # An output that knows the node that keeps it would be a cycle.
            tensor = tensor.detach()
            if place is not None:
                place.tensor = tensor
            filled += 1
            if filled == len(self._places):
                raise _AllRepeatedError
            return tensor

        try:
            with torch.enable_grad(), torch.autograd.graph.saved_tensors_hooks(fill, lambda kept: kept):
                self._again(mapped(_leaf, value))
        except _AllRepeatedError:
            if self._count is not None:
                found = [place.tensor for place in (each() for each in self._places) if place is not None]
                self._count([tensor for tensor in found if tensor is not None])
            return
        raise RuntimeError(_other(f"it keeps {filled} tensors, at first {len(self._places)}"))


def _leaf(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _named(shape: torch.Size, kind: torch.dtype) -> str:
    return f"{str(kind).removeprefix('torch.')}{list(shape)}"


def _other(reason: str) -> str:
    return (
        f"a layer's forward is not the same when it is repeated for the backward: {reason}. "
        "To fix: let it depend on its input, its weights and torch's random numbers alone, "
        "or set training.recompute: false"
    )
