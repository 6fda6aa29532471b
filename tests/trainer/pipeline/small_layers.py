"""Small layers in double precision, and their batches: what an executor computes is known to 1e-12."""

import typing

import torch
from torch import nn


class Curve(nn.Module):
    """A small nonlinear layer with a recurrent part, whose weights torch keeps in a list of its own."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.linear = nn.Linear(4, 4, dtype=torch.float64)
        self.cell = nn.GRU(4, 4, batch_first=True, dtype=torch.float64)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, value):
        return value + self.cell(torch.tanh(self.linear(value)))[0]


class Line(nn.Module):
    """A small nonlinear layer whose backward can be split."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first, self.second = (nn.Linear(4, 4, dtype=torch.float64) for _ in range(2))
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) / 2)

    def forward(self, value):
        return value + self.second(torch.tanh(self.first(value)))


class Carried(typing.NamedTuple):
    """What :class:`Carrying` hands on: of three tensors, one has no gradient; a constant."""

    hidden: torch.Tensor
    skips: dict
    mask: torch.Tensor
    factor: int = 2


class Carrying(Line):
    """A small layer that hands on a tree; the first one takes a tensor."""

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            value = Carried(value, {"first": super().forward(value)}, value[..., :1] > 0)
        hidden = super().forward(value.hidden) + value.factor * value.mask * value.skips["first"]
        return value._replace(hidden=hidden)


def curve_batch(step):
    generator = torch.Generator().manual_seed(step)
    inputs, targets = torch.randn(2, 8, 3, 4, generator=generator, dtype=torch.float64)
    return inputs, targets
