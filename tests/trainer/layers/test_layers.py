"""Layers: the same weights and dropout wherever they are; frozen ones cost no backward."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
import torch.distributed as dist
from ballast_policies.contract.job.dynamics import DynamicConfig
from ballast_policies.contract.job.training import Precision, TrainingConfig, WeightType
from ballast_trainer.checkpoints import tensors
from ballast_trainer.data.corpus import text_batch
from ballast_trainer.distributed.activity import ACTIVITY, Limit
from ballast_trainer.distributed.heartbeat import HangLimits, RankHeartbeat
from ballast_trainer.dynamics.freezing import Freezing
from ballast_trainer.dynamics.schedule import ChangeSteps
from ballast_trainer.errors import ConfigurationError, TrainerError
from ballast_trainer.gpu_emulation import EmulatedSpeed
from ballast_trainer.layers.buffers import copies_of, in_place
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.layers.layer_stack import LayerStack
from ballast_trainer.layers.optimize import squared_gradient_norm, update
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.protocol import Model
from ballast_trainer.profiling.meter import Meter
from ballast_trainer.seeding import mixed_key
from torch import nn

from tests.support.waiting import eventually
from tests.trainer.layers.trained_layers import ALONE, CPU, all_layers, builder_of_one_stage, one_stage


def layer_set(seed=0):
    model = build_gpt(layers=5, dim=16, heads=2, context=8)
    return LayerSet(model, TrainingConfig(seed=seed), CPU, lambda index, module: module)


def one_rank(dynamic=None, step=0):
    """A pipeline of one rank over a small model; returns it with its layers, meter and a batch."""
    model = build_gpt(layers=5, dim=16, heads=2, context=8)
    layers, meter = all_layers(model), Meter(model.layer_count, CPU, None)
    if dynamic is not None:
        dynamic.reapply(step, layers)
    return one_stage(model, layers, 2, meter), layers, meter, model.batch(0, 0, 4)


def test_a_layer_starts_with_the_same_weights_in_any_order():
    """Initial weights depend on seed and index, not on what was built before."""
    first = layer_set()
    second = layer_set()
    expected = {index: first.make(index).state() for index in range(5)}
    for index in (3, 0, 4, 2, 1):
        torch.rand(7)
        built = second.make(index).state()
        assert all(torch.equal(built[name], value) for name, value in expected[index].items())
    other = layer_set(seed=1)
    assert not torch.equal(other.make(1).state()["module.mlp.up.weight"], expected[1]["module.mlp.up.weight"])


@pytest.mark.slow
def test_dropout_follows_step_microbatch_and_layer_alone():
    """Whatever was drawn before, the same step gives the same loss; another step another one."""
    pipeline, _, meter, batch = one_rank()
    losses = []
    for step in (3, 3, 4):
        torch.rand(step)
        meter.start_step(step)
        losses.append(pipeline.run(lambda batch=batch: batch))
    assert losses[0] == losses[1] != losses[2]


class Drawing(nn.Linear):
    """Its output depends on numbers of all generators."""

    def forward(self, value):
        return super().forward(value) * (random.random() + np.random.random() + torch.rand(()))


def test_random_numbers_of_layers_and_loss_are_the_same_behind_layers_of_torch():
    """Those draw from torch alone; what they leave of the other generators depends on where a cut is."""

    def loss(*cuts):
        # A hook and a function are code of the user's, as a class of its own is.
        hooked = nn.Linear(3, 3)
        hooked.register_forward_hook(lambda module, given, output: output * random.random())
        drawing = {"activation": lambda value: value * random.random(), "norm_first": True}
        given = nn.TransformerEncoderLayer(3, 1, 3, **drawing)
        kinds = [nn.Linear(3, 3), given, hooked, nn.Dropout(), Drawing(3, 3), nn.Linear(3, 3)]
        layers, value = all_layers(Model.from_layers(kinds, loss=torch.sum)), torch.ones(2, 3)
        for parameter in layers.parameters():
            nn.init.constant_(parameter, 0.1)
        for cut in cuts:
            random.seed(len(cuts)), np.random.seed(len(cuts))
            value = LayerStack([layers[index] for index in cut], Meter(6, CPU, None), 0, CPU)(value)
        return value, random.random(), np.random.random()

    torch.testing.assert_close(loss((0,), (1, 2, 3, 4), (5,)), loss((0, 1, 2, 3, 4, 5)), rtol=0, atol=0)


class Noise(torch.autograd.Function):
    """What it draws, it draws in its backward."""

    @staticmethod
    def forward(ctx, value):
        return value.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient + torch.randn_like(gradient)


class Noisy(nn.Linear):
    """Its weights' gradients have noise."""

    def forward(self, value):
        return Noise.apply(super().forward(value))


def test_random_numbers_of_a_backward_follow_step_microbatch_and_layer_alone():
    """On one rank or two, whatever was drawn in between."""

    def gradients(*cuts):
        layers = all_layers(Model.from_layers([lambda: Noisy(3, 3)] * 3, loss=torch.sum))
        runs, value = [], torch.ones(2, 3)
        for cut in cuts:
            stack = LayerStack([layers[index] for index in cut], Meter(3, CPU, None), 0, CPU)
            source = value.detach().requires_grad_(bool(runs))
            value = stack(source)
            runs.append((source, value))
        gradient = torch.ones(2, 3)
        for source, output in reversed(runs):
            torch.rand(7)
            output.backward(gradient)
            gradient = source.grad
        return [layer.module.weight.grad for layer in layers]

    torch.testing.assert_close(gradients((0,), (1, 2)), gradients((0, 1, 2)), rtol=0, atol=0)


def test_keys_do_not_collide_over_a_run():
    """100 steps x 8 microbatches x 12 layers: all different."""
    keys = {mixed_key(0, s, m, i) for s in range(100) for m in range(8) for i in range(12)}
    assert len(keys) == 100 * 8 * 12


def test_a_frozen_prefix_computes_no_gradients():
    """No dW in frozen layers, no backward below the first that learns; the others learn as before."""
    freezing = Freezing(DynamicConfig(kind="freezing", start_step=0, end_step=0, target=0.4), 5)
    pipeline, layers, meter, batch = one_rank(freezing, step=1)
    pipeline.run(lambda: batch)
    without = [all(p.grad is None for p in layer.module.parameters()) for layer in layers]
    assert without == [True] * 2 + [False] * 3
    assert meter.backward[:2] == [0.0, 0.0]
    assert min(meter.backward[2:]) > 0
    assert min(meter.forward) > 0


def test_freezing_grows_with_the_steps_and_spares_the_last_layer():
    """Linear from start to end, in steps of ``everySteps``."""
    freezing = Freezing(
        DynamicConfig(kind="freezing", start_step=10, end_step=30, every_steps=10, target=1.0), 8
    )
    found = [freezing.frozen_count(step) for step in (0, 9, 10, 19, 20, 29, 30, 99)]
    assert found == [0] * 4 + [4] * 2 + [7] * 2


def test_change_steps_include_start_and_end():
    """t0, t0 + dt, ..., and the end even where it is no multiple."""
    steps = ChangeSteps(start=2, end=9, every=3)
    assert [step for step in range(12) if steps.acts_at(step)] == [2, 5, 8, 9]


def test_the_corpus_is_text_and_its_order_a_function_of_seed_and_step():
    """Targets are the inputs shifted by a byte."""
    inputs, targets = text_batch(5, 17, 6, 40)
    again, _ = text_batch(5, 17, 6, 40)
    other, _ = text_batch(5, 18, 6, 40)
    assert torch.equal(inputs, again)
    assert not torch.equal(inputs, other)
    assert torch.equal(inputs[:, 1:], targets[:, :-1])
    letters = bytes(text_batch(0, 0, 64, 64)[0].flatten().tolist())
    assert sum(chr(byte).isalpha() or byte == 32 for byte in letters) > 0.7 * len(letters)


def test_padding_takes_factor_times_the_work(monkeypatch):
    """It sleeps for what is left of factor times the CPU seconds, and not at all when late."""
    slept = []
    monkeypatch.setattr("ballast_trainer.gpu_emulation.time.perf_counter", lambda: 100.5)
    monkeypatch.setattr("ballast_trainer.gpu_emulation.time.sleep", slept.append)
    EmulatedSpeed(factor=10).pad(100.0, 0.2)
    EmulatedSpeed(factor=10).pad(100.0, 0.01)
    assert slept == [pytest.approx(1.5)]


class FakeStore(dict):
    """A store in memory that can stop answering."""

    def clone(self):
        """The same store."""
        return self

    def set(self, key, value):
        """Keep."""
        self[key] = value.encode()

    def check(self, keys):
        """Whether all are there."""
        return all(key in self for key in keys)


def test_a_rank_that_stops_counting_is_hung(monkeypatch, capfd, tmp_path):
    """Reported once, by name; a rank that beats is not. Who finds it leaves its stacks and collectives."""
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(torch._C._distributed_c10d, "_dump_nccl_trace", lambda: b"recorded")
    monkeypatch.setenv("TORCH_NCCL_DEBUG_INFO_TEMP_FILE", str(tmp_path / "trace-"))
    monkeypatch.setattr("ballast_trainer.distributed.heartbeat.BEAT_SECONDS", 0.01)
    store, found = FakeStore(), []

    def clock():
        """As many seconds as each of the two has beaten, however slow the machine is."""
        beats = [store.get(f"heartbeat/{name}", b"0").split()[0] for name in ("alive", "watcher")]
        return float(min(map(int, beats)))

    store["heartbeat/silent"] = b"4"
    alive, watcher = (
        RankHeartbeat(
            store, process=name, limits=HangLimits(20, {Limit.ANY: 60}), lost=found.append, clock=clock
        )
        for name in ("alive", "watcher")
    )
    watcher.watch(["alive", "silent", "watcher"])
    eventually(lambda: found, "the silent rank is noticed")
    assert len(found) == 1
    assert found[0].startswith("silent has not been heard of")
    assert "in test_a_rank_that_stops_counting_is_hung" in capfd.readouterr().err
    assert (tmp_path / "trace-3").read_bytes() == b"recorded"
    watcher.close()
    alive.close()


@pytest.mark.parametrize(
    ("patient", "limits"),
    [
        (False, HangLimits(1000, {Limit.ANY: 5, Limit.COMPILE: 100})),
        (True, HangLimits(1000, {Limit.ANY: 5, Limit.COMPILE: 100})),
        (False, HangLimits(1000, {Limit.ANY: 5}, torch_raises=False)),
    ],
)
def test_ranks_that_wait_for_data_wait_as_long_as_they_live(monkeypatch, patient, limits):
    """Those that wait for other work end by its limit, where that is not the longest, or torch would abort.

    A rank of a release that tells its work otherwise is watched, too.
    """
    monkeypatch.setattr("ballast_trainer.distributed.heartbeat.BEAT_SECONDS", 0.01)
    store, found = FakeStore(), []

    def beats():
        return int(store.get("heartbeat/watcher", b"0").split()[0])

    store["heartbeat/busy"] = f"1 {Limit.ANY} 6.0 the batch of step 1".encode()
    store["heartbeat/older"] = b"1 busy with callback.name hooks:told for 7 s"
    watcher = RankHeartbeat(store, process="watcher", limits=limits, lost=found.append, clock=lambda: 0.0)
    with ACTIVITY.waiting(patient=patient):
        watcher.watch(["busy", "older", "watcher"])
        start = beats()
        eventually(lambda: found or (patient and beats() > start + 9), "it ends, or waits on")
    watcher.close()
    assert [text.startswith("busy is busy with the batch of step 1") for text in found] == [True] * (
        not patient
    )


def test_a_rank_alone_shows_where_it_has_been_for_too_long(monkeypatch, capfd, caplog):
    """Nobody else could tell its user, and it works on, also where the process was stopped for long."""
    monkeypatch.setattr("ballast_trainer.distributed.heartbeat.BEAT_SECONDS", 0.01)
    found = []
    beats = itertools.count()
    limits = HangLimits(0, {Limit.ANY: 50})
    alone = RankHeartbeat(None, process="alone", limits=limits, lost=found.append, clock=lambda: next(beats))
    alone.watch(["alone"])
    shown = []
    with ACTIVITY.doing("the batch of step 3"):
        eventually(lambda: shown.append(capfd.readouterr().err) or "Thread" in "".join(shown), "its stacks")
    alone.close()
    assert "in test_a_rank_alone_shows_where_it_has_been_for_too_long" in "".join(shown)
    assert "alone is busy with the batch of step 3 for" in caplog.text
    assert "others" not in caplog.text and not found


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("by_layer", [False, True])
def test_a_layer_that_returns_more_than_tensors_is_named(recompute, by_layer):
    """In a measured step too, which looks at what layers return."""

    class Pair(nn.Linear):
        def forward(self, value):
            return super().forward(value), {1, 2}

    model = Model(layer_count=2, build_layer=lambda index: Pair(4, 4), loss=nn.functional.mse_loss)
    layers = LayerSet(model, TrainingConfig(recompute=recompute), CPU, lambda index, module: module)
    meter = Meter(2, CPU, None)
    meter.start_step(0, by_layer=by_layer)
    stack = LayerStack([layers.make(index) for index in range(2)], meter, 0, CPU)
    with pytest.raises(TrainerError, match=r"^layer 0 returns tuple: a set beside tensors\. To fix: "):
        stack(torch.ones(2, 4))


def test_a_layer_that_saves_no_tensor_is_refused():
    """It would be lost when the layer moves."""

    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"seen": 3}

    model = Model.from_layers([nn.Sequential(Counting(2, 2))], loss=nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match=r"saves '0\._extra_state' as dict.* To fix: register"):
        all_layers(model)


def test_a_batch_norm_over_all_ranks_is_refused():
    """Its forward would wait for stages that have no such layer."""
    layer = nn.Sequential(nn.Linear(4, 4), nn.SyncBatchNorm(4))
    model = Model.from_layers([layer], loss=nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match=r"has a SyncBatchNorm at '1', .*To fix: nn\.BatchNorm1d"):
        all_layers(model)


@pytest.mark.parametrize("dtype", list(WeightType))
def test_a_weight_with_another_order_in_memory_learns_on_from_loaded_state(dtype):
    """As of channels_last: fused kernels go through weight, gradient and state as they lie in memory."""
    config = TrainingConfig(dtype=dtype, precision=Precision.BF16)
    transposed = nn.Linear(6, 4)
    transposed.weight = nn.Parameter(torch.randn(6, 4).T)
    model = Model.from_layers([transposed], loss=nn.functional.mse_loss)
    (here,), (there,) = all_layers(model, config), all_layers(model, config)
    for step in range(3):
        if step == 1:
            there.load({name: value.clone().contiguous() for name, value in here.state().items()})
        for layer in here, there:
            for parameter in layer.module.parameters():
                torch.manual_seed(step)
                parameter.grad = torch.empty_like(parameter).copy_(torch.randn(parameter.shape))
        update([here])
        update([there])
    assert torch.equal(here.module.weight, there.module.weight)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_embeddings_learn_from_dense_gradients(kind):
    """Norms and sums over ranks have no sparse ones; the numbers are the same."""
    embedding = kind(5, 2, sparse=True)
    layers = all_layers(Model.from_layers([embedding], loss=nn.functional.mse_loss))
    for module in (embedding, layers[0].module):
        module(torch.tensor([[1, 3], [1, 0]])).square().sum().backward()
    assert torch.equal(layers[0].module.weight.grad, embedding.weight.grad.to_dense())
    assert squared_gradient_norm(layers.parameters()) > 0


@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (lambda output, target: nn.functional.mse_loss(output, target).detach(), "no weight that learns"),
        (lambda output, target: (output - target).square(), r"has shape \(2, 3\). To fix: return one number"),
        (lambda output, target: 0.0, "is float, not a tensor"),
        (lambda output, target: output.sum().to(torch.complex64), "is complex. To fix: return a real"),
    ],
)
def test_a_loss_from_which_no_backward_begins_is_refused(loss, reason):
    """A job would go on without learning, or end with torch's words."""
    model = Model.from_layers([nn.Linear(3, 3)], loss=loss)
    batch = torch.ones(4, 3), torch.ones(4, 3)
    with pytest.raises(ConfigurationError, match=reason):
        one_stage(model, all_layers(model), 2).run(lambda: batch)


class Counting(nn.Linear):
    """It counts, anneals and draws from generators of its own."""

    def __init__(self, *args):
        super().__init__(*args)
        self.seen, self.scale = 5, 0.5
        self.of_torch = torch.Generator().manual_seed(1)
        self.of_numpy, self.of_python = np.random.default_rng(1), random.Random(1)

    def numbers(self):
        drawn = torch.rand((), generator=self.of_torch).item(), self.of_numpy.random()
        return *drawn, self.of_python.random(), self.seen, self.scale

    def forward(self, value):
        self.seen += 1
        self.scale *= 1.5
        self.last = value.detach()
        return super().forward(value) * sum(self.numbers())


class Steady(nn.Linear):
    """It has numbers and generators of its own that no forward changes; one number becomes a tensor."""

    def __init__(self, *args):
        super().__init__(*args)
        self.unknown, self.of_torch, self.of_system = math.nan, torch.Generator(), random.SystemRandom()
        self.output = 0.0

    def forward(self, value):
        self.output = super().forward(value)
        return self.output


def test_a_trial_tells_of_nothing_that_stays_as_it_was(caplog):
    """A warning is of what has changed alone."""
    model = Model.from_layers([lambda: Steady(3, 3)], loss=nn.functional.mse_loss)
    builder_of_one_stage(model, all_layers(model), 2).probe_partition((torch.ones(4, 3), torch.ones(4, 3)))
    assert [record.getMessage().split()[0] for record in caplog.records] == ["Steady.output"]


def test_a_trial_leaves_what_a_layer_counts_and_tells_that_it_does_not_travel(caplog):
    """State outside of buffers: the first step begins where it would without a trial."""
    model = Model.from_layers([lambda: Counting(3, 3)], loss=nn.functional.mse_loss)
    layers = all_layers(model)
    builder_of_one_stage(model, layers, 2).probe_partition((torch.ones(4, 3), torch.ones(4, 3)))
    assert layers[0].module.numbers() == Counting(3, 3).numbers()
    for name in ("seen", "scale", "last", "of_torch", "of_numpy", "of_python"):
        assert f"Counting.{name} changes in a forward" in caplog.text


class Seen(nn.Linear):
    """It notes its inputs in a buffer that is not persistent, beside one that stays as it is."""

    def __init__(self, *args):
        super().__init__(*args)
        self.register_buffer("seen", torch.zeros(3), persistent=False)
        self.other = nn.Identity()
        self.other.register_buffer("mask", torch.ones(3), persistent=False)

    def forward(self, value):
        self.seen.lerp_(value.detach().mean(0), 0.1)
        return super().forward(value * self.other.mask)


class Halves(nn.Linear):
    """It adds halves to a buffer that begins as a whole number."""

    def __init__(self, persistent):
        super().__init__(3, 3)
        self.register_buffer("seen", torch.tensor(0), persistent=persistent)

    def forward(self, value):
        self.seen = self.seen + 0.5
        return super().forward(value)


def test_checkpoints_and_copies_have_what_a_forward_writes_to():
    """Whoever goes on from one loses no buffer, persistent or not; constant ones are not copied."""
    model = Model.from_layers([lambda: Seen(3, 3)], loss=nn.functional.mse_loss)
    layers, again = all_layers(model), all_layers(model)
    builder_of_one_stage(model, layers, 2).probe_partition((torch.ones(4, 3), torch.ones(4, 3)))
    layers[0].module.seen.fill_(5.0)
    copied = tensors.stored(ALONE, layers)
    assert not any("mask" in key for key in copied)
    tensors.fill(ALONE, again, copied, "the copy")
    assert torch.equal(again[0].module.seen, torch.full((3,), 5.0))


@pytest.mark.parametrize("persistent", [False, True])
def test_parts_that_share_a_buffer_share_it_after_a_move(persistent):
    """What one of them writes, the other reads."""

    def make():
        layer = nn.Sequential(Seen(3, 3), nn.Identity())
        layer[1].register_buffer("seen", layer[0].seen, persistent=persistent)
        return layer

    here, there = (all_layers(Model.from_layers([make], loss=nn.functional.mse_loss))[0] for _ in range(2))
    here.module[0].seen.fill_(5.0)
    there.load(here.moving_state())
    assert there.module[1].seen is there.module[0].seen
    assert torch.equal(there.module[0].seen, torch.full((3,), 5.0))


@pytest.mark.parametrize("persistent", [False, True])
def test_a_buffer_that_a_forward_gave_another_type_keeps_it_after_a_move(persistent):
    """As a count that was whole when the layer was built."""
    model = Model.from_layers([lambda: Halves(persistent)], loss=nn.functional.mse_loss)
    here, there = (all_layers(model)[0] for _ in range(2))
    here.module(torch.ones(1, 3))
    there.load(here.moving_state())
    assert torch.equal(there.module.seen, torch.tensor(0.5))


@pytest.mark.parametrize("before", [None, torch.zeros(2)], ids=["made", "same"])
def test_a_trial_sees_which_buffers_are_written_and_leaves_these_as_they_were(before):
    """One that the first forward makes; a running mean of the zeros that a trial sends to later stages."""
    layer = nn.Linear(1, 1)
    layer.register_buffer("seen", before)
    layer.register_buffer("scale", torch.ones(2))
    layer.inner = nn.Identity()
    layer.inner.register_buffer("scale", layer.scale)
    with in_place(copies_of([layer, layer.inner])) as changed:
        assert changed() == []
        assert layer.inner.scale is layer.scale
        layer.seen = torch.ones(2) if before is None else layer.seen.mul_(0.9)
        assert changed() == [(layer, "seen")]
    assert layer.seen is before
