"""Freezing by what the layers do, and pruning that makes layers smaller."""

import pytest
import torch
from ballast_policies.contract.job.dynamics import (
    DynamicConfig,
    FreezingCriterion,
    FreezingSettings,
    PruningSettings,
    Structure,
)
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.checkpoints.tensors import as_remembered
from ballast_trainer.dynamics.freezing import BUFFER, Freezing
from ballast_trainer.dynamics.pruning import neurons
from ballast_trainer.dynamics.pruning.sparse_linear import PrunableLinear
from ballast_trainer.dynamics.registry import build_dynamic
from ballast_trainer.errors import CheckpointError
from ballast_trainer.layers.running import CURRENT_FORWARD
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.protocol import Model
from torch import nn

from tests.support.examples import first_daily
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.trainer.layers.trained_layers import ALONE, all_layers
from tests.trainer.models import families


def prepared(dynamic, layers=6):
    model = build_gpt(layers=layers, dim=16, heads=2, context=8, dropout=0.0)
    return all_layers(model, TrainingConfig(seed=0), dynamic.prepare)


def freezing(criterion, **settings):
    fields = {"criterion": FreezingCriterion(criterion), "threshold": 0.01, "patience": 2, **settings}
    return Freezing(DynamicConfig(kind="freezing", every_steps=5, freezing=FreezingSettings(**fields)), 6)


def move(layers, step, speeds):
    """Change the weights of each layer that learns, relatively, by its speed a step; the gradients too."""
    generator = torch.Generator().manual_seed(step)
    for layer, speed in zip(layers, speeds, strict=True):
        for p in layer.module.parameters():
            if p.requires_grad:
                noise = torch.randn(p.shape, generator=generator)
                p.grad = noise * speed
                with torch.no_grad():
                    p.add_(noise * float(p.norm() / noise.norm().clamp(min=1e-9)) * speed)


def frozen(layers):
    return [not any(p.requires_grad for p in layer.module.parameters()) for layer in layers]


def run(dynamic, layers, steps, speeds_at):
    seen = []
    for step in steps:
        changed = dynamic.apply(step, layers, ALONE)
        move(layers, step, speeds_at(step))
        dynamic.after_backward(layers)
        if step % 5 == 0:
            seen.append((step, sum(frozen(layers)), changed))
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["weightChange", "gradientNorm"])
def test_layers_freeze_from_the_front_as_they_settle(criterion):
    """Layer 0 settles first, then 1 and 2; 4 settles before 3 and waits for it; the last never freezes."""
    settle = [10, 30, 30, 999, 20, 0]
    threshold = 0.05 if criterion == "weightChange" else 0.2
    dynamic = freezing(criterion, threshold=threshold)
    layers = prepared(dynamic)
    seen = run(dynamic, layers, range(80), lambda step: [1e-3 if step >= at else 0.3 for at in settle])
    counts = [count for _, count, _ in seen]
    assert counts == sorted(counts)
    assert counts[0] == 0 and 1 in counts and counts[-1] == 3
    assert frozen(layers) == [True, True, True, False, False, False]
    changes = [changed for _, _, changed in seen]
    assert sum(changes) == len(set(counts)) - 1, "said to have changed exactly when it has"


def test_the_look_at_the_last_step_counts_the_steps_since_the_one_before():
    """Weights do not count as settled there because they have had less time to change."""
    settings = FreezingSettings(criterion=FreezingCriterion.WEIGHT_CHANGE, threshold=1.0, patience=1)
    config = DynamicConfig(kind="freezing", end_step=21, every_steps=20, freezing=settings)
    dynamic = Freezing(config, 6)
    layers = prepared(dynamic)
    for step in range(22):
        dynamic.apply(step, layers, ALONE)
        with torch.no_grad():
            for parameter in layers.parameters():
                parameter.mul_({19: -0.01, 20: -0.1}.get(step, 1.0))
    # From s to -s / 10 in one step.
    assert list(dynamic.measured(layers)["figures"].values()) == pytest.approx([11.0] * 6)
    assert not any(frozen(layers))


@pytest.mark.slow
def test_a_frozen_layer_learns_again_and_freezes_if_it_still_holds():
    """After thawSteps; a layer that moves then stays in."""
    dynamic = freezing("weightChange", threshold=0.05, thaw_steps=20)
    layers = prepared(dynamic)
    quiet = [1e-3] * 5 + [0.3]
    seen = run(dynamic, layers, range(25), lambda step: quiet)
    assert seen[-1][1] == 5
    # The data changes: the layers move again once they may.
    again = run(dynamic, layers, range(25, 60), lambda step: [0.3] * 6)
    assert again[-1][1] == 0


@pytest.mark.parametrize("criterion", ["weightChange", "gradientNorm"])
def test_what_does_not_learn_in_the_model_itself_never_does(criterion):
    """As the weights beside adapters: not at the launch, not after thawSteps."""
    dynamic = freezing(criterion, threshold=2.0, thaw_steps=15)

    def fix(index, module):
        for number, parameter in enumerate(module.parameters()):
            parameter.requires_grad_(index > 0 and number % 2 > 0)
        if index == 1:
            module.mlp.up = PrunableLinear(module.mlp.up.requires_grad_(False))
        return dynamic.prepare(index, module)

    layers = all_layers(build_gpt(layers=6, dim=16, heads=2, context=8, dropout=0.0), TrainingConfig(), fix)
    layers[1].module.mlp.up.prune(torch.eye(64, 16) > 0)
    assert layers[1].module.mlp.up.values is not None
    learn = lambda: [p.requires_grad for p in layers.parameters()]  # noqa: E731
    asked = learn()
    dynamic.reapply(0, layers)
    assert learn() == asked
    seen = run(dynamic, layers, range(46), lambda step: [1e-3] * 6)
    assert max(count for _, count, _ in seen) == 5
    assert learn() == asked


def test_gradients_that_fp16_has_scaled_are_compared_as_they_are(monkeypatch):
    """A step that overflows, as the first ones do, does not count, nor does another loss scale."""
    dynamic = freezing("gradientNorm", threshold=0.5)
    layers = prepared(dynamic)
    for step in range(31):
        dynamic.apply(step, layers, ALONE)
        scale = 64.0 if step < 15 else 1.0
        monkeypatch.setattr(CURRENT_FORWARD, "loss_scale", scale)
        for parameter in layers.parameters():
            parameter.grad = torch.full_like(parameter, scale if step else torch.inf)
        dynamic.after_backward(layers)
    assert not any(frozen(layers))
    assert list(dynamic.measured(layers)["figures"].values()) == pytest.approx([1.0] * 6)


@pytest.mark.slow
@pytest.mark.parametrize("criterion", ["weightChange", "gradientNorm"])
def test_what_a_layer_remembers_travels_with_it(criterion):
    """A layer that is sent to another rank, or loaded, is frozen there, and decides as it would have here."""
    dynamic = freezing(criterion, threshold=0.05 if criterion == "weightChange" else 0.2)
    layers, other = prepared(dynamic), prepared(dynamic)
    settle = lambda step: [1e-3 if step >= 10 else 0.3] * 3 + [0.3] * 3  # noqa: E731
    run(dynamic, layers, range(18), settle)
    for source, target in zip(layers, other, strict=True):
        target.load({name: value.clone() for name, value in source.state().items()})
    fresh = freezing(criterion, threshold=0.05 if criterion == "weightChange" else 0.2)
    fresh.reapply(18, other)
    assert frozen(other) == frozen(layers)
    steps = range(20, 36)
    assert run(dynamic, layers, steps, settle) == run(fresh, other, steps, settle)
    assert sum(frozen(other)) == 3


def test_a_criterion_can_be_switched_on_for_a_checkpoint_and_off_again():
    """Without it nothing is remembered; with it a layer starts to."""
    plain, watched = prepared(build_dynamic(DynamicConfig(kind="freezing", target=0.5), 6)), None
    watched = prepared(freezing("weightChange"))
    saved = dict(plain[1].state())
    watched[1].load(as_remembered(saved, watched[1].module))
    assert watched[1].module.get_buffer(BUFFER).abs().sum() > 0
    plain[1].load(as_remembered(dict(watched[1].state()), plain[1].module))


def neuron_pruning(target, initial=0.0):
    settings = PruningSettings(structure=Structure.NEURONS, initial_sparsity=initial)
    config = DynamicConfig(kind="pruning", start_step=2, end_step=6, target=target, pruning=settings)
    return build_dynamic(config, 6)


def learn(layers, steps=2):
    """Let the optimizers gather state."""
    for _ in range(steps):
        for layer in layers:
            for p in layer.module.parameters():
                p.grad = torch.randn_like(p)
            layer.optimizer.step()


def test_the_weakest_neurons_of_the_whole_model_go():
    """As many as the schedule says, over all layers; what is left computes as if the others were zero."""
    torch.manual_seed(0)
    dynamic = neuron_pruning(0.5, initial=0.2)
    layers = prepared(dynamic)
    with torch.no_grad():
        for layer in list(layers)[1:-1]:
            layer.module.mlp.up.weight.mul_(1 + layer.index / 10)
    learn(layers)
    block = layers[1].module
    up, down = block.mlp.up, block.mlp.down
    full = {"up": up.weight.clone(), "bias": up.bias.clone(), "down": down.weight.clone()}
    scores = torch.sqrt((full["up"] ** 2).sum(1) * (full["down"] ** 2).sum(0))
    assert dynamic.apply(2, layers, ALONE)
    left = sum(dynamic.counts(layer)[1] for layer in layers)
    assert left == int(4 * 64 * 0.8)
    keep = scores.topk(neurons.prepared(block)[0].kept).indices.sort().values
    assert torch.equal(up.weight, full["up"][keep]) and torch.equal(down.weight, full["down"][:, keep])
    state = layers[1].optimizer.state[up.weight]
    assert state["exp_avg"].shape == up.weight.shape
    hidden = torch.randn(3, 16)
    masked = torch.zeros(64).index_fill(0, keep, 1.0)
    wide = nn.functional.gelu(hidden @ full["up"].t() + full["bias"]) * masked
    torch.testing.assert_close(block.mlp(hidden), wide @ full["down"].t() + down.bias)
    for step in range(3, 7):
        dynamic.apply(step, layers, ALONE)
    assert sum(dynamic.counts(layer)[1] for layer in layers) == 4 * 64 // 2
    kept = [dynamic.counts(layer)[1] for layer in list(layers)[1:-1]]
    assert kept[0] < kept[-1], "layers of small weights lose more"


@pytest.mark.slow
def test_pruned_layers_travel_and_load_with_their_shapes():
    """A rank that receives one, or resumes, builds it whole and takes over the smaller weights."""
    dynamic = neuron_pruning(0.5)
    layers, other = prepared(dynamic), prepared(dynamic)
    learn(layers)
    for step in range(2, 7):
        dynamic.apply(step, layers, ALONE)
    for source, target in zip(layers, other, strict=True):
        target.load({name: value.clone() for name, value in source.state().items()})
    hidden = torch.randn(2, 8, 16)
    assert torch.equal(layers[2].module(hidden), other[2].module(hidden))
    learn(other, steps=1)
    assert [dynamic.counts(layer) for layer in other] == [dynamic.counts(layer) for layer in layers]


@pytest.mark.parametrize("structure", ["weights", "neurons"])
def test_a_dense_checkpoint_of_a_later_step_is_pruned_as_it_resumes(structure):
    """Even after endStep, where no further step prunes; one that is pruned already stays as it is."""
    config = DynamicConfig(
        kind="pruning",
        start_step=2,
        end_step=6,
        target=0.5,
        pruning=PruningSettings(structure=Structure(structure)),
    )
    dynamic = build_dynamic(config, 6)
    layers = prepared(dynamic)
    assert not any(dynamic.apply(step, layers, ALONE) for step in (7, 8))
    dynamic.resumed(9, layers, ALONE)
    had, left = (sum(column) for column in zip(*map(dynamic.counts, layers), strict=True))
    assert left == had // 2
    before = {layer.index: {k: v.clone() for k, v in layer.state().items()} for layer in layers}
    dynamic.resumed(9, layers, ALONE)
    for layer in layers:
        assert all(torch.equal(value, before[layer.index][k]) for k, value in layer.state().items())


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.complex64])
def test_weights_of_another_type_are_pruned_by_their_magnitude(dtype):
    """To the target, exactly; a layer of the user's need not be fp32."""
    dynamic = build_dynamic(DynamicConfig(kind="pruning", target=0.9), 1)
    linear = nn.Linear(10, 4, bias=False, dtype=dtype)
    wanted = torch.arange(1.0, 41.0).to(dtype)
    with torch.no_grad():
        linear.weight.copy_(wanted.view(4, 10) * (1j if dtype.is_complex else 1))
    layers = all_layers(Model.from_layers([linear], loss=nn.MSELoss()), TrainingConfig(), dynamic.prepare)
    assert dynamic.apply(0, layers, ALONE)
    weight = layers[0].module.weight.detach()
    assert weight.abs().flatten().tolist() == [0.0] * 36 + [37, 38, 39, 40]
    x = torch.ones(2, 10, dtype=dtype, requires_grad=True)
    layers[0].module(x).backward(torch.ones(2, 4, dtype=dtype))
    assert torch.equal(x.grad, weight.conj().sum(0).expand(2, -1))


def test_pruning_replaces_linear_layers_wherever_they_are():
    """Nested ones too, with their parameters; GPT-2's transposed ones with their weights."""
    model = build_gpt(layers=4, dim=16, heads=2)
    block = model.build_layer(1)
    weight = block.mlp.up.weight
    pruned = build_dynamic(DynamicConfig(kind="pruning", end_step=1, target=0.5), 4).prepare(1, block)
    assert not any(isinstance(module, nn.Linear) for module in pruned.modules())
    assert pruned.mlp.up.weight is weight


@pytest.mark.slow
def test_layers_freeze_as_their_plasticity_settles():
    """Layers 0 to 2 stop changing what they tell apart, and freeze from the front; others change by fits."""
    dynamic = freezing("plasticity", threshold=0.02, patience=3)
    layers = prepared(dynamic)
    tokens = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(0))
    seen = []
    for step in range(140):
        dynamic.apply(step, layers, ALONE)
        CURRENT_FORWARD.set(step, 0)
        value = tokens
        for layer in layers:
            value = layer.module(value)
        dynamic.after_backward(layers)
        generator = torch.Generator().manual_seed(step)
        for layer in layers:
            settled = layer.index < 3 and step > 40
            for p in layer.module.parameters():
                if p.requires_grad and not settled:
                    with torch.no_grad():
                        p.add_(torch.randn(p.shape, generator=generator) * 0.2 * (step // 15 % 2))
        seen.append(sum(frozen(layers)))
    CURRENT_FORWARD.set(0, None)
    assert seen[40] == 0 and seen[-1] == 3


def test_what_plasticity_keeps_travels_with_the_layer():
    """Another rank looks at the same inputs, and a checkpoint without them can be resumed."""
    dynamic = freezing("plasticity")
    layers, other = prepared(dynamic), prepared(dynamic)
    for step in range(11):
        dynamic.apply(step, layers, ALONE)
        CURRENT_FORWARD.set(step, 0)
        value = torch.randint(0, 256, (2, 8), generator=torch.Generator().manual_seed(step))
        for layer in layers:
            value = layer.module(value)
        dynamic.after_backward(layers)
    CURRENT_FORWARD.set(0, None)
    for source, target in zip(layers, other, strict=True):
        target.load({name: value.clone() for name, value in source.state().items()})
    kept = layers[2].module.get_buffer("ballast_probe_input")
    assert kept.shape == (1, 8, 16) and torch.equal(kept, other[2].module.get_buffer("ballast_probe_input"))
    plain = prepared(build_dynamic(DynamicConfig(kind="freezing", target=0.5), 6))
    other[1].load(as_remembered(dict(plain[1].state()), other[1].module))
    plain[1].load(as_remembered(dict(layers[1].state()), plain[1].module))


FAMILIES = {
    "gpt": {"model": {"name": "gpt", "layers": 4, "args": {"dim": 16, "heads": 2, "context": 8}}},
    "gpt2": {"model": families.model("gpt2"), "data": "tests.trainer.models.families:batches"},
}
FAMILIES["gpt2"]["model"]["args"]["tie_word_embeddings"] = False
CASES = [("gpt", "neurons"), ("gpt2", "heads"), ("gpt2", "weights"), ("gpt", "heads"), ("gpt2", "neurons")]


def job(family, folder, steps, change=None):
    changes = [change] if change else []
    return small_job(**FAMILIES[family], steps=steps, checkpoint={"path": str(folder)}, dynamics=changes)


def pruning(structure, **steps):
    return {"kind": "pruning", "target": 0.5, "pruning": {"structure": structure}, **steps}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "structure"), first_daily(CASES, 2))
def test_a_job_continues_as_it_was_while_nothing_is_pruned_yet(family, structure, tmp_path):
    """Switched on after step 2, off again after step 4: GPT-2's maps are turned, and turned back."""
    if family == "gpt2":
        pytest.importorskip("transformers")
    later = pruning(structure, startStep=100, endStep=200)
    whole = train_here(job(family, tmp_path / "whole", 6)).losses
    found = {}
    for steps, change in ((2, None), (4, later), (6, None)):
        found |= train_here(job(family, tmp_path / "parts", steps, change)).losses
    assert found == pytest.approx(whole, abs=1e-6)


@pytest.mark.slow
def test_what_was_removed_does_not_come_back(tmp_path):
    """The checkpoint of fewer neurons is refused without pruning, with the layer; pruned on, it continues."""
    cut = pruning("neurons", startStep=0, endStep=1)
    train_here(job("gpt", tmp_path, 2, cut))
    with pytest.raises(CheckpointError, match=r"does not fit layer 1: .*mlp\.up\.weight.*To fix"):
        train_here(job("gpt", tmp_path, 4))
    assert sorted(train_here(job("gpt", tmp_path, 4, cut)).losses) == [3, 4]
