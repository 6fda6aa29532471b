"""Weights of a builder's modules: made by layer, and the same as those of the whole model."""

import copy
import logging
from concurrent.futures import ThreadPoolExecutor

import numpy
import pytest
import torch
from ballast_policies.contract.job.model import DataConfig, ModelConfig
from ballast_trainer.models import deferred
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.registry import build_model
from ballast_trainer.seeding import host_seeded
from torch import nn

from tests.support.examples import first_daily
from tests.trainer.models import families

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
