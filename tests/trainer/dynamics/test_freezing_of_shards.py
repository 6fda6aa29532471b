"""A criterion of freezing looks at whole layers, also where a tensor group has cut them."""

import pytest
import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, FreezingCriterion, FreezingSettings
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.distributed.mesh import Mesh
from ballast_trainer.distributed.process_group import World
from ballast_trainer.dynamics.freezing import Freezing
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.slicing import slicings
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.tensor_parallel.layers import split_layer

from tests.support.examples import first_daily
from tests.trainer.tensor_parallel.ranks import on_ranks

CPU = torch.device("cpu")
LAYERS = 4


def held(dynamic, world):
    """All layers, cut over the world's tensor group, with the weights of one process."""
    model = build_gpt(layers=LAYERS, dim=16, heads=2, context=8, dropout=0.0)
    layers = LayerSet(
        model,
        TrainingConfig(seed=0),
        CPU,
        lambda index, module: dynamic.prepare(index, split_layer(module, world.tensor)),
    )
    layers.hold(layers.make(index) for index in range(LAYERS))
    return layers


def figures(world, criterion, steps):
    """Figures and frozen layers by look: part of a layer's heads and units settles, the rest does not."""
    settings = FreezingSettings(criterion=FreezingCriterion(criterion), threshold=0.3, patience=1)
    dynamic = Freezing(DynamicConfig(kind="freezing", every_steps=2, freezing=settings), LAYERS)
    layers, seen = held(dynamic, world), []
    for step in range(steps):
        dynamic.apply(step, layers, world)
        generator = torch.Generator().manual_seed(step)
        for layer in layers:
            cut = slicings(layer.module)
            for name, parameter in layer.module.named_parameters():
                slicing, shape = cut.get(name), list(parameter.shape)
                if slicing is not None:
                    shape[slicing.dim] *= world.tensor.size
                whole = torch.randn(shape, generator=generator)
                if layer.index == 2 and step > 3:
                    # The first half of the matrix has settled.
                    whole[: len(whole) // 2] *= 1e-4
                elif layer.index == 0 and step > 3:
                    whole *= 1e-4
                if slicing is not None:
                    whole = slicing.part(whole, world.tensor.index, world.tensor.size)
                if parameter.requires_grad:
                    parameter.grad = whole
                    with torch.no_grad():
                        parameter.add_(whole)
        dynamic.after_backward(layers)
        measured = dynamic.measured(layers)
        seen.append((measured["figures"], measured["layers"]))
    return seen


@pytest.mark.processes
@pytest.mark.parametrize("criterion", first_daily(["weightChange", "gradientNorm"]))
def test_each_rank_of_a_tensor_group_sees_the_figure_of_the_whole_layer(criterion):
    """That of one process: so layers freeze at the same steps, however many ranks share them."""
    alone = figures(World(epoch=1, rank=0, size=1, processes=("local",), device=CPU), criterion, 14)
    assert len(alone[-1][0]) == LAYERS and alone[-1][1][0] == 1.0
    for seen in on_ranks(figures, 2, criterion, 14, mesh=Mesh(tensor=2)):
        for (got, frozen), (wanted, reference) in zip(seen, alone, strict=True):
            assert got == pytest.approx(wanted, rel=1e-4)
            assert frozen == reference
