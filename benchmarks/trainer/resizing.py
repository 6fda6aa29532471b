"""The accuracy that resizing costs, by gamma, selection and imputation (SEMI-migration, figures 3, 5 to 8).

    python benchmarks/trainer/resizing.py

Four tensor ranks share a small model of text, all in one process: each has a quarter of every block's hidden
units, and leaves out columns of its products by the trainer's own product and choice.  The next byte of
other windows is predicted with nothing left out.  The paper trains vision transformers on CIFAR-10 for 150
epochs.
"""

import itertools
import statistics

import click
import numpy as np
import torch
from ballast_lab.comparison import Comparison, Point
from ballast_policies.contract.job.pipeline import StragglersConfig
from ballast_trainer.data.corpus import VOCABULARY, text_batch
from ballast_trainer.tensor_parallel.product import ColumnSelection, GemmTimer, product
from ballast_trainer.tensor_parallel.straggler_mitigation import ColumnImportance
from dynamic_models.stragglers_in_groups import fitted_costs
from torch import nn
from torch.nn import functional

RANKS, CONTEXT, WIDTH, HIDDEN, BLOCKS, BATCH = 4, 16, 256, 512, 2, 128
STEPS, EPOCH, SEEDS = 200, 20, (0, 1)
GAMMAS = (0.25, 0.5, 0.9)


class Map(nn.Linear):
    """A product of one rank."""

    matrix = property(lambda self: self.weight)


class Share(nn.Module):
    """One rank's hidden units of a block, of whose products it may leave columns out."""

    def __init__(self, config, seed):
        super().__init__()
        self.linears = nn.ModuleList((Map(WIDTH, HIDDEN // RANKS), Map(HIDDEN // RANKS, WIDTH)))
        self.config, self.clock = config, GemmTimer(torch.device("cpu"))
        self.choices = [ColumnImportance(each, config, seed + k) for k, each in enumerate(self.linears)]
        self.selections = [None, None]

    def choose(self, gamma):
        """Leave out the part ``gamma`` of the columns of both products from now on."""
        before, self.selections = self.selections, []
        for choice, linear, last in zip(self.choices, self.linears, before, strict=True):
            choice.end_epoch()
            columns = linear.weight.shape[1]
            self.selections.append(
                ColumnSelection(
                    columns=columns,
                    kept=torch.as_tensor(choice.choose(gamma, columns)),
                    imputation=self.config.imputation,
                    last={} if last is None else last.last,
                )
            )

    def forward(self, value):
        """This rank's part of the block's output."""
        inner, outer = (
            (linear, selection if self.training else None)
            for linear, selection in zip(self.linears, self.selections, strict=True)
        )
        hidden = functional.gelu(self.part(value, *inner))
        return self.part(hidden, *outer)

    def part(self, value, linear, selection):
        """A product without the columns that are left out."""
        return product(value, linear.weight, linear.bias, selection=selection, clock=self.clock)


def accuracy(gamma, *, late=RANKS, selection="priority", imputation="zero"):
    """Part of the next bytes predicted, mean of the seeds, where ``late`` ranks leave out ``gamma``."""
    found = []
    for seed in SEEDS:
        torch.manual_seed(seed)
        config = StragglersConfig.model_validate(
            {"policy": "resize", "selection": selection, "imputation": imputation}, strict=False
        )
        embedding, head = nn.Embedding(VOCABULARY, WIDTH // CONTEXT), nn.Linear(WIDTH, VOCABULARY)
        norms = nn.ModuleList(nn.LayerNorm(WIDTH) for _ in range(BLOCKS))
        blocks = nn.ModuleList(
            nn.ModuleList(Share(config, 10 * seed + rank) for rank in range(RANKS)) for _ in range(BLOCKS)
        )
        model = nn.ModuleList((embedding, norms, blocks, head))
        optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)

        def predicted(inputs, embedding=embedding, norms=norms, blocks=blocks, head=head):
            value = embedding(inputs).flatten(1)
            for norm, ranks in zip(norms, blocks, strict=True):
                normal = norm(value)
                value = value + sum(rank(normal) for rank in ranks)
            return head(value)

        for step in range(STEPS):
            if gamma and step and step % EPOCH == 0:
                for ranks in blocks:
                    for rank in ranks[:late]:
                        rank.choose(gamma)
            inputs, targets = text_batch(seed, step, BATCH, CONTEXT)
            optimizer.zero_grad()
            functional.cross_entropy(predicted(inputs), targets[:, -1]).backward()
            optimizer.step()
        model.eval()
        with torch.no_grad():
            inputs, targets = text_batch(987, 0, 8192, CONTEXT)
            found.append(float((predicted(inputs).argmax(-1) == targets[:, -1]).float().mean()))
    return statistics.mean(found)


def more(what, published, ours):
    """A difference of accuracies in percent that has to be above 0."""
    return Point(what, published, 100 * ours, low=0.01, high=100.0)


def imputations():
    """Figure 3: gamma 1/2 on one late rank."""
    same, zero, average = (accuracy(0.5, late=1, imputation=kind) for kind in ("same", "zero", "average"))
    return Comparison(
        (
            more("same less zero", "same is the best", same - zero),
            more("zero less average", "more", zero - average),
        )
    )


def homogeneous():
    """Figures 5 and 6: all ranks leave out gamma; and the seconds of a step by the costs of table I."""
    whole = accuracy(0)
    priority, random = ([accuracy(g, selection=kind) for g in GAMMAS] for kind in ("priority", "random"))
    *_, products = fitted_costs()
    points = [
        more(f"{kind}, lost more with gamma {b} than with {a}", "more", first - second)
        for kind, values in (("priority", priority), ("random", random))
        for (a, first), (b, second) in itertools.pairwise(zip(GAMMAS, values, strict=True))
    ]
    points.append(more("lost with gamma 0.9, random", "more", whole - random[-1]))
    points.append(more("priority less random, gamma 0.9", "up to 18", priority[-1] - random[-1]))
    faster = 100 * np.clip(products / 2 / 373, 0, 1)
    points.append(Point("faster at gamma 0.5, percent", "up to 23.5", float(faster), low=18.5, high=23.5))
    return Comparison(tuple(points))


def one_late():
    """Figures 7 and 8: one late rank of four leaves out gamma, against all of them."""
    return Comparison(
        tuple(
            more(f"gamma {g}, one rank less all of them", "less is lost", accuracy(g, late=1) - accuracy(g))
            for g in GAMMAS
        )
    )


@click.command(help=__doc__)
def main():
    for figure in (imputations, homogeneous, one_late):
        click.echo(figure())


if __name__ == "__main__":
    main()
