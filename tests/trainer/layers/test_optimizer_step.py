"""The optimizer step: clipping over all ranks, and the learning rate of each step."""

import itertools
import math

import pytest
import torch
from ballast_policies.contract.job.training import Decay, TrainingConfig
from ballast_trainer.causes import describe
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.optimize import (
    learning_rate,
    optimizer_step,
    rate_factor,
    squared_gradient_norm,
)
from ballast_trainer.layers.precision import LossScale
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.protocol import Model
from ballast_trainer.profiling.meter import Meter
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from tests.trainer.layers.trained_layers import CPU, all_layers, trained_layers, weights


def test_clipping_is_torch_clipping_over_all_layers():
    """The same weights as ``clip_grad_norm_`` over all parameters at once."""
    config = TrainingConfig(optimizer="sgd", clip_norm=0.05, weight_decay=0.0, learning_rate=0.1)
    layers, backward = trained_layers(config)
    backward(LossScale("fp32"))
    reference, backward = trained_layers(config)
    backward(LossScale("fp32"))
    norm = squared_gradient_norm(layers.parameters())
    assert norm > 0.05**2
    optimizer_step(layers, config, Meter(4, CPU, None), step=0, total_steps=1, squared_norm=norm)
    torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.05)
    torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9).step()
    for mine, theirs in zip(weights(layers), weights(reference), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_clipping_rounds_neither_the_norm_nor_the_factor(dtype):
    """Torch's norm of bf16 numbers is off by up to 1/512, and differs for parts of a gradient."""
    config = TrainingConfig(optimizer="sgd", clip_norm=0.7, weight_decay=0.0, learning_rate=1.0)
    modules = [nn.Linear(64, 8).to(dtype), nn.Linear(8, 8)]
    layers = all_layers(Model.from_layers(modules, loss=nn.functional.mse_loss), config)
    before, gradients = weights(layers), [torch.randn_like(p) for p in layers.parameters()]
    for parameter, gradient in zip(layers.parameters(), gradients, strict=True):
        parameter.grad = gradient.clone()
    norm = squared_gradient_norm(layers.parameters())
    assert norm == pytest.approx(sum(float(one.double().square().sum()) for one in gradients), rel=1e-5)
    optimizer_step(layers, config, Meter(2, CPU, None), step=0, total_steps=1, squared_norm=norm)
    for mine, old, gradient in zip(weights(layers), before, gradients, strict=True):
        assert torch.equal(mine, old - (gradient.float() * (0.7 / (norm**0.5 + 1e-6))).to(old.dtype))


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_the_rate_warms_up_and_decays_as_named(decay):
    """Values at the ends and in the middle, by hand."""
    config = TrainingConfig(
        learning_rate=2.0, warmup_steps=4, decay=Decay(decay), decay_to=0.1 * (decay != "constant")
    )
    rates = [learning_rate(config, step, 24) for step in range(30)]
    assert rates[:4] == [0.5, 1.0, 1.5, 2.0]
    middle, end = {"constant": (2.0, 2.0), "linear": (1.1, 0.2), "cosine": (1.1, 0.2)}[decay]
    assert rates[14] == pytest.approx(middle)
    assert rates[24:] == pytest.approx([end] * 6)
    quarter = {"constant": 1.0, "linear": 0.775, "cosine": 0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2}
    assert rates[9] / 2.0 == pytest.approx(quarter[decay])


@given(
    decay=st.sampled_from(["linear", "cosine"]),
    warmup=st.integers(0, 50),
    length=st.integers(1, 200),
    left=st.floats(0, 1),
)
def test_the_rate_rises_then_never_rises_again(decay, warmup, length, left):
    """Between 0 and 1, 1 at the end of the warm-up, never below what is to be left."""
    config = TrainingConfig(
        warmup_steps=warmup, decay=Decay(decay), decay_steps=warmup + length, decay_to=left
    )
    factors = [rate_factor(config, step, 10) for step in range(warmup + length + 5)]
    assert factors[warmup] == 1.0
    assert factors[: warmup + 1] == sorted(factors[: warmup + 1])
    assert factors[warmup:] == sorted(factors[warmup:], reverse=True)
    assert all(0 < factor <= 1 for factor in factors[:warmup])
    assert min(factors[warmup:]) >= left - 1e-12


def test_groups_of_a_users_optimizer_keep_their_rates_to_one_another():
    """Warm-up multiplies each group's own rate."""
    config = TrainingConfig(warmup_steps=2, learning_rate=0.5, clip_norm=0)
    layers, backward = trained_layers(TrainingConfig())
    backward(LossScale("fp32"))
    (layer, *_) = layers
    first, *others = layer.module.parameters()
    layer.optimizer = torch.optim.SGD([{"params": [first], "lr": 0.1}, {"params": others}], lr=0.5)
    for step, factor in ((0, 0.5), (1, 1.0), (2, 1.0)):
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        optimizer_step(layers, config, Meter(4, CPU, None), step=step, total_steps=9, squared_norm=1.0)
        assert [group["lr"] for group in layer.optimizer.param_groups] == [0.1 * factor, 0.5 * factor]


def no_optimizer(parameters, learning_rate):
    """As where a ``return`` was forgotten."""


def unreachable(parameters, learning_rate):
    raise OSError("no route to the settings")


def of_others(parameters, learning_rate):
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))], lr=learning_rate)


def test_optimizers_that_a_pipeline_cannot_use_are_refused_with_the_reason():
    """One that computes the loss again, one for matrices alone, none: the field, why, what to do."""
    model = build_gpt(layers=4, dim=16, heads=2, context=8)
    for name, reason in (
        ("torch.optim:LBFGS", "a closure"),
        ("torch.optim:Muon", "does not take"),
        (f"{__name__}:no_optimizer", "returned NoneType"),
        (f"{__name__}:unreachable", "OSError: no route to the settings"),
        (f"{__name__}:of_others", "other parameters than the layer's"),
    ):
        layers = LayerSet(model, TrainingConfig(optimizer=name), CPU, lambda index, module: module)
        with pytest.raises(ConfigurationError, match=rf"training.optimizer: .*{reason}.*To fix"):
            layers.make(1)


def stepping(optimizer, gradient=1.0):
    """Layers under an optimizer of this module, which all have gradients; and what makes a step of them."""
    config = TrainingConfig(optimizer=f"{__name__}:{optimizer}")
    layers = all_layers(build_gpt(layers=4, dim=16, heads=2, context=8), config)
    for parameter in layers.parameters():
        parameter.grad = torch.full_like(parameter, gradient)
    meter = Meter(4, CPU, None)
    return layers, lambda: optimizer_step(layers, config, meter, step=0, total_steps=1, squared_norm=0.0)


def matrices(parameters, learning_rate):
    return torch.optim.SGD([p for p in parameters if p.requires_grad and p.ndim > 1], lr=learning_rate)


def test_gradients_of_parameters_that_an_optimizer_leaves_out_do_not_add_up(caplog):
    """The norm of each step is that of its own gradients, as after ``zero_grad`` of a module; a warning."""
    layers, step = stepping("matrices")
    assert "matrices leaves out parameters of a layer" in caplog.text
    step()
    assert squared_gradient_norm(layers.parameters()) == 0


def test_an_optimizer_of_what_learns_suits_a_layer_that_does_not():
    """A layer of which nothing learns needs none: a factory of what does is not refused."""
    frozen = torch.nn.Linear(2, 2).requires_grad_(False)
    model = Model.from_layers([frozen, torch.nn.Linear(2, 1)], loss=torch.nn.functional.mse_loss)
    layers = all_layers(model, TrainingConfig(optimizer=f"{__name__}:matrices"))
    assert [any(p.requires_grad for p in layer.module.parameters()) for layer in layers] == [False, True]


def test_an_optimizer_that_leaves_parameters_out_is_shared_by_replicas():
    """Whether it mixes parameters is tried with those that it takes: of vectors alone it makes none."""
    model = build_gpt(layers=4, dim=16, heads=2, context=8)
    config, replicas = TrainingConfig(optimizer=f"{__name__}:matrices"), Axis(ranks=(0, 1))
    layers = LayerSet(model, config, CPU, lambda index, module: module, replicas=replicas)
    layer = layers.make(1)
    held = sum(p.numel() for group in layer.optimizer.param_groups for p in group["params"])
    assert held == sum(p.numel() for p in layer.module.parameters() if p.ndim > 1) / 2


def stumbling(parameters, learning_rate):
    optimizer = torch.optim.SGD(parameters, lr=learning_rate)
    optimizer.step = lambda closure=None: 1 / 0
    return optimizer


def test_an_optimizer_that_fails_in_a_step_is_named():
    """The error of a step says which field's function it is of."""
    _, step = stepping("stumbling", 0.0)
    with pytest.raises(ZeroDivisionError) as failed:
        step()
    assert f"in a step of training.optimizer {__name__}:stumbling" in describe(failed.value)


def own_schedule(step, total_steps):
    return {0: 0.5, 1: 2.0, 2: -1.0}.get(step, step / total_steps)


CALLS = itertools.count(1)


def counting_schedule(step, total_steps):
    return 1 / next(CALLS)


def test_a_schedule_of_the_user_s_own_sets_the_rate():
    """A function of the step and ``totalSteps``, in place of warm-up and decay."""
    config = TrainingConfig(learning_rate=0.1, rate_factor=f"{__name__}:own_schedule")
    assert [learning_rate(config, step, 10) for step in (0, 1, 5)] == [0.05, 0.2, 0.05]


@pytest.mark.parametrize(
    ("name", "step", "words"),
    [
        ("own_schedule", 2, "returns -1.0 at step 2 of 10. To fix"),
        ("counting_schedule", 0, "returns 1.0, then 0.5 at step 0 of 10. To fix"),
        ("no_such_schedule", 0, "cannot load"),
        ("test_a_schedule_of_the_user_s_own_sets_the_rate", 0, "raised TypeError"),
    ],
)
def test_a_schedule_that_gives_no_rate_is_refused(name, step, words):
    """With the field, the value and the step; before the first step where it fails there."""
    with pytest.raises(ConfigurationError, match=r"training\.rateFactor: ") as caught:
        learning_rate(TrainingConfig(rate_factor=f"{__name__}:{name}"), step, 10)
    assert words in str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_layers_learn_together_as_they_do_one_by_one(optimizer):
    """In one call where steps are not measured by layer: the same weights and state, bit for bit."""
    config, found = TrainingConfig(optimizer=optimizer), []
    for by_layer in (True, False):
        layers, _ = trained_layers(config)
        calls, meter = [], Meter(4, CPU, None)
        for step in range(3):
            torch.manual_seed(step)
            for parameter in layers.parameters():
                parameter.grad = torch.randn_like(parameter)
            norm = squared_gradient_norm(layers.parameters())
            meter.start_step(step, by_layer=by_layer)
            with torch.profiler.profile() as seen:
                optimizer_step(layers, config, meter, step=step, total_steps=3, squared_norm=norm)
            calls.append(sum(event.name.startswith("Optimizer.step") for event in seen.events()))
            assert squared_gradient_norm(layers.parameters()) == 0.0
        assert calls == [len(list(layers)) if by_layer else 1] * 3
        found.append([layer.state() for layer in layers])
    for one_by_one, together in zip(*found, strict=True):
        assert one_by_one.keys() == together.keys()
        assert all(torch.equal(one_by_one[name], together[name]) for name in together)


def clipped(parameters, learning_rate):
    """Gradients of each layer clipped by value, noise on its weights."""
    learnt = list(parameters)
    optimizer = torch.optim.SGD([{"params": []}, {"params": learnt}], lr=learning_rate)
    optimizer.register_step_pre_hook(lambda *_: torch.nn.utils.clip_grad_value_(learnt, 0.5))
    optimizer.register_step_post_hook(
        lambda *_: torch._foreach_add_(learnt, [torch.randn(()) for _ in learnt])
    )
    return optimizer


@torch.no_grad()
def test_hooks_of_an_optimizer_run_for_each_layer_with_the_same_numbers_on_each_replica():
    """Layers that one call could update have hooks each; what these draw does not depend on the process."""
    config = TrainingConfig(optimizer=f"{__name__}:clipped", learning_rate=1.0)
    found = []
    for process in range(2):
        layers = all_layers(build_gpt(layers=4, dim=16, heads=2, context=8), config)
        before = weights(layers)
        for parameter in layers.parameters():
            parameter.grad = torch.full_like(parameter, 3.0)
        torch.manual_seed(process)
        optimizer_step(layers, config, Meter(4, CPU, None), step=0, total_steps=1, squared_norm=0.0)
        found.append([now - old for now, old in zip(weights(layers), before, strict=True)])
    noise = [moved.mean() + 0.5 for moved in found[0]]
    assert len({round(float(one), 4) for one in noise}) == len(noise)
    for mine, theirs, of in zip(*found, noise, strict=True):
        torch.testing.assert_close(mine, (of - 0.5).expand_as(mine), rtol=0, atol=1e-5)
        assert torch.equal(mine, theirs)


def scheduled(parameters, learning_rate):
    optimizer = torch.optim.SGD(parameters, lr=learning_rate)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=9, cycle_momentum=False
    )
    optimizer.register_step_post_hook(lambda *_: scheduler.step())
    return optimizer


class Counting(torch.optim.SGD):
    """It counts its steps in an attribute."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        return super().step(closure)


class Averaged(torch.optim.SGD):
    """It keeps an average of the weights beside the state."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.average = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        super().step(closure)
        torch._foreach_lerp_(self.average, [p for g in self.param_groups for p in g["params"]], 0.1)


class Wrapped(torch.optim.SGD):
    """It leaves all to an optimizer that it has."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.inner = torch.optim.Adam(self.param_groups[0]["params"], lr=lr)

    def step(self, closure=None):
        self.inner.step(closure)


class Tabled(torch.optim.SGD):
    """Its table of constants is copied to the weights' device by a step; a number is not known."""

    def __init__(self, parameters, lr):
        super().__init__(parameters, lr=lr)
        self.tables, self.best = {"rounded": torch.linspace(0, 1, 256)}, math.nan

    def step(self, closure=None):
        self.tables["rounded"] = self.tables["rounded"].clone()
        return super().step(closure)


def test_a_table_of_an_optimizer_is_no_state():
    """It has the values that it had, as a NaN has."""
    layers, step = stepping("Tabled")
    step()
    assert all(layer.state() for layer in layers)


def cycled(parameters, learning_rate):
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    optimizer.register_step_post_hook(lambda *_: optimizer.param_groups[0].update(betas=(0.5, 0.9)))
    return optimizer


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("scheduled", "changes its learning rate in a step"),
        ("cycled", "AdamW keeps betas in its parameter groups"),
        ("Counting", "Counting keeps steps in its attributes"),
        ("Averaged", "Averaged keeps average in its attributes"),
        ("Wrapped", "Wrapped keeps inner in its attributes"),
    ],
)
def test_what_an_optimizer_does_that_would_be_lost_is_refused(name, words):
    """Its own schedule, which the trainer's rate replaces; state that no move and no checkpoint has."""
    layers, step = stepping(name)
    assert all(layer.state() for layer in layers)
    with pytest.raises(TrainerError, match=rf"{words}.*To fix: "):
        step()
        layers[1].state()
