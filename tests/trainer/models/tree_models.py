"""Models whose layers hand on more than one tensor, each as a builder that a configuration can name."""

import dataclasses
import functools
import typing

import torch
from ballast_trainer.dynamics.block_change import with_side_loss
from ballast_trainer.models.loss_weights import counted_targets
from ballast_trainer.models.protocol import Model
from torch import nn
from torch.nn import functional

WORDS, WIDTH, LENGTH = 16, 8, 6


def words(seed, step, size):
    """Sequences of words that end in zeros (padding) of a random number, to be told again."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    inputs = torch.randint(1, WORDS, (size, LENGTH), generator=generator)
    lengths = torch.randint(2, LENGTH + 1, (size, 1), generator=generator)
    kept = torch.arange(LENGTH)[None] < lengths
    return inputs * kept, torch.where(kept, inputs.flip(1) % WORDS, -100)


def word_loss(logits, targets):
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Start(nn.Module):
    """Words -> (hidden, mask, positions): two of three have no gradient."""

    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)

    def forward(self, value):
        positions = torch.arange(value.shape[1], device=value.device).expand_as(value)
        return self.words(value), (value != 0)[:, None, None, :], positions


class Masked(nn.Module):
    """Attention that leaves padding out, with positions of its own and dropout."""

    def __init__(self):
        super().__init__()
        self.places, self.qkv = nn.Embedding(LENGTH, WIDTH), nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        hidden, mask, positions = value
        size, length = positions.shape
        given = hidden + self.places(positions)
        q, k, v = self.qkv(given).view(size, length, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        mixed = self.out(mixed.transpose(1, 2).reshape(size, length, WIDTH))
        return hidden + functional.dropout(mixed, 0.1, self.training), mask, positions


class End(nn.Linear):
    def __init__(self):
        super().__init__(WIDTH, WORDS)

    def forward(self, value):
        return super().forward(value[0] if isinstance(value, tuple) else value)


def masked():
    layers = [Start(), *(Masked() for _ in range(4)), End()]
    return Model.from_layers(layers, loss=word_loss, batch=words, loss_weight=counted_targets)


def numbers(seed, step, size):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, inputs.cumsum(1)


class Down(nn.Linear):
    """One level down a U-Net: what comes in is kept for the way up."""

    def forward(self, value):
        if isinstance(value, torch.Tensor):
            value = {"hidden": value, "skips": []}
        lower = torch.tanh(super().forward(value["hidden"]))
        return {"hidden": lower, "skips": [*value["skips"], lower]}


class Up(nn.Linear):
    def forward(self, value):
        *skips, last = value["skips"]
        return {"hidden": torch.tanh(super().forward(value["hidden"])) + last, "skips": skips}


class Out(nn.Linear):
    def forward(self, value):
        return super().forward(value["hidden"])


def unet():
    layers = [*(Down(WIDTH, WIDTH) for _ in range(3)), *(Up(WIDTH, WIDTH) for _ in range(3))]
    return Model.from_layers([*layers, Out(WIDTH, WIDTH)], loss=functional.mse_loss, batch=numbers)


class Shape(typing.NamedTuple):
    groups: int
    name: str


@dataclasses.dataclass(frozen=True)
class Carried:
    """Packed sequences: hidden states, the document of each position, and what is known beforehand."""

    hidden: torch.Tensor
    documents: torch.Tensor
    shape: Shape
    cache: None = None
    rates: dict = dataclasses.field(default_factory=dict)


class Pack(nn.Module):
    def __init__(self):
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.rates = nn.Parameter(torch.ones(1))

    def forward(self, value):
        rates = {"first": self.rates * 1, "kept": torch.full((1,), 0.5, dtype=torch.complex64)}
        return Carried(self.words(value), (value == 1).cumsum(1), Shape(2, "pairs"), rates=rates)


class Within(nn.Linear):
    """Means within documents; the rate that the first layer has learnt is used in all; a loss of its own."""

    def forward(self, value):
        same = value.documents[:, :, None] == value.documents[:, None, :]
        mean = same.float() @ value.hidden / same.sum(-1, keepdim=True)
        added = torch.tanh(super().forward(mean)) * value.rates["first"] * value.rates["kept"].real
        if self.training:
            added = with_side_loss(added, 0.1 * added.square().mean())
        return dataclasses.replace(value, hidden=value.hidden + added / value.shape.groups)


class Unpack(nn.Linear):
    def forward(self, value):
        return {"logits": super().forward(value.hidden), "hidden": value.hidden}


def packed_loss(output, targets):
    return word_loss(output["logits"], targets) + 0.01 * output["hidden"].square().mean()


def packed():
    layers = [Pack(), *(Within(WIDTH, WIDTH) for _ in range(4)), Unpack(WIDTH, WORDS)]
    metrics = {"largest": lambda output, targets: output["hidden"].abs().max()}
    return Model.from_layers(layers, loss=packed_loss, batch=words, metrics=metrics)


class Weighted(nn.Module):
    """Two losses, weighted by what each is uncertain of (Kendall et al. 2018, equation 10)."""

    def __init__(self):
        super().__init__()
        self.logs = nn.Parameter(torch.tensor([0.5, -0.5]))

    def forward(self, output, targets):
        losses = torch.stack([functional.mse_loss(output, targets), functional.l1_loss(output, targets)])
        return (losses * torch.exp(-self.logs) + self.logs).sum()


def weighted_parts():
    """Layers and a loss that learns."""
    return [
        *(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(5)),
        nn.Linear(WIDTH, WIDTH),
    ], Weighted()


def weighted(functions=False):
    layers, loss = weighted_parts()
    if functions:
        layers[-1] = functools.partial(nn.Linear, WIDTH, WIDTH)
    metrics = {"largest": lambda output, targets: output.abs().max()}
    return Model.from_layers(layers, loss=loss, batch=numbers, metrics=metrics)


class Clipping(nn.Linear):
    """Clips the gradients of its output, as recurrent layers do; its first forward makes a buffer."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        self.register_buffer("places", None)

    def forward(self, value):
        if self.places is None:
            self.places = torch.arange(WIDTH) / WIDTH
        out = torch.tanh(super().forward(value + self.places))
        if out.requires_grad:
            out.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
        return out


def clipped():
    """Layers whose gradients depend on how large they are on their way."""
    layers = [*(Clipping() for _ in range(4)), nn.Linear(WIDTH, WIDTH)]
    return Model.from_layers(layers, loss=functional.mse_loss, batch=numbers)


def data_of(name):
    """The batches that a model brings."""
    return {"masked": words, "packed": words, "unet": numbers, "weighted": numbers, "clipped": numbers}[name]
