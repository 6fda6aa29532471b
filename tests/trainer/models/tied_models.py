"""Users' models with tied weights, each as a builder that a configuration can name."""

import functools

import torch
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import load_callable
from torch import nn

WORDS, WIDTH, LENGTH = 12, 8, 6


def batch(seed, step, size):
    """Sequences of a few words, to be told again."""
    generator = torch.Generator().manual_seed(1000 * seed + step)
    words = torch.randint(0, WORDS, (size, LENGTH), generator=generator)
    return words, words.flip(1)


def loss(logits, targets):
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Mixing(nn.Module):
    """A residual block over positions and channels."""

    def __init__(self):
        super().__init__()
        self.over_words, self.inner = nn.Linear(LENGTH, LENGTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden):
        mixed = hidden + torch.tanh(self.over_words(hidden.transpose(1, 2)).transpose(1, 2))
        return mixed + torch.tanh(self.inner(mixed))


class Head(nn.Module):
    """Norm and output, with a weight that is given or made."""

    def __init__(self, weight=None):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.weight = nn.Parameter(torch.randn(WORDS, WIDTH)) if weight is None else weight

    def forward(self, hidden):
        return self.norm(hidden) @ self.weight.T


def modules():
    """Six modules, two lines of which tie the head to the embedding."""
    embedding, head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS, bias=False)
    head.weight = embedding.weight
    return [embedding, *(Mixing() for _ in range(4)), head]


def of_modules():
    return Model.from_layers(modules(), loss=loss, batch=batch)


def accuracy(logits, targets):
    return (logits.argmax(-1) == targets).float().mean()


def measured(**metrics):
    """With metrics of its own, by default the accuracy."""
    named = {name: load_callable("metric", path) for name, path in metrics.items()}
    return Model.from_layers(modules(), loss=loss, batch=batch, metrics=named or {"accuracy": accuracy})


def stated():
    """Every layer by itself; that they are tied is said."""
    functions = [functools.partial(nn.Embedding, WORDS, WIDTH), *[Mixing] * 4, Head]
    return Model.from_layers(functions, loss=loss, batch=batch, tied=[((0, "weight"), (5, "weight"))])


def by_closure():
    """Functions that refer to one embedding."""
    embedding = nn.Embedding(WORDS, WIDTH)
    return Model.from_layers(
        [lambda: embedding, *[Mixing] * 4, lambda: Head(embedding.weight)], loss=loss, batch=batch
    )


def by_cache():
    """Functions the first of which makes the embedding."""

    @functools.cache
    def embedding():
        return nn.Embedding(WORDS, WIDTH)

    return Model.from_layers(
        [embedding, *[Mixing] * 4, lambda: Head(embedding().weight)], loss=loss, batch=batch
    )


def module_and_function():
    """The embedding is a module, the head is made of it."""
    embedding = nn.Embedding(WORDS, WIDTH)
    return Model.from_layers(
        [embedding, *[Mixing] * 4, lambda: Head(embedding.weight)], loss=loss, batch=batch
    )


def one_block():
    """The same block four times, and a tied head: all layers share parameters."""
    embedding, block = nn.Embedding(WORDS, WIDTH), Mixing()
    return Model.from_layers(
        [embedding, block, block, block, block, Head(embedding.weight)], loss=loss, batch=batch
    )


BUILDERS = (of_modules, stated, by_closure, by_cache, module_and_function, one_block)


def batches():
    """The data alone, for models that bring none."""
    return batch


def in_words(output, targets):
    return "good"


def of_each_word(logits, targets):
    return logits.argmax(-1)
