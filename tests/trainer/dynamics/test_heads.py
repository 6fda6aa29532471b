"""Pruning of attention heads: layers that compute less at any sparsity, in every family of decoders."""

import pytest
import torch
from ballast_policies.contract.job.dynamics import DynamicConfig, PruningSettings, Structure
from ballast_policies.contract.job.training import TrainingConfig
from ballast_trainer.dynamics.pruning import heads
from ballast_trainer.dynamics.registry import build_dynamic, check_changes
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.models.gpt import build_gpt
from torch import nn
from torch.nn import functional

from tests.support.examples import first_daily
from tests.trainer.dynamics.test_suits_model import FAMILIES, OwnBlock, hugging_face, own
from tests.trainer.layers.trained_layers import ALONE, all_layers


def head_pruning(target, layers):
    settings = PruningSettings(structure=Structure.HEADS)
    config = DynamicConfig(kind="pruning", start_step=2, end_step=6, target=target, pruning=settings)
    return config, build_dynamic(config, layers)


def held(model, dynamic):
    return all_layers(model, TrainingConfig(seed=0), dynamic.prepare)


def model_of(family):
    if family == "gpt":
        return build_gpt(layers=5, dim=16, heads=4, context=8, dropout=0.0)
    return hugging_face(family)


@pytest.mark.slow
@pytest.mark.parametrize("family", first_daily(["gpt", *FAMILIES], 2))
def test_the_weakest_heads_of_the_whole_model_go(family):
    """What is left computes as if the others gave nothing; half of them are half of the products, and the
    optimizer continues. Each layer keeps its best one.
    """
    model = model_of(family)
    config, dynamic = head_pruning(0.5, model.layer_count)
    check_changes(model, [config])
    layers = held(model, dynamic)
    had = sum(dynamic.counts(layer)[0] for layer in layers)
    for layer in layers:
        for p in layer.module.parameters():
            p.grad = torch.randn_like(p)
        layer.optimizer.step()
    layer = layers[1].module.eval()
    (units,) = heads.prepared(layer)
    hidden = torch.randn(2, 6, 16)
    full, scores, out = units.out.weight.clone(), units.scores(), units.out
    everywhere = {at.index: one.scores() for at in layers for one in heads.prepared(at.module)}
    weakest = torch.cat(list(everywhere.values())).topk(had // 2).values.min()
    dynamic.apply(6, layers, ALONE)
    expected = {index: max(1, int((of >= weakest).sum())) for index, of in everywhere.items()}
    assert {at.index: dynamic.counts(at)[1] for at in layers if at.index in expected} == expected
    kept = heads.prepared(layer)[0].kept
    pruned = layer(hidden)
    other = held(model_of(family), dynamic)
    for source, target in zip(layers, other, strict=True):
        target.load({name: value.clone() for name, value in source.state().items()})
    dynamic.reapply(7, other)
    assert torch.equal(other[1].module.eval()(hidden), pruned), "a rank that receives it computes the same"
    keep = torch.zeros(len(scores), dtype=torch.bool)
    keep[scores.topk(kept).indices] = True
    assert torch.equal(out.weight, full[:, keep.repeat_interleave(units.columns)])
    assert out.weight.numel() == full.numel() * kept // len(scores)
    assert layers[1].optimizer.state[out.weight]["exp_avg"].shape == out.weight.shape
    pruned.sum().backward()
    assert out.weight.grad.shape == out.weight.shape


@pytest.mark.slow
@pytest.mark.parametrize("family", first_daily([*FAMILIES, "gpt"]))
def test_a_head_that_gives_nothing_leaves_nothing_behind(family):
    """Removing a head whose map out is zero changes no output."""
    model = model_of(family)
    _, dynamic = head_pruning(0.5, model.layer_count)
    layers = held(model, dynamic)
    layer = layers[1].module.eval()
    (units,) = heads.prepared(layer)
    with torch.no_grad():
        units.out.weight[:, : units.columns] = 0
    hidden = torch.randn(2, 6, 16)
    before = layer(hidden)
    units.remove(units.scores() > 0, layers[1])
    assert heads.prepared(layer)[0].kept == units.had - 1
    torch.testing.assert_close(layer(hidden), before)


class CountingAttention(nn.Module):
    """Counts its heads by itself, and would fail with fewer; or takes their number from its weights."""

    def __init__(self, width, follows):
        super().__init__()
        self.head_dim, self.follows = 4, follows
        self.mix, self.back = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, hidden):
        size, length, width = hidden.shape
        count = -1 if self.follows else width // 4
        q, k, v = self.mix(hidden).view(size, length, 3, count, 4).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.back(mixed.transpose(1, 2).reshape(size, length, -1))


@pytest.mark.parametrize("follows", [False, True])
def test_an_own_attention_is_tried_with_a_head_less(follows):
    """One that counts heads itself is refused before the first step, with what to change.

    Each is tried: two layers of one class may be made with other settings.
    """

    def block(width):
        made = OwnBlock(width)
        made.inner["look"] = CountingAttention(width, follows)
        return made

    config, _ = head_pruning(0.5, 5)
    if follows:
        check_changes(own(block), [config])
        return
    with pytest.raises(ConfigurationError, match=r"fails with a head less.*by -1 and head_dim"):
        check_changes(own(block), [config])


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (own(OwnBlock), "without the attribute head_dim"),
        (
            build_gpt(layers=4, dim=16, heads=1, context=8, dropout=0.0),
            "with one head of keys, and the best of a layer stays",
        ),
    ],
    ids=["no heads", "one each"],
)
def test_attentions_that_can_lose_no_head_are_refused(model, words):
    """By what they lack; the best head of a layer stays, so that nothing would ever be removed."""
    config, _ = head_pruning(0.5, model.layer_count)
    with pytest.raises(ConfigurationError, match=words):
        check_changes(model, [config])
