"""Weights of a builder's modules: made by layer, and the same as those of the whole model."""

import contextlib
import copy
import logging
import random
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from ballast_policies.contract.job.model import DataConfig, ModelConfig
from ballast_policies.contract.job.training import TrainingConfig
from ballast_policies.contract.messages import ExitCode
from ballast_trainer.distributed.axis import Axis
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.models import deferred
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import build_model
from ballast_trainer.seeding import host_seeded
from ballast_trainer.tensor_parallel.layers import split_layer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support.examples import first_daily
from tests.support.gang import Gang
from tests.support.jobs import small_job
from tests.trainer.models import families, large_models

SEED = 5
FAMILIES = ["mixtral with its routers' loss", "llama", "gpt2", "bert", "vit", "gemma2", "mamba", "opt"]
HUGGING_FACE = "ballast_trainer.models.hugging_face"


@pytest.fixture
def all_deferred(monkeypatch):
    """Also weights as small as those of tests."""
    monkeypatch.setattr(deferred, "SMALLEST_BYTES", 1)


class Derived(nn.Module):
    """Weights from operations, and from others' values."""

    def __init__(self):
        super().__init__()
        self.drawn = nn.Parameter(torch.randn(8, 8) * 0.5)
        self.register_buffer("copied", self.drawn.detach().clone())
        self.turned = nn.Parameter(self.drawn.t().contiguous() + 1)
        nn.init.constant_(self.drawn, float(self.turned.detach().sum()))


def modules():
    """Everything that people do to weights as they build a model, and a tie."""
    read = nn.Linear(8, 8)
    lines = numpy.zeros((8, 8), dtype=numpy.float32)
    before = Derived()
    before.turned = nn.Parameter(read.weight * 2)
    with torch.no_grad():
        for number in range(8):
            # The same memory, with other numbers each time.
            lines[:] = number + 1
            read.weight[number].copy_(torch.from_numpy(lines)[0] * 3)
        read.weight.add_(before.drawn)
    after = nn.Parameter(read.weight + 1)
    free = torch.zeros(8)
    free.numpy()[:] = 7
    written = nn.Linear(8, 8, device=read.weight.device)
    written.bias.data.copy_(free)
    written.weight.data[0] = 5
    written.weight.data = torch.randn(8, 8)
    written.weight.data[1].normal_(generator=torch.Generator().manual_seed(4))
    head = nn.Linear(8, 16, bias=False)
    embedding = nn.Embedding(16, 8, padding_idx=0)
    head.weight = embedding.weight
    nn.init.trunc_normal_(embedding.weight, std=0.02)
    clones = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    normed = nn.Sequential(
        nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8)),
        nn.utils.parametrizations.orthogonal(nn.Linear(8, 8)),
    )
    before.drawn = after
    free_start = nn.Linear(8, 8)
    nn.init.orthogonal_(free_start.weight)
    layers = [embedding, copy.deepcopy(Derived()), before, read, written, clones, normed, free_start, head]
    return nn.ModuleList(layers).to(torch.float64)


def own(**options):
    """The layers of a user, and a loss that keeps weights of its own."""
    layers = modules()
    teacher = copy.deepcopy(nn.Linear(8, 8)).requires_grad_(False)
    middle = layers[4].weight[0]

    def loss(output, targets):
        return (teacher(targets) * middle.detach().float()).sum() + output.sum()

    return Model.from_layers(list(layers), loss=loss, batch=lambda *_: 0, **options)


def built(name, **args):
    data = DataConfig(name=f"{__name__}:batches")
    return build_model(ModelConfig(name=name, args=args), data, seed=SEED)


def batches():
    return lambda seed, step, size: None


def tensors(module):
    return module.state_dict() | dict(module.named_buffers())


def assert_equal_layers(model, plain):
    for index in range(plain.layer_count):
        found, wanted = tensors(model.build_layer(index)), tensors(plain.build_layer(index))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted), index


@pytest.mark.slow
def test_layers_have_the_weights_of_the_whole_model(all_deferred):
    """Bit for bit, in any order, whatever made them; what is used besides the layers has its values."""
    model = built(f"{__name__}:own")
    with host_seeded(SEED):
        plain = own()
        after = torch.rand(3)
    weights = [one for i in range(model.layer_count) for one in model.kept_layer(i).parameters()]
    assert sum(one.is_meta for one in weights) > 0.9 * len(weights)
    assert_equal_layers(model, plain)
    assert torch.equal(model.loss(torch.ones(2), torch.ones(8)), plain.loss(torch.ones(2), torch.ones(8)))
    assert model.tied == plain.tied != ()
    with host_seeded(SEED), deferred.DeferredWeights().building():
        own()
        assert torch.equal(torch.rand(3), after)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_daily(FAMILIES))
def test_a_model_of_transformers_has_the_weights_of_its_class(all_deferred, tmp_path, name):
    """Drawn as the class draws them, or read from its checkpoint one tensor after the other."""
    pytest.importorskip("transformers")
    from ballast_trainer.models.hugging_face import from_config, pretrained

    arguments = families.arguments(name)
    drawn = built(f"{HUGGING_FACE}:from_config", **arguments)
    with host_seeded(SEED):
        plain = from_config(**arguments)
    assert all(one.is_meta for i in range(drawn.layer_count) for one in drawn.kept_layer(i).parameters())
    assert_equal_layers(drawn, plain)
    whole = {
        drawn.name_of(index, key): value
        for index in range(drawn.layer_count)
        for key, value in drawn.build_layer(index).state_dict().items()
    }
    drawn.save_whole(whole, tmp_path / "saved")
    read = built(f"{HUGGING_FACE}:pretrained", checkpoint=str(tmp_path / "saved"))
    assert all(one.is_meta for i in range(read.layer_count) for one in read.kept_layer(i).parameters())
    assert_equal_layers(read, pretrained(checkpoint=str(tmp_path / "saved")))


@pytest.mark.slow
def test_a_layer_that_comes_from_another_rank_gets_memory_alone(all_deferred, monkeypatch):
    """Its values are not computed, or read, only to be replaced; buffers that do not come are there."""
    model = built(f"{__name__}:own")
    state = {index: model.build_layer(index).state_dict() for index in (3, 4)}
    monkeypatch.setattr(deferred.DeferredWeights, "value", None)
    for index, sent in state.items():
        with deferred.values_follow():
            layer = model.build_layer(index)
        layer.load_state_dict(sent)
        assert all(torch.equal(value, sent[name]) for name, value in layer.state_dict().items())


def looked_at():
    """A builder that looks at the memory of a weight."""
    layer = nn.Linear(5000, 4000)
    layer.weight.detach().numpy()[0, 0] = 2
    return Model.from_layers([layer], loss=nn.functional.mse_loss, batch=lambda *_: 0)


def by_a_thread():
    """Builders whose threads write to a weight, and to what a weight is made of."""
    layer, numbers = nn.Linear(8, 8), torch.zeros(8, 8)
    with ThreadPoolExecutor() as pool:
        pool.submit(layer.weight.detach().fill_, 3.0).result()
        pool.submit(numbers.fill_, 5.0).result()
    other = nn.Linear(8, 8)
    other.weight.data.copy_(numbers)
    return Model.from_layers([layer, other], loss=nn.functional.mse_loss, batch=lambda *_: 0)


def copied_by_a_function():
    """A layer that is made of another when it is built."""
    layer = nn.Linear(8, 8)
    layers = [layer, lambda: copy.deepcopy(layer)]
    return Model.from_layers(layers, loss=nn.functional.mse_loss, batch=lambda *_: 0)


@pytest.mark.parametrize("builder", [by_a_thread, copied_by_a_function])
def test_what_cannot_be_seen_is_not_deferred(all_deferred, builder):
    with host_seeded(SEED):
        plain = builder()
    assert_equal_layers(built(f"{__name__}:{builder.__name__}"), plain)


@pytest.mark.slow
def test_a_model_that_is_built_as_a_whole_is_told(caplog):
    """With the bytes that each rank keeps, and the reason; its weights are what the builder made of them."""
    with caplog.at_level(logging.WARNING):
        model = built(f"{__name__}:looked_at")
    assert (
        "every rank keeps 0.08 GB" in caplog.text and "the memory of a parameter is looked at" in caplog.text
    )
    assert model.build_layer(0).weight[0, 0] == 2


class Odd(nn.Module):
    """A linear layer, and what ``more`` makes of it."""

    def __init__(self, more):
        super().__init__()
        self.inner = nn.Linear(8, 6)
        more(self)


def noise(module):
    module.noise = torch.rand(3)


def buffers_of_numbers(module):
    module.register_buffer("drawn", torch.rand(4))
    module.register_buffer("unsaved", torch.randn(4), persistent=False)
    module.python, module.numpy = random.random(), numpy.random.rand(2)


def kept_value(module):
    module.scale = float(module.inner.weight.detach().abs().max())


def kept_copy(module):
    module.register_buffer("first", module.inner.weight.detach().clone(), persistent=False)


def kept_of_one_that_is_gone(module):
    module.left = nn.Linear(4, 4).weight.detach()


def lists(module):
    module.values = module.inner.bias.tolist()
    module.row = torch.tensor([module.inner.weight.detach()[0, 0], 1.0])


def seen_by_numpy(module):
    module.array = numpy.array(module.inner.weight.detach().numpy())


def drawn_by_the_users_generator(module):
    generator = torch.Generator().manual_seed(3)
    nn.init.normal_(module.inner.weight, generator=generator)
    module.state = generator.get_state()


def read_by_a_thread(module):
    with ThreadPoolExecutor(1) as pool:
        module.total = pool.submit(lambda: module.inner.weight.detach().sum().item()).result()


def unsaved_parameter(module):
    def leave_out(module, state, prefix, metadata):
        del state[f"{prefix}inner.bias"]

    def put_back(module, state, prefix, *others):
        state[f"{prefix}inner.bias"] = module.inner.bias

    module.register_state_dict_post_hook(leave_out)
    module.register_load_state_dict_pre_hook(put_back)


def swallows_errors(module):
    with contextlib.suppress(Exception):
        module.total = module.inner.weight.detach().sum()


def scaled(module):
    nn.init.xavier_normal_(module.inner.weight)
    nn.init.zeros_(module.inner.bias)
    with torch.no_grad():
        module.inner.weight[0].copy_(torch.arange(8.0))
        module.inner.weight.div_(3)
        module.mask = torch.ones_like(module.inner.weight)
    module.view = module.inner.weight.detach()[1]
    module.doubled = copy.deepcopy(module.inner).double()
    module.embedding = nn.Embedding(5, 4, padding_idx=1)
    module.norm = nn.BatchNorm1d(6)
    module.recurrent = nn.LSTM(4, 4)
    module.attention = nn.MultiheadAttention(8, 2)


def truncated(module):
    nn.init.trunc_normal_(module.inner.weight, std=0.02)


def orthogonal(module):
    nn.init.orthogonal_(module.inner.weight)


def parametrized(module):
    nn.utils.parametrizations.spectral_norm(module.inner)
    module.normed = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))


def assigned_and_sized(module):
    module.free = nn.Parameter(torch.randn(4))
    module.inner.weight.data = torch.randn(6, 8)
    module.old = module.inner.bias.data
    module.inner.bias.data = torch.zeros(6)


def drawn_aside(module):
    with torch.random.fork_rng():
        module.drawn = torch.rand(2)


def seeded_between(module):
    torch.manual_seed(3)
    module.other = nn.Linear(2, 2)


def plain(module):
    pass


SKIPPED = (scaled, plain)
ODD = (
    *(noise, buffers_of_numbers, kept_value, kept_copy, kept_of_one_that_is_gone, lists, seen_by_numpy),
    *(
        drawn_by_the_users_generator,
        read_by_a_thread,
        unsaved_parameter,
        swallows_errors,
        orthogonal,
        truncated,
    ),
    *(parametrized, assigned_and_sized, drawn_aside, seeded_between),
)


def everything(module):
    """All that modules have, by path."""
    found = {}
    for path, part in module.named_modules():
        for name, value in vars(part).items():
            held = dict(enumerate(value)) if isinstance(value, list) else value
            for key, one in (held if isinstance(held, dict) else {"": held}).items():
                if isinstance(one, torch.Tensor | numpy.ndarray | float):
                    found[path, name, key] = one
    return found


def assert_same_in_all(found, wanted):
    found, wanted = everything(found), everything(wanted)
    assert found.keys() == wanted.keys()
    for at, one in wanted.items():
        if isinstance(one, torch.Tensor):
            assert torch.equal(found[at], one), at
            assert (found[at].dtype, found[at].stride(), found[at]._version, type(found[at])) == (
                *(one.dtype, one.stride(), one._version),
                type(one),
            ), at
        else:
            assert numpy.array_equal(found[at], one), at


class Draws(TorchDispatchMode):
    """Counts the operations that draw numbers."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += torch.Tag.nondeterministic_seeded in func.tags
        return func(*args, **(kwargs or {}))


def layer_set(*layers, prepare=lambda index, module: module):
    model = Model.from_layers(layers, loss=nn.functional.mse_loss, batch=lambda *_: 0)
    return LayerSet(model, TrainingConfig(seed=SEED), torch.device("cpu"), prepare)


@pytest.mark.parametrize("in_preparation", [False, True], ids=["built", "prepared"])
@pytest.mark.parametrize("more", [*SKIPPED, *ODD], ids=lambda one: one.__name__)
def test_a_layer_of_a_function_whose_values_follow_is_as_if_built_whole(more, in_preparation):
    """Parameters have what arrives, and all else what it had, whatever the function does besides."""

    def prepare(_, module):
        more(module)
        return module

    layers = (
        layer_set(lambda: Odd(lambda _: None), prepare=prepare)
        if in_preparation
        else layer_set(lambda: Odd(more))
    )
    whole = layers.make(0)
    with Draws() as drawn, deferred.values_follow():
        layer = layers.make(0)
    assert drawn.count == 0 or more not in SKIPPED
    for one in (whole, layer):
        one.load(whole.moving_state())
    assert_same_in_all(layer.module, whole.module)


@pytest.mark.parametrize("ranks", [1, 2])
def test_no_numbers_are_drawn_for_a_layer_whose_values_follow(ranks):
    """Each layer of our models, however they start their weights: whole, and a tensor rank's part."""
    axis = Axis(ranks=tuple(range(ranks)))

    def prepare(index, module):
        return split_layer(module, axis)

    model = build_gpt(layers=3, dim=16, heads=2, depth_scaled=True)
    layers = LayerSet(model, TrainingConfig(seed=SEED), torch.device("cpu"), prepare)
    for index in range(3):
        with Draws() as whole:
            layers.make(index)
        with Draws() as following, deferred.values_follow():
            layers.make(index)
        assert following.count == 0 < whole.count


MODULE = "tests.trainer.models.large_models"
WHOLE_BYTES = 200e6


def config(name, args):
    text = {"name": "tests.support.held_data:text", "args": {"context": 8}}
    model, training = {"name": f"{MODULE}:{name}", "args": args}, {"optimizer": f"{MODULE}:noting_sgd"}
    data = None if name == "modules" else text
    return small_job(model, data=data, steps=1, microbatches=4, training=training)


@pytest.mark.slow
@pytest.mark.parametrize("name", first_daily(["modules", "configured", "read"]))
def test_each_of_four_ranks_stays_far_below_the_whole_model(tmp_path, name):
    """Random weights, those of a checkpoint, and modules of one's own."""
    args = {}
    if name != "modules":
        pytest.importorskip("transformers")
    if name == "read":
        import transformers

        made = transformers.AutoConfig.for_model(**large_models.LLAMA)
        transformers.LlamaForCausalLM(made).save_pretrained(tmp_path / "whole")
        args = {"checkpoint": str(tmp_path / "whole")}
    gang = Gang.run(tmp_path / "gang", config(name, args), ranks=4, variables={"NOTES": str(tmp_path)})
    try:
        assert set(gang.exit_codes().values()) == {ExitCode.OK}, gang.errors()
    finally:
        gang.close()
    grown = [int((tmp_path / str(rank)).read_text()) for rank in range(4)]
    # A quarter of the layers, and some megabytes for others.
    assert max(grown) < 0.45 * WHOLE_BYTES
