"""Each kind of change applies to any transformer that has what it needs, or is refused at once."""

import itertools

import pytest
import torch
from ballast_policies.contract.decode import decode
from ballast_policies.contract.job.dynamics import DynamicConfig, PruningSettings, Structure
from ballast_policies.planning.dynamics import DYNAMICS
from ballast_trainer.dynamics.mixture_of_experts import Experts
from ballast_trainer.dynamics.pruning import neurons
from ballast_trainer.dynamics.pruning.neurons import as_linear
from ballast_trainer.dynamics.registry import build_dynamic, build_dynamics, check_changes
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.models.gpt import Block, build_gpt
from ballast_trainer.models.protocol import Model
from torch import nn
from torch.nn import functional
from torch.nn.utils.parametrizations import weight_norm

from tests.support.changes import change
from tests.support.examples import first_daily

SIZES = {"vocab_size": 64, "tie_word_embeddings": False}
LLAMA_LIKE = {
    **SIZES,
    "hidden_size": 16,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
FAMILIES = {
    "llama": LLAMA_LIKE,
    "qwen2": LLAMA_LIKE,
    "qwen3": {**LLAMA_LIKE, "head_dim": 8},
    "gpt2": {**SIZES, "n_embd": 16, "n_layer": 3, "n_head": 4, "bos_token_id": 0, "eos_token_id": 0},
}


def hugging_face(family, **fields):
    """A tiny decoder of transformers with random weights."""
    pytest.importorskip("transformers")
    from ballast_trainer.models.hugging_face import from_config

    torch.manual_seed(0)
    return from_config(**{"model_type": family, **FAMILIES[family], **fields})


class OwnBlock(nn.Module):
    """A user's block with all that a change may need, under names of its own."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.inner = nn.ModuleDict({"look": OwnAttention(width), "think": OwnThinking(width)})

    def forward(self, hidden):
        hidden = hidden + self.inner["look"](hidden)
        return hidden + self.inner["think"](hidden)

    def run_at(self, hidden, positions):
        return self(hidden)

    def mlp_path(self):
        return "inner.think"

    def attention_path(self):
        return "inner.look"


class OwnAttention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.mix = nn.Linear(width, 3 * width)

    def forward(self, hidden):
        q, k, v = self.mix(hidden).unsqueeze(1).chunk(3, -1)
        return functional.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1)


class OwnThinking(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.wide, self.narrow = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, hidden):
        return self.narrow(torch.relu(self.wide(hidden)))


class PlainBlock(nn.Module):
    """A user's block that tells nothing about itself."""

    def __init__(self, width=16):
        super().__init__()
        self.work = nn.Linear(width, width)

    def forward(self, hidden):
        return hidden + self.work(hidden)


def own(block, *, depth=5):
    """A user's model of these blocks, of no named family."""

    def build_layer(index):
        if index == 0:
            return nn.Embedding(64, 16)
        return nn.Linear(16, 64) if index == depth - 1 else block(16)

    return Model(layer_count=depth, build_layer=build_layer, loss=nn.functional.mse_loss)


def changed_layers(model, kind):
    """The model's layers after the change has prepared them, at full strength."""
    config = DynamicConfig(**snake(change(kind, startStep=0, endStep=0)))
    check_changes(model, [config])
    (dynamic,) = build_dynamics([config], model.layer_count, model.family)
    layers = [dynamic.prepare(index, model.build_layer(index)) for index in range(model.layer_count)]
    for layer in layers:
        for module in layer.modules():
            if hasattr(module, "strength"):
                module.strength = 0.75
    return layers


def snake(value):
    return dict(decode(DynamicConfig, value))


@pytest.mark.slow
@pytest.mark.parametrize("kind", sorted(DYNAMICS))
@pytest.mark.parametrize("family", first_daily(["own", *FAMILIES, "gpt"], 2))
def test_each_change_reaches_each_family_and_learns(family, kind):
    """The output differs from the unchanged model's where it should, and gradients come through."""
    torch.manual_seed(0)
    if family == "gpt":
        model = build_gpt(layers=5, dim=16, heads=2, context=24, dropout=0.0)
    else:
        model = own(OwnBlock) if family == "own" else hugging_face(family)
    layers = changed_layers(model, kind)
    tokens = torch.randint(0, 64, (2, 24))
    value = tokens
    for layer in layers:
        value = layer(value)
    value.float().square().mean().backward()
    assert torch.isfinite(value).all()
    names = {type(module).__name__ for layer in layers for module in layer.modules()}
    part = {
        "pruning": "PrunableLinear",
        "sparseAttention": "ChosenAttention",
        "earlyExit": "ExitingBlock",
        "mixtureOfDepths": "RoutedBlock",
        "mixtureOfExperts": "Experts",
    }
    assert kind == "freezing" or part[kind] in names
    learnt = [p for layer in layers for p in layer.parameters()]
    assert sum(p.grad is not None for p in learnt) > len(learnt) / 2


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_decoder_of_hugging_face_computes_as_it_does_itself(family):
    """Layer by layer, at any positions: a subset attends as if the other positions were masked."""
    model = hugging_face(family)
    layers = [model.build_layer(index).eval() for index in range(model.layer_count)]
    hidden = layers[0](torch.arange(10)[None])
    block = layers[1]
    chosen = torch.tensor([[0, 2, 3, 9]])
    alone = block.run_at(hidden[:, chosen[0]], chosen)
    # Changing what is left out changes nothing; the rotation is that of the true places.
    shifted = block.run_at(hidden[:, chosen[0]], chosen + torch.tensor([[0, 1, 1, 4]]))
    rotates = family != "gpt2"
    assert torch.allclose(alone, shifted, atol=1e-6) is not rotates
    every = torch.arange(10)[None]
    torch.testing.assert_close(block.run_at(hidden, every), block(hidden))


@pytest.mark.parametrize("kind", ["earlyExit", "mixtureOfDepths", "mixtureOfExperts", "sparseAttention"])
def test_blocks_that_lack_what_a_change_needs_are_named(kind):
    """A change that would silently do nothing is refused: which layers, of which class, lack what."""
    with pytest.raises(ConfigurationError) as refused:
        changed_layers(own(PlainBlock), kind)
    text = str(refused.value)
    assert kind in text and "(PlainBlock)" in text and "To fix" in text
    member = {"sparseAttention": "attention_path", "mixtureOfExperts": "mlp_path"}.get(kind, "run_at")
    assert member in text


def test_the_last_block_is_looked_at_however_long_the_others_take_to_build(monkeypatch):
    """The answer depends on the model, not on the machine's clock."""
    clock = itertools.count(step=60.0)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    whole = own(OwnBlock, depth=8)
    built = []

    def build_layer(index):
        built.append(index)
        return PlainBlock(16) if index == 6 else whole.build_layer(index)

    model = Model(layer_count=8, build_layer=build_layer, loss=whole.loss)
    with pytest.raises(ConfigurationError, match=r"layer 6 \(PlainBlock\) has no method run_at"):
        check_changes(model, [DynamicConfig(kind="earlyExit")])
    built.clear()
    check_changes(model, [DynamicConfig(kind="sparseAttention")])
    assert max(built) < 3, "one block that changes is enough to know that the change does something"


def test_a_model_without_linear_layers_is_not_pruned_in_silence():
    """Refused before the first step."""
    model = Model(layer_count=2, build_layer=lambda index: nn.Conv1d(4, 4, 1), loss=nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match=r"layers 0 to 1 \(Conv1d\) have no linear layer"):
        check_changes(model, [DynamicConfig(kind="pruning", target=0.5)])


def test_a_block_whose_attention_is_not_torchs_is_refused_as_it_runs():
    """The trial of the first plan runs it, so no step is trained."""
    block = OwnBlock(16)
    block.set_submodule("inner.look", nn.Identity())
    changed = build_dynamic(DynamicConfig(kind="sparseAttention"), 5).prepare(1, block)
    changed.get_submodule("inner.look").strength = 1.0
    with pytest.raises(Exception, match="Identity does not call"):
        changed(torch.randn(1, 8, 16))


def test_layers_that_every_blocks_passes_over_count_as_unchanged():
    """A model in which no layer's index is a multiple of it is refused, not left dense."""
    config = DynamicConfig(**snake({"kind": "mixtureOfExperts", "experts": {"everyBlocks": 9}}))
    with pytest.raises(ConfigurationError, match="everyBlocks: 9 passes over"):
        check_changes(own(OwnBlock), [config])


def test_layers_before_the_first_with_experts_stay_dense():
    """As the first ones of published models; a model without any layer behind them is refused."""

    def experts_from(layer):
        fields = {"kind": "mixtureOfExperts", "experts": {"everyBlocks": 1, "firstLayer": layer}}
        return DynamicConfig(**snake(fields))

    model = own(OwnBlock)
    change_ = build_dynamic(experts_from(2), model.layer_count)
    layers = [change_.prepare(index, model.build_layer(index)) for index in range(model.layer_count)]
    assert [any(isinstance(part, Experts) for part in layer.modules()) for layer in layers] == [
        index in (2, 3) for index in range(5)
    ]
    with pytest.raises(ConfigurationError, match="an index below firstLayer: 9"):
        check_changes(model, [experts_from(9)])


@pytest.mark.parametrize("name", ["recurrent", "autoencoder"])
@pytest.mark.parametrize("kind", ["earlyExit", "mixtureOfDepths", "mixtureOfExperts", "sparseAttention"])
def test_a_model_of_ours_without_blocks_is_refused_from_its_name(name, kind):
    """So the operator can refuse it at admission, where no model is built."""
    job = {
        "totalSteps": 2,
        "model": {"name": name, "layers": 4},
        "dynamics": [change(kind, startStep=0, endStep=1)],
    }
    with pytest.raises(ConfigurationError, match=f"models of the family {name}"):
        ValidatedJob.from_mapping(job)


@pytest.mark.slow
def test_a_change_of_attention_is_refused_where_attention_has_windows():
    """Chosen keys would be those of all positions, not of the window's."""
    model = hugging_face("llama", model_type="mistral", sliding_window=4)
    with pytest.raises(ConfigurationError, match="attention_path"):
        changed_layers(model, "sparseAttention")


def test_two_changes_that_route_around_blocks_are_refused():
    """Early exit and mixture of depths would both decide which positions a block sees."""
    pair = [DynamicConfig(kind=kind, end_step=1, target=0.5) for kind in ("earlyExit", "mixtureOfDepths")]
    with pytest.raises(ConfigurationError, match="both route"):
        build_dynamics(pair, 5)


def test_the_order_in_which_changes_are_listed_does_not_matter():
    """Wrappers of whole blocks come last, so what they wrap is changed too."""
    for kinds in (("earlyExit", "mixtureOfExperts", "pruning"), ("pruning", "mixtureOfExperts", "earlyExit")):
        configs = [DynamicConfig(**snake(change(kind, startStep=0, endStep=1))) for kind in kinds]
        block = Block(16, 2, 0.0)
        for dynamic in build_dynamics(configs, 5):
            block = dynamic.prepare(2, block)
        names = {type(module).__name__ for module in block.modules()}
        assert {"ExitingBlock", "Experts", "PrunableLinear"} <= names
        # Of the experts the weights are pruned, of the router none.
        assert type(block.block.mlp.router) is nn.Linear


class NarrowFirst(nn.Module):
    """Names what narrows before what widens."""

    def __init__(self, width=8, inner=24):
        super().__init__()
        self.down, self.up = nn.Linear(inner, width), nn.Linear(width, inner)

    def forward(self, hidden):
        return self.down(torch.relu(self.up(hidden)))


class Layer:
    """As little of a layer as pruning needs."""

    optimizer = None

    def replace_parameter(self, old, new, state):
        pass


@pytest.mark.parametrize("inner", [24, 8])
def test_the_neurons_are_found_in_whatever_order_an_mlp_names_its_layers(inner):
    """What is left computes as the whole with the others' outputs at zero."""
    mlp = NarrowFirst(inner=inner)
    assert neurons.lacks(mlp, mlp) == ""
    up, down = mlp.up, mlp.down
    hidden = torch.randn(2, 3, 8)
    keep = torch.ones(inner, dtype=torch.bool)
    keep[::2] = False
    wanted = functional.linear(torch.relu(up(hidden)) * keep, down.weight, down.bias)
    neurons.prepare(mlp)
    (found,) = neurons.prepared(mlp)
    assert (found.had, found.out) == (inner, mlp.down)
    found.remove(keep, Layer())
    torch.testing.assert_close(mlp(hidden), wanted)


def test_an_mlp_whose_inside_has_a_fixed_width_is_refused():
    """A norm between the layers knows how many neurons there are."""
    mlp = nn.Sequential(nn.Linear(8, 24), nn.LayerNorm(24), nn.GELU(), nn.Linear(24, 8))
    assert "fails with a neuron less" in neurons.lacks(mlp, mlp)
    usual = nn.Sequential(nn.Linear(8, 24), nn.GELU(), nn.Dropout(0.1), nn.Linear(24, 8))
    assert neurons.lacks(usual, usual) == ""


class Scaled(nn.Linear):
    def forward(self, hidden):
        return 2 * super().forward(hidden)


@pytest.mark.parametrize(
    "linear",
    [Scaled(4, 4), weight_norm(nn.Linear(4, 4)), nn.MultiheadAttention(4, 2).out_proj],
    ids=["own forward", "parametrized", "of MultiheadAttention"],
)
def test_a_linear_layer_that_computes_otherwise_is_left_alone(linear):
    """Its weight alone does not say what it computes."""
    assert as_linear(linear) is None
    settings = PruningSettings(structure=Structure.WEIGHTS)
    change = build_dynamic(DynamicConfig(kind="pruning", target=0.9, pruning=settings), 3)
    assert "no linear layer" in change.lacks(1, nn.Sequential(linear))
