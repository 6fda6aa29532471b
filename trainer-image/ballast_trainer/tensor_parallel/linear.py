"""Linear layers cut over the ranks of a tensor group: by output features, and by input features.

Both take over a whole ``nn.Linear`` and keep this rank's part, so that any number of ranks starts
with the same model.
"""

import torch
from torch import nn

from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.slicing import SlicedModule, Slicing


class SlicedLinear(SlicedModule):
    """A part of a linear layer; the products and the communication are the pair's."""

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, whole: nn.Linear, axis: Axis, slicings: dict[str, Slicing]) -> None:
        super().__init__()
        self.axis, self.slicings = axis, slicings
        for name, parameter in whole.named_parameters():
            held = parameter.detach()
            if name in slicings:
                held = slicings[name].part(held, axis.index, axis.size)
            setattr(self, name, nn.Parameter(held.clone(), requires_grad=parameter.requires_grad))
        if whole.bias is None:
            self.bias = None


class ColumnLinear(SlicedLinear):
    """Each rank makes some of the output features: weight [out / t, in], bias [out / t]."""

    def __init__(self, whole: nn.Linear, axis: Axis, *, blocks: int = 1) -> None:
        """Take this rank's output features.

        Args:
            whole: the layer to cut.
            axis: the tensor group.
            blocks: see :class:`Slicing`; 3 for query, key and value.

        Raises:
            ValueError: the features do not divide.
        """
        slicing = Slicing(dim=0, blocks=blocks)
        super().__init__(whole, axis, {"weight": slicing, "bias": slicing})


class RowLinear(SlicedLinear):
    """Each rank takes some of the input features: weight [out, in / t]; the bias is whole, added once."""

    def __init__(self, whole: nn.Linear, axis: Axis) -> None:
        """Take this rank's input features.

        Raises:
            ValueError: the features do not divide.
        """
        super().__init__(whole, axis, {"weight": Slicing(dim=1)})


def add_bias(summed: torch.Tensor, linear: RowLinear) -> torch.Tensor:
    """The bias of a row-cut layer, after the ranks' parts are summed."""
    return summed if linear.bias is None else summed + linear.bias
