"""A module as a user brings it: model, data and optimizers; tests copy it beside their configurations."""

import os
from pathlib import Path

import torch
from ballast_trainer.models.protocol import Model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


def regression(*, layers=6, width=16, dropout=0.1):
    hidden = [
        nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Dropout(dropout)) for _ in range(layers - 1)
    ]
    return Model.from_layers([*hidden, nn.Linear(width, 1)], loss=nn.functional.mse_loss)


class Recorded:
    """A dataset that notes which samples this process has asked for, and when."""

    def __init__(self, notes, length=40, width=16):
        self.notes = Path(notes)
        self.inputs = torch.randn(length, width, generator=torch.Generator().manual_seed(5))

    def __len__(self):
        return len(self.inputs)

    def __getitem__(self, index):
        with (self.notes / f"{os.getpid()}.log").open("a") as log:
            log.write(f"{index}\n")
        return self.inputs[index], self.inputs[index].sum().reshape(1)


def loader(size):
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(40, 16, generator=generator)
    data = TensorDataset(inputs, inputs.sum(1, keepdim=True))
    return DataLoader(data, batch_size=size, shuffle=True, drop_last=True)


class CountingMomentum(torch.optim.Optimizer):
    """Momentum that grows with a step count kept as a plain number."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                state["count"] = state.get("count", 0) + 1
                momentum = state.setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(1 - 1 / (1 + state["count"])).add_(parameter.grad)
                parameter.sub_(momentum, alpha=group["lr"])


class CountingInGroups(CountingMomentum):
    def step(self):
        super().step()
        for group in self.param_groups:
            group["rounds"] = group.get("rounds", 0) + 1


def unequal(samples, fewer):
    """Fewer samples on the second rank."""
    generator = torch.Generator().manual_seed(5)
    inputs = torch.randn(samples - fewer * int(os.environ.get("RANK", "0")), 16, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))
