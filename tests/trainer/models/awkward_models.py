"""Models with layers that are hard to cut: they return views, keep buffers, draw random numbers, fail."""

import dataclasses
import random
import warnings
from pathlib import Path

import numpy
import torch
from ballast_trainer.models.protocol import Model
from torch import nn

WIDTH = 16
LENGTH = 5000
"""Of the longest packed sequence: more than a tensor of sizes has with several dimensions."""


def batches(seed, step, size):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    inputs = torch.randn(size, WIDTH, generator=generator)
    return inputs, inputs.sum(1, keepdim=True)


class Shaped(nn.Module):
    """Returns a view of its input."""

    def __init__(self, *shape):
        super().__init__()
        self.shape = shape

    def forward(self, value):
        return value.view(len(value), *self.shape)


class Turned(nn.Module):
    """Returns a view that is not contiguous."""

    def forward(self, value):
        return value.transpose(1, 2)


class Doubling(nn.Module):
    """A linear layer as wide as its input, whatever that is."""

    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, value):
        return value + torch.tanh(self.linear(value))


def ending_in_views():
    """Every other layer ends in a view, one of them in no layer at all, one works in place."""
    layers = [
        lambda: Doubling(WIDTH),
        lambda: Shaped(4, 4),
        lambda: Doubling(4),
        Turned,
        lambda: nn.ReLU(inplace=True),
        lambda: Doubling(4),
        lambda: nn.Flatten(1),
        nn.Identity,
        lambda: nn.Linear(WIDTH, 1),
    ]
    return Model.from_layers(layers, loss=nn.functional.mse_loss, batch=batches)


class Wandering(nn.Module):
    """Draws from Python's and numpy's generators, as layer drop does."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, value):
        factor = random.random() + numpy.random.random() + torch.rand(()).item()
        return value + factor * torch.tanh(self.linear(value))


def drawing_everywhere(layers=4):
    """Every layer draws from all generators."""
    made = [*(Wandering for _ in range(layers - 1)), lambda: nn.Linear(WIDTH, 1)]
    return Model.from_layers(made, loss=nn.functional.mse_loss, batch=batches)


def with_batch_norm(layers=6, momentum=0.1):
    """Running statistics, beside a constant, in every layer but the last; a parameter that none uses."""

    def made():
        norm = nn.BatchNorm1d(WIDTH, momentum=momentum)
        norm.register_buffer("turn", torch.tensor([1 - 2j]).conj())
        layer = nn.Sequential(nn.Linear(WIDTH, WIDTH), norm, nn.ReLU())
        layer.register_parameter("idle", nn.Parameter(torch.ones(1)))
        return layer

    last = [lambda: nn.Linear(WIDTH, 1)]
    return Model.from_layers([made] * (layers - 1) + last, loss=nn.functional.mse_loss, batch=batches)


class Counting(nn.Module):
    """Counts its forwards in a buffer that is not persistent, by which it computes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("seen", torch.zeros(()), persistent=False)

    def forward(self, value):
        self.seen += 1
        return torch.tanh(self.linear(value)) * (1 + self.seen / 10)


def counting_forwards():
    return Model.from_layers([Counting, nn.Linear(WIDTH, 1)], loss=nn.functional.mse_loss, batch=batches)


def with_instance_norm(layers=6):
    """Running statistics of a norm that does not count its microbatches; an idle parameter."""

    def made():
        norm = nn.InstanceNorm1d(2, track_running_stats=True)
        layer = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.Unflatten(1, (2, -1)), norm, nn.Flatten(), nn.ReLU()
        )
        layer.register_parameter("idle", nn.Parameter(torch.ones(1)))
        return layer

    last = [lambda: nn.Linear(WIDTH, 1)]
    return Model.from_layers([made] * (layers - 1) + last, loss=nn.functional.mse_loss, batch=batches)


class Skipping(Doubling):
    """Is left out at random."""

    def forward(self, value):
        return super().forward(value) if torch.rand(()) < 0.5 else value


class Descending(Doubling):
    """Computes gradients of its input in its forward."""

    def forward(self, value):
        with torch.enable_grad():
            energy = torch.tanh(self.linear(value)).sum()
            return value - 0.1 * torch.autograd.grad(energy, value, create_graph=True)[0]


class Mapped(Doubling):
    """Computes one sample at a time, as torch.func has it."""

    def forward(self, value):
        return torch.func.vmap(super().forward)(value)


class Counted(Doubling):
    """Counts its forwards."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, value):
        self.seen += 1
        return super().forward(value) / self.seen


class Masked(Counted):
    """Counts its forwards, and reads a mask that all such layers share."""

    MASK = torch.ones(())

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("mask", self.MASK)

    def forward(self, value):
        return super().forward(value) * self.mask


class Listing(Doubling):
    """Counts its forwards in a buffer that it finds in a list."""

    def __init__(self, width):
        super().__init__(width)
        self.register_buffer("seen", torch.zeros(()))
        self.listed = [self.seen]

    def forward(self, value):
        self.listed[0] += 1
        return super().forward(value) / self.seen


class Referring(Counted):
    """Reads the buffer in which it counts by another attribute."""

    def __init__(self, width):
        super().__init__(width)
        vars(self)["counted"] = self.seen

    def forward(self, value):
        return super().forward(value) / self.counted


class Making(Doubling):
    """Makes a parameter in its first forward."""

    def forward(self, value):
        if not hasattr(self, "scale"):
            self.scale = nn.Parameter(torch.ones(()))
        return super().forward(value) * self.scale


class Remaking(Doubling):
    """Puts a new parameter, of the same value, in the place of its own in each forward."""

    def forward(self, value):
        self.linear.weight = nn.Parameter(self.linear.weight.detach().clone())
        return super().forward(value)


class Clipping(Doubling):
    """Clips what its weight's gradient has added up to."""

    def __init__(self, width):
        super().__init__(width)
        self.linear.weight.register_post_accumulate_grad_hook(self.clip)

    @staticmethod
    def clip(weight):
        weight.grad.clamp_(-0.1, 0.1)


class Quantized(Doubling):
    """Has weights of int8 that do not learn, and one without numbers."""

    def __init__(self, width):
        super().__init__(width)
        whole = torch.arange(width, dtype=torch.int8)
        self.whole = nn.Parameter(whole, requires_grad=False)
        self.none = nn.Parameter(torch.empty(0))

    def forward(self, value):
        return super().forward(value + 0.01 * self.whole)


class Normed(nn.Module):
    """Its weights, one of a single number, are computed before each forward, as before parametrizations."""

    def __init__(self, width):
        super().__init__()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.linear = nn.utils.weight_norm(nn.Linear(width, width))
            self.scale = nn.utils.weight_norm(nn.Linear(1, 1))

    def forward(self, value):
        return torch.tanh(self.linear(value)) + self.scale(value[:, :1])


class Packed(nn.Module):
    """Its output has sizes among its integers, as a ``PackedSequence``."""

    def forward(self, value):
        lengths = torch.tensor([LENGTH, *[2] * (len(value) - 1)])
        padded = nn.functional.pad(value.view(-1, 4, WIDTH // 4), (0, 0, 0, LENGTH - 4))
        return tuple(nn.utils.rnn.pack_padded_sequence(padded, lengths, batch_first=True))


class Unpacked(nn.Module):
    """Takes the output of Packed."""

    def forward(self, value):
        packed = nn.utils.rnn.PackedSequence(*value)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0][:, :4].flatten(1)


class Through(nn.Module):
    """Passes on what it takes."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, value):
        data, *sizes = value
        return (data * self.scale, *sizes)


def of_packed_sequences():
    layers = [nn.Linear(WIDTH, WIDTH), Packed(), Through(), Unpacked(), nn.Linear(WIDTH, 1)]
    return Model.from_layers(layers, loss=nn.functional.mse_loss, batch=batches)


class Clamped(Doubling):
    """Changes its weight in a forward, past autograd."""

    def forward(self, value):
        self.linear.weight.data.clamp_(-0.1, 0.1)
        return super().forward(value)


class Freezing(Doubling):
    """Chooses in a forward what learns."""

    def forward(self, value):
        self.linear.bias.requires_grad_(bool(value.sum() > 0))
        return super().forward(value)


class Bounded(Doubling):
    """Looks up rows of a bounded norm, which it changes in a forward."""

    def __init__(self, width):
        super().__init__(width)
        self.rows = nn.Embedding(2, width, max_norm=0.5)

    def forward(self, value):
        return super().forward(value + self.rows((value[:, 0] > 0).long()))


NOTED: list[torch.Tensor] = []


class Noting(Doubling):
    """Keeps what a loss may read, and forgets what it has noted before."""

    def forward(self, value):
        out = super().forward(value)
        NOTED[:] = [self.noted(out)]
        return out

    def noted(self, out):
        return out.square().mean()


class Watching(Noting):
    """Keeps it to look at."""

    def noted(self, out):
        return super().noted(out).detach()


class LookingUp(Doubling):
    """Looks rows up, whose gradient is sparse."""

    def __init__(self, width):
        super().__init__(width)
        self.rows = nn.Parameter(torch.ones(2, width))

    def forward(self, value):
        found = nn.functional.embedding((value[:, 0] > 0).long(), self.rows, sparse=True)
        return super().forward(value) + found


class Complex(Doubling):
    """Has a weight that is complex."""

    def __init__(self, width):
        super().__init__(width)
        self.turn = nn.Parameter(torch.ones(width, width, dtype=torch.cfloat))

    def forward(self, value):
        return super().forward(value) + (value.to(torch.cfloat) @ self.turn).real


def ragged(seed, step, size):
    inputs, targets = batches(seed, step, size)
    length = 1 + step % 3
    return inputs[:, None].repeat(1, length, 1), targets[:, None].repeat(1, length, 1)


def of_one_kind(kind, layers=5, batch=batches):
    """Layers of one of these classes, as modules."""
    made = [globals()[kind](WIDTH) for _ in range(layers - 2)]
    ends = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
    return Model.from_layers([ends[0], *made, ends[1]], loss=nn.functional.mse_loss, batch=batch)


def that_share_a_buffer():
    """Two layers count in one buffer."""
    first, second = Counted(WIDTH), Counted(WIDTH)
    second.seen = first.seen
    return Model.from_layers([first, second, nn.Linear(WIDTH, 1)], loss=nn.functional.mse_loss, batch=batches)


def that_share_a_bounded_weight():
    """Two layers look up rows of one weight, whose norms they bound."""
    first, second = Bounded(WIDTH), Bounded(WIDTH)
    second.rows.weight = first.rows.weight
    return Model.from_layers([first, second, nn.Linear(WIDTH, 1)], loss=nn.functional.mse_loss, batch=batches)


def of_a_loss_that_notes():
    """Its loss keeps what it has computed last."""

    def noted(output, targets):
        NOTED[:] = [nn.functional.mse_loss(output, targets)]
        return NOTED[0]

    return dataclasses.replace(of_one_kind("Doubling"), loss=noted)


class Averaging(nn.Module):
    """A loss over the moving average of those before."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.ones(()))

    def forward(self, output, target):
        self.mean = 0.9 * self.mean + 0.05
        return nn.functional.mse_loss(output, target) * self.mean


def of_a_loss_that_averages():
    return dataclasses.replace(of_one_kind("Doubling"), loss=Averaging())


def of_a_loss_of_two():
    """Its loss returns what it has scored, too."""

    def loss(output, targets):
        return nn.functional.mse_loss(output, targets), output

    return dataclasses.replace(of_one_kind("Doubling"), loss=loss)


def of_several_lengths():
    """Its own batches are not all of one shape."""
    return of_one_kind("Doubling", batch=ragged)


def own_adam(parameters, learning_rate):
    return torch.optim.Adam(parameters, learning_rate)


def adafactor(parameters, learning_rate):
    return torch.optim.Adafactor(parameters, learning_rate)


class Slow(nn.Module):
    """A layer of many products."""

    def __init__(self, rounds, *, needs_layer_0=False):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.rounds, self.needs_layer_0 = rounds, needs_layer_0

    def forward(self, value):
        if self.needs_layer_0 and not Layer0.was_here:
            raise LookupError("layer 0 is not in this process")
        for _ in range(self.rounds):
            value = value + torch.tanh(self.linear(value)) / self.rounds
        return value


class Layer0(Slow):
    """Leaves something behind in its process."""

    was_here = False

    def forward(self, value):
        Layer0.was_here = True
        return super().forward(value)


def with_a_cut_that_fails():
    """Two dear layers in front that cannot be parted; over two ranks, any balancer wants to part them."""
    layers = [
        lambda: Layer0(60),
        lambda: Slow(60, needs_layer_0=True),
        *(lambda: Slow(1) for _ in range(3)),
        lambda: nn.Linear(WIDTH, 1),
    ]
    return Model.from_layers(layers, loss=nn.functional.mse_loss, batch=batches)


class CountingHooks(nn.Module):
    """Writes down how many hooks the tensors carry from which its input comes, up to the leaf."""

    def __init__(self, log):
        super().__init__()
        self.linear, self.log = nn.Linear(WIDTH, WIDTH), log

    def forward(self, value):
        if value.requires_grad:
            with Path(self.log).open("a") as log:
                log.write(f"{_hooks(value)}\n")
        return value + torch.tanh(self.linear(value))


def _hooks(value):
    """Hooks on a tensor, or on the leaf that it is or was made of."""
    node = value.grad_fn
    while node is not None and node.next_functions and node.next_functions[0][0] is not None:
        node = node.next_functions[0][0]
    leaf = value if value.grad_fn is None else getattr(node, "variable", value)
    return len(leaf._backward_hooks or ())


def counting_hooks(log):
    """The layer that counts begins the second of two stages, and the first of no other."""
    layers = [
        *(lambda: Doubling(WIDTH) for _ in range(2)),
        lambda: CountingHooks(log),
        lambda: nn.Linear(WIDTH, 1),
    ]
    return Model.from_layers(layers, loss=nn.functional.mse_loss, batch=batches)


class Leaving(nn.Linear):
    """Ends the process at its forward, as if all were done."""

    def forward(self, value):
        raise SystemExit(0)


def that_leaves(where):
    """Ends the process ``where``: in the builder or in a layer."""
    if where == "builder":
        raise SystemExit(0)
    layers = [lambda: Leaving(WIDTH, WIDTH), lambda: nn.Linear(WIDTH, 1)]
    return Model.from_layers(layers, loss=nn.functional.mse_loss, batch=batches)
