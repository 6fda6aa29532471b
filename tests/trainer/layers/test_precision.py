"""Mixed precision, loss scaling, recomputation, clipping, and the learning rate over the steps."""

import contextlib
import math

import pytest
import torch
from ballast_policies.contract.job.training import Precision, TrainingConfig, WeightType
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.layers.optimize import (
    drop_gradients,
    optimizer_step,
    squared_gradient_norm,
    update,
)
from ballast_trainer.layers.precision import (
    FIRST_SCALE,
    GROWTH_STEPS,
    LossScale,
    check_precision,
    in_bf16,
)
from ballast_trainer.profiling.meter import Meter
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tests.support.changes import change
from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.one_process import train_here
from tests.trainer.layers.trained_layers import CPU, trained_layers, weights


@pytest.mark.processes
@pytest.mark.parametrize("schedule", first_daily(["ZeroBubbleV", "1F1B"]))
def test_bf16_partitioned_learns_as_bf16_in_one_process(gang, small_config, single_process_losses, schedule):
    """Activations cross stages in the type the layers return, so the curve does not depend on the cuts."""
    config = small_config(totalSteps=6, training={"precision": "bf16"})
    config["pipeline"]["schedule"] = schedule
    running = gang(config, ranks=2).succeeded()
    # Gradients of microbatches are summed in another order by split backwards, in fp32.
    assert_same_curve(running.losses(), single_process_losses(config), within=2e-3)
    full = single_process_losses(small_config(totalSteps=6))
    assert 0 < max(abs(running.losses()[step] - full[step]) for step in full) < 0.05


HALF = {"precision": "bf16", "dtype": "bf16"}
TYPES = {"precision": Precision.BF16, "dtype": WeightType.BF16}
BY_TYPE = {"fp32": {}, "bf16": {**TYPES, "master_weights": False}, "masters": TYPES}


@pytest.mark.processes
@pytest.mark.parametrize("masters", first_daily([True, False]))
def test_bf16_weights_learn_the_same_on_any_mesh(
    gang, small_config, single_process_losses, tmp_path, masters
):
    """Shared by replicas (ZeRO-3) while layers move and ranks leave, then on a tensor mesh, then alone.

    Within 2e-3 of one process that does the same, and 0.02 (without masters 0.1) of one in fp32.
    """
    config = small_config(totalSteps=10, training={**HALF, "masterWeights": masters})
    alone, full = single_process_losses(config), single_process_losses(small_config(totalSteps=10))
    config["checkpoint"] = {"path": str(tmp_path / "saved"), "everySteps": 10}
    losses, replicas = {}, {"parallelism": {"data": 2, "zeroStage": 3}}
    moving = {"rebalance": {"enabled": True, "everySteps": 2, "minGain": 0.0}}
    leaving = {"repack": {"enabled": True, "minStages": 1, "everySteps": 3, "maxSlowdown": 9.0}}
    for steps, ranks, fields in (
        (6, 4, {**replicas, **moving, **leaving}),
        (8, 2, {"parallelism": {"tensor": 2}}),
        (10, 1, {}),
    ):
        running = gang({**config, "totalSteps": steps, **fields}, ranks=ranks).succeeded()
        losses |= running.losses()
        assert ranks < 4 or running.events("repack"), "ranks have left"
    assert_same_curve(losses, alone, within=2e-3)
    assert max(abs(losses[step] - full[step]) for step in full) < (0.02 if masters else 0.1)


def learnt_layer(training):
    """The second layer of a small model after a step of its own."""
    layers, backward = trained_layers(training)
    backward(LossScale("fp32"))
    update([layers[1]])
    return layers[1]


@pytest.mark.parametrize("saved", BY_TYPE)
@pytest.mark.parametrize("now", BY_TYPE)
def test_a_layer_continues_with_weights_of_another_type(saved, now):
    """Bit for bit where the types are the same; masters have all that fp32 weights had; updates count on."""
    before, after = (learnt_layer(TrainingConfig(**BY_TYPE[types])) for types in (saved, now))
    state = {name: value.clone() for name, value in before.state().items()}
    counts = {name: value.fill_(1024) for name, value in state.items() if name.endswith(".step")}
    after.load(state)
    found = after.state()
    for name, value in state.items():
        if saved == now:
            assert torch.equal(found[name], value), name
        elif name in found:
            torch.testing.assert_close(found[name].float(), value.float(), rtol=2**-8, atol=0, msg=name)
    if (saved, now) == ("fp32", "masters"):
        for name, parameter in before.module.named_parameters():
            assert torch.equal(found[f"optimizer.{name}.master"], parameter)
    for parameter in after.module.parameters():
        parameter.grad = torch.ones_like(parameter)
    update([after])
    assert counts and all(after.state()[name].item() == 1025 for name in counts)
    assert all(torch.isfinite(value).all() for value in after.state().values())


def test_small_updates_reach_bf16_weights_by_their_masters():
    """A hundred updates of a thousandth of a weight: alone each is lost, the masters' sum is not."""
    moved = []
    for masters in (True, False):
        config = TrainingConfig(
            **TYPES, master_weights=masters, optimizer="sgd", learning_rate=1e-5, weight_decay=0.0
        )
        layers, _ = trained_layers(config)
        norm = layers[1].module.get_parameter("mlp_norm.weight")
        for _ in range(100):
            norm.grad = torch.ones_like(norm)
            update([layers[1]])
        moved.append(float((norm.detach() - 1).abs().max()))
    assert moved[0] > 0.0 == moved[1]


def test_masters_have_gradients_of_one_layer_at_a_time():
    """They are copies in fp32, which forecasts have no room for in all layers at once."""
    config, most, meter = TrainingConfig(**TYPES), [], Meter(4, CPU, None)
    layers, backward = trained_layers(config)
    backward(LossScale("fp32"))
    meter.start_step(0, by_layer=False)

    def count(*_):
        groups = [group for layer in layers for group in layer.optimizer.param_groups]
        most.append(sum(p.grad is not None for group in groups for p in group["params"]))

    hooked = register_optimizer_step_pre_hook(count)
    try:
        optimizer_step(layers, config, meter, step=0, total_steps=1, squared_norm=1.0)
    finally:
        hooked.remove()
    assert most == [len(list(layer.module.parameters())) for layer in layers]


@pytest.mark.slow
def test_batch_norms_and_float_inputs_train_with_bf16_weights(trained):
    """The weights of a batch norm stay fp32; inputs in fp32 become bf16 before the first layer."""
    model = {"name": "tests.trainer.models.awkward_models:with_batch_norm", "layers": 6}
    losses, full = (trained(6, training=training, model=model) for training in (HALF, {}))
    assert losses == pytest.approx(full, rel=0.1)


class Halved(nn.Module):
    """Halves a weight by a buffer in fp32, which it converts."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.full((8, 8), 0.5))

    def forward(self, weight):
        return weight * self.factor.to(weight.dtype)


@pytest.mark.parametrize(
    ("computed", "refused"),
    [
        (nn.utils.parametrizations.spectral_norm, True),
        (nn.utils.parametrizations.weight_norm, False),
        (lambda linear: nn.utils.parametrize.register_parametrization(linear, "weight", Halved()), False),
    ],
    ids=["spectral_norm", "weight_norm", "converts its buffer"],
)
def test_weights_that_spectral_norm_computes_from_buffers_in_fp32_are_refused(computed, refused):
    """Before the first step, by name; others are not."""
    layer = nn.Sequential(computed(nn.Linear(8, 8)))
    said = "SpectralNorm computes bf16 weights of a Sequential from buffers in fp32. To fix: leave dtype out"
    with pytest.raises(ConfigurationError, match=said) if refused else contextlib.nullcontext():
        assert in_bf16(layer) and layer(torch.randn(2, 8).bfloat16()).dtype is torch.bfloat16


def test_fp16_is_refused_where_there_is_no_cuda():
    """It says what to use instead."""
    with pytest.raises(ConfigurationError, match="use 'bf16' or 'fp32'"):
        check_precision("fp16", CPU)
    check_precision("fp16", torch.device("cuda"))


@pytest.mark.parametrize("clip", [0, 0.05])
def test_a_scaled_loss_leads_to_the_same_weights(clip):
    """Scaling by a power of two and dividing before clipping changes no bit that matters."""
    config = TrainingConfig(optimizer="sgd", clip_norm=clip, weight_decay=0.0)
    after = []
    for precision in ("fp32", "fp16"):
        layers, backward = trained_layers(config)
        scale = LossScale(precision)
        backward(scale)
        norm = squared_gradient_norm(layers.parameters())
        assert scale.step_is_sound(norm, step=0)
        optimizer_step(
            layers,
            config,
            Meter(4, CPU, None),
            step=0,
            total_steps=1,
            squared_norm=norm,
            loss_scale=scale.value,
        )
        after.append(weights(layers))
    for plain, scaled in zip(*after, strict=True):
        torch.testing.assert_close(plain, scaled, rtol=1e-6, atol=1e-7)


def test_the_loss_scale_halves_on_overflow_and_doubles_after_a_while():
    """The rule of dynamic loss scaling; a restored scale continues where it was."""
    scale = LossScale("fp16")
    assert not scale.step_is_sound(math.inf, step=0)
    assert not scale.step_is_sound(math.nan, step=1)
    assert scale.value == FIRST_SCALE / 4
    for step in range(GROWTH_STEPS - 1):
        assert scale.step_is_sound(1.0, step=step)
    restored = LossScale("fp16")
    restored.restore(scale.state)
    for one in (scale, restored):
        assert one.value == FIRST_SCALE / 4
        one.step_is_sound(1.0, step=0)
        assert one.value == FIRST_SCALE / 2


def test_a_job_that_changes_to_fp16_begins_with_the_first_scale():
    """Its checkpoint has none: by 1 small gradients would vanish for thousands of steps."""
    before, scale = LossScale("bf16"), LossScale("fp16")
    assert before.step_is_sound(1.0, step=0)
    scale.restore(before.state)
    assert scale.value == FIRST_SCALE


def test_an_overflow_at_the_smallest_scale_ends_the_job():
    """It is not the scale's fault any more."""
    scale = LossScale("fp16")
    scale.restore((1.0, 0))
    with pytest.raises(TrainerError, match="not finite"):
        scale.step_is_sound(math.inf, step=4)


def test_dropped_gradients_leave_weights_and_optimizer_alone():
    """A skipped step has not happened."""
    layers, backward = trained_layers(TrainingConfig())
    before = weights(layers)
    backward(LossScale("fp16"))
    drop_gradients(layers)
    assert all(parameter.grad is None for parameter in layers.parameters())
    assert all(not layer.optimizer.state for layer in layers)
    assert all(torch.equal(a, b) for a, b in zip(before, weights(layers), strict=True))


@pytest.fixture
def trained(small_config):
    """Losses of a job that is trained on one rank in this process."""

    def run(steps, *, context=16, training, **fields):
        config = small_config(totalSteps=steps, training=training, **fields)
        if "model" not in fields:
            config["model"]["args"]["context"] = context
        return train_here(config).losses

    return run


@pytest.mark.slow
def test_recomputation_gives_the_same_curve_with_dropout(trained):
    """The second forward draws the same dropout as the first."""
    again, once = (trained(6, training=training) for training in ({"recompute": True}, {}))
    assert_same_curve(again, once, within=1e-6)


@pytest.mark.slow
def test_gradients_that_are_not_finite_end_the_job_and_are_not_saved(trained, tmp_path):
    """A rate that is too high ends with the reason; no checkpoint holds its weights."""
    training = {"learningRate": 1000.0, "optimizer": "sgd", "clipNorm": 0}
    saved = {"path": str(tmp_path / "saved"), "everySteps": 1, "keep": 1}
    with pytest.raises(
        TrainerError, match=r"gradients of step (\d+) are not finite.*training\.learningRate"
    ) as end:
        trained(1000, training=training, checkpoint=saved)
    (kept,) = (tmp_path / "saved").glob("step-*")
    assert f"step {int(kept.name.removeprefix('step-')) + 1} are" in str(end.value)


@pytest.mark.slow
@pytest.mark.parametrize("kind", first_daily(sorted(DYNAMICS)))
def test_each_kind_of_change_works_in_bf16_with_recomputation(trained, kind):
    """The six dynamic cases under autocast and a second forward: the loss falls and stays finite.

    The weights are bf16, too, where they can be.
    """
    training = {"precision": "bf16", "recompute": True, "learningRate": 0.003}
    training["dtype"] = "fp32" if kind == "pruning" else "bf16"
    losses = trained(
        8, context=32, training=training, dynamics=[change(kind, startStep=2, endStep=6, everySteps=2)]
    )
    assert losses[8] < losses[1]


@pytest.fixture
def fp16_on_the_cpu(monkeypatch, trained):
    """Trains in fp16, which the CPU computes too, slowly: the code is CUDA's."""
    monkeypatch.setattr("ballast_trainer.launch.check_precision", lambda precision, device: None)

    def run(steps, precision="fp16", **fields):
        return trained(steps, training={"precision": precision}, **fields)

    return run


@pytest.mark.slow
def test_fp16_with_a_loss_scale_learns_as_fp32_does(fp16_on_the_cpu):
    """Reported losses are not scaled; the curve is that of fp32 within fp16's rounding."""
    half, full = fp16_on_the_cpu(6), fp16_on_the_cpu(6, "fp32")
    assert 0 < max(abs(half[step] - full[step]) for step in full) < 0.02
    assert half[6] < half[1]


@pytest.mark.slow
def test_fp16_skips_steps_that_overflow_and_resumes_with_its_scale(fp16_on_the_cpu, monkeypatch, tmp_path):
    """A scale that is far too large is halved step by step, weights untouched, then learning begins."""
    monkeypatch.setattr("ballast_trainer.layers.precision.FIRST_SCALE", 2.0**28)
    used = []
    judge = LossScale.step_is_sound

    def watched(self, squared_norm, *, step):
        used.append((self.value, judge(self, squared_norm, step=step)))
        return used[-1][1]

    monkeypatch.setattr(LossScale, "step_is_sound", watched)
    saved = {"path": str(tmp_path / "saved"), "everySteps": 100}
    fp16_on_the_cpu(16, checkpoint=saved)
    skipped = [value for value, sound in used if not sound]
    assert skipped == [2.0 ** (28 - k) for k in range(len(skipped))]
    assert 3 <= len(skipped) < 16
    last = used[-1][0] / (1 if used[-1][1] else 2)
    used.clear()
    fp16_on_the_cpu(17, checkpoint=saved)
    assert [value for value, _ in used] == [last]
