"""Compiled layers draw as uncompiled ones and stay compiled; measuring compiles none, exports name them."""

import shutil

import pytest
import torch
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.models.flops import step_flops
from ballast_trainer.models.loss_weights import cross_entropy
from ballast_trainer.models.protocol import Model
from ballast_trainer.profiling.meter import Meter
from torch import nn
from torch.nn import functional

from tests.support.examples import first_fast
from tests.trainer.layers.trained_layers import CPU, all_layers


class Drawing(nn.Module):
    """A layer that draws."""

    def forward(self, value):
        return functional.dropout(torch.tanh(value), 0.5)


def is_compiled(module):
    return module._compiled_call_impl is not None


@pytest.mark.slow
def test_a_layer_compiled_in_place_is_compiled_in_the_copy_that_trains():
    """Also a module inside of a layer; others stay as they are."""
    block = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    block[0].compile(backend="eager")
    head = nn.Linear(4, 2)
    head.compile(backend="eager")
    layers = all_layers(Model.from_layers([block, head], loss=cross_entropy))
    compiled = [is_compiled(module) for layer in layers for module in layer.module.modules()]
    assert compiled == [False, True, False, True]


@pytest.mark.parametrize("compile_layers", first_fast([False, True]))
def test_the_configuration_compiles_each_layer(compile_layers):
    model = Model(layer_count=2, build_layer=lambda _: nn.Linear(4, 4), loss=cross_entropy)
    layers = all_layers(model, TrainingConfig(compile=compile_layers))
    assert [is_compiled(layer.module) for layer in layers] == [compile_layers] * 2


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="layers are compiled by a C++ compiler")
def test_a_compiled_layer_draws_what_it_draws_uncompiled():
    """So a tensor group, whose exchanges break a layer's graph, draws as one process does."""
    compiled = Drawing()
    compiled.compile()
    drawn = []
    for build, by_field in (Drawing, False), (Drawing, True), (compiled, False):
        model = Model.from_layers([build], loss=cross_entropy)
        (layer,) = all_layers(model, TrainingConfig(compile=by_field))
        torch.manual_seed(1)
        drawn.append(layer.module(torch.ones(64, requires_grad=True)))
    assert torch.equal(drawn[0], drawn[1])
    assert torch.equal(drawn[0], drawn[2])


@pytest.mark.slow
def test_a_wrapped_layer_has_plain_names_in_exports():
    whole = nn.Sequential(torch.compile(nn.Linear(4, 4), backend="eager"), nn.Linear(4, 2))
    listed = Model.from_layers(list(whole), loss=cross_entropy)
    named = Model.from_layers(list(whole), loss=cross_entropy, whole=whole)
    for model in (listed, named):
        names = [
            model.name_of(layer.index, name)
            for layer in all_layers(model)
            for name in layer.module.state_dict()
        ]
        assert names == ["0.weight", "0.bias", "1.weight", "1.bias"]


@pytest.mark.slow
def test_measuring_what_a_compiled_layer_saves_compiles_nothing():
    """Each tensor that a forward saves passes a hook, which a compiler would take for a part of the layer."""

    def wrapped(_):
        layer = nn.Sequential(nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8), nn.GELU())
        return torch.compile(layer, backend="aot_eager")

    model = Model(layer_count=3, build_layer=wrapped, loss=cross_entropy)
    layers = all_layers(model)
    meter = Meter(3, CPU, None)
    stack = LayerStack(list(layers), meter, 0, CPU)

    def frames_of_a_step(*, measured):
        meter.start_step(0, by_layer=measured)
        before = torch._dynamo.utils.counters["frames"]["total"]
        meter.begin(0, meter.forward, None)
        stack(torch.ones(2, 8)).sum().backward()
        meter.end()
        return torch._dynamo.utils.counters["frames"]["total"] - before

    assert frames_of_a_step(measured=False) > 0
    assert step_flops(model, torch.ones(2, 8)) == 3 * 2 * 3 * 2 * (2 * 8 * 8)
    assert frames_of_a_step(measured=True) == 0
    assert meter.bytes[0] > 0
