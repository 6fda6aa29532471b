"""Operations of a step, and the part of the GPUs' peak that training uses."""

import functools
import logging

import pytest
import torch
from ballast_policies.contract.job.training import Precision
from ballast_trainer.models.flops import peak_flops, step_flops
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.protocol import Model
from torch import nn


def loss(output, targets):
    return nn.functional.mse_loss(output, targets)


def model_of(*layers) -> Model:
    return Model.from_layers(layers, loss=loss)


def test_a_linear_layer_has_six_operations_a_weight_and_sample():
    """Two for the forward, four for the backward (PaLM, appendix B: 6 N a token)."""
    model = model_of(nn.Linear(32, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
    assert step_flops(model, torch.zeros(10, 32)) == 6 * 10 * (32 * 64 + 64 * 8)


def test_attention_counts_with_the_square_of_the_length():
    """QK^T and the weighted sum: 12 b s^2 d a step, beside 24 b s d^2 of the projections."""
    batch, length, width = 2, 16, 8

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

        def forward(self, x):
            q, k, v = self.qkv(x)[:, None].chunk(3, dim=-1)
            return self.out(nn.functional.scaled_dot_product_attention(q, k, v)[:, 0])

    counted = step_flops(model_of(Attention), torch.zeros(batch, length, width))
    assert counted == 24 * batch * length * width**2 + 12 * batch * length**2 * width


def test_a_layer_that_takes_indices_is_counted_with_integers():
    model = model_of(nn.Embedding(100, 16), nn.Linear(16, 4, bias=False))
    assert step_flops(model, torch.zeros(3, 5, dtype=torch.long)) == 6 * 15 * 16 * 4


@pytest.mark.slow
@pytest.mark.parametrize("model_type", ["llama", "gpt_neox"])
def test_hugging_face_decoders_are_counted(model_type):
    """Their masks depend on values unless they are traced: 6 operations a weight and token, and attention."""
    pytest.importorskip("transformers")
    from ballast_trainer.models.hugging_face import from_config

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model = from_config(model_type=model_type, vocab_size=64, num_key_value_heads=4, **sizes)
    batch, length = 2, 16
    counted = step_flops(model, torch.zeros(batch, length, dtype=torch.long))
    matrices = 3 if model_type != "gpt_neox" else 2
    weights = 2 * (4 * 32 * 32 + matrices * 32 * 64) + 32 * 64
    rotations = counted - 6 * batch * length * weights - 2 * 12 * batch * length**2 * 32
    assert 0 <= rotations <= 0.01 * counted


RUNS = []


class Noted(nn.Linear):
    """Its rows take part in as many operations as it has copies; each run is noted."""

    def __init__(self, copies):
        super().__init__(8, 8, bias=False)
        self.copies = copies

    def forward(self, x):
        RUNS.append(self.copies)
        return sum(super(Noted, self).forward(x) for _ in range(self.copies))


@pytest.mark.parametrize(("copies", "runs"), [([1, 1, 1], [1]), ([1, 2, 1, 2], [1, 2])])
def test_of_alike_layers_one_runs_and_all_are_counted(copies, runs):
    """Alike in all that they are: of the same class and size alone is not enough."""
    RUNS.clear()
    model = model_of(*(functools.partial(Noted, number) for number in copies))
    assert step_flops(model, torch.zeros(3, 8)) == 6 * 3 * 8 * 8 * sum(copies)
    assert runs == RUNS


def test_weights_and_random_numbers_stay_as_they_are():
    """Counting builds the layers again, and leaves no trace of it."""
    layer = nn.Linear(4, 4)
    before, state = layer.weight.clone(), torch.random.get_rng_state()
    step_flops(model_of(layer, lambda: nn.Linear(4, 2)), torch.zeros(1, 4))
    assert torch.equal(layer.weight, before)
    assert layer.weight.device.type == "cpu"
    assert torch.equal(torch.random.get_rng_state(), state)


def test_a_layer_whose_work_depends_on_values_is_not_counted():
    class Sorted(nn.Module):
        def forward(self, x):
            return x[x[:, 0] > 0]

    assert step_flops(model_of(Sorted, lambda: nn.Linear(4, 4)), torch.zeros(3, 4)) is None
    assert step_flops(model_of(nn.ReLU()), torch.zeros(3, 4)) is None


def test_a_layer_that_cannot_be_counted_leaves_no_traceback_of_torch(caplog):
    """An operation that has no fp32 without data, such as that of experts: one line tells it."""
    caplog.set_level(logging.INFO)
    of_torch = logging.getLogger("torch._subclasses.fake_tensor")
    of_torch.addHandler(caplog.handler)
    try:
        assert step_flops(model_of(nn.Linear(5, 5)), torch.zeros(3, 4)) is None
    finally:
        of_torch.removeHandler(caplog.handler)
    assert [record.name for record in caplog.records] == ["ballast_trainer.models.flops"]


@pytest.mark.parametrize(
    ("device_name", "precision", "teraflops"),
    [("NVIDIA H100 80GB HBM3", Precision.BF16, 989.4), ("Tesla V100-SXM2-16GB", Precision.FP16, 125)],
)
def test_the_peak_is_that_of_the_data_sheet_in_the_precision(monkeypatch, device_name, precision, teraflops):
    """The driver's name of the device finds the catalogue's row."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: device_name)
    assert peak_flops(torch.device("cuda", 0), precision) == pytest.approx(teraflops * 1e12, rel=0.01)


def test_a_cpu_and_an_unknown_gpu_have_no_peak(monkeypatch):
    """The part of it is then left out."""
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _device: "Prototype 9")
    assert peak_flops(torch.device("cpu"), Precision.FP32) is None
    assert peak_flops(torch.device("cuda", 0), Precision.FP32) is None


def built(index, **args):
    """A layer of a GPT of six, from one state of the random numbers."""
    torch.manual_seed(3)
    return build_gpt(layers=6, dim=16, heads=2, context=8, **args).build_layer(index)


@pytest.mark.parametrize("index", [1, 4])
def test_weights_of_deep_blocks_begin_smaller(index):
    """The linear maps of the l-th block by the square root of l; biases and norms as without it."""
    plain, scaled = built(index), built(index, depth_scaled=True)
    torch.testing.assert_close(scaled.mlp.up.weight * index**0.5, plain.mlp.up.weight)
    torch.testing.assert_close(scaled.attention.qkv.weight * index**0.5, plain.attention.qkv.weight)
    torch.testing.assert_close(scaled.mlp.up.bias, plain.mlp.up.bias)
    torch.testing.assert_close(scaled.mlp_norm.weight, plain.mlp_norm.weight)


def test_the_tokens_vectors_begin_as_wide_as_asked():
    """Positions keep their own."""
    plain, wide = built(0), built(0, embedding_std=1.0)
    torch.testing.assert_close(wide.token.weight * 0.02, plain.token.weight)
    torch.testing.assert_close(wide.position.weight, plain.position.weight)
