"""Figures of a layer's weights and gradients, of the whole layer also where a tensor group has cut it.

Each rank of the group computes its part of a figure; the sum over the group is the figure of one process.
A parameter that all ranks hold whole counts on the first of them.
"""

from collections.abc import Iterator

import torch
from torch import nn

from ballast_trainer.layers.layer import Layer
from ballast_trainer.layers.slicing import Slicing, axis_of, slicings
from ballast_trainer.seeding import mixed_key

SKETCH = 256
"""Numbers that stand for all weights of a layer; distances come out to about 6 % (Johnson-Lindenstrauss)."""


def squared_gradients(module: nn.Module) -> float | None:
    """This rank's part of the squared norm of a layer's gradients; None where it has none."""
    gradients = [p.grad for p, _, counts in _parts(module) if p.grad is not None and counts]
    if not gradients:
        return None
    return float(torch.stack(torch._foreach_norm(gradients)).double().square().sum())


def sketch(layer: Layer) -> torch.Tensor:
    """This rank's part of a layer's weights added up with random signs, float64, shape (SKETCH,)."""
    total = torch.zeros(SKETCH, dtype=torch.float64)
    axis = axis_of(layer.module)
    for number, (parameter, slicing, counts) in enumerate(_parts(layer.module)):
        if not counts:
            continue
        part = parameter.detach().cpu().double()
        if slicing is not None:
            # In its place in the whole parameter, whose signs are those of one process.
            part = slicing.whole(
                [part if at == axis.index else part.new_zeros(()).expand_as(part) for at in range(axis.size)]
            )
        flat = part.reshape(-1)
        generator = torch.Generator().manual_seed(mixed_key(layer.index, number) >> 1)
        signs = torch.randint(0, 2, flat.shape, generator=generator, dtype=torch.int8) * 2 - 1
        signed = nn.functional.pad(flat * signs, (0, -len(flat) % SKETCH))
        total += signed.view(-1, SKETCH).sum(0)
    return total


def is_cut(module: nn.Module) -> bool:
    """Whether this rank holds a part of the layer."""
    return bool(slicings(module))


def _parts(module: nn.Module) -> Iterator[tuple[nn.Parameter, Slicing | None, bool]]:
    """Parameters, how each is cut, and whether this rank counts it."""
    cut, first = slicings(module), axis_of(module).index == 0
    for name, parameter in module.named_parameters():
        yield parameter, cut.get(name), first or name in cut
