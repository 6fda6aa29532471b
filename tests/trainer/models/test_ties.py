"""Parameters that layers share are found however they come to be shared; what cannot be tied is refused."""

import functools
import re

import pytest
import torch
from ballast_trainer.config import read_job_config
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from ballast_trainer.layers.layer import LayerSet
from ballast_trainer.models.gpt import build_gpt
from ballast_trainer.models.hugging_face import from_config
from ballast_trainer.models.protocol import Model
from ballast_trainer.models.ties import merged
from ballast_trainer.tied_model import check_ties, find_ties, tied_model, with_ties
from torch import nn

from tests.support.jobs import small_job
from tests.trainer.layers.trained_layers import all_layers
from tests.trainer.models import tied_models

ENDS = ((0, "weight"), (5, "weight"))


def cached_but_apart():
    made = [nn.Linear(4, 4) for _ in range(3)]
    return Model(layer_count=3, build_layer=lambda index: made[index], loss=nn.functional.mse_loss)


def job(**fields):
    return small_job("tests.trainer.models.tied_models:of_modules", steps=3, **fields)


@pytest.mark.parametrize("build", [b for b in tied_models.BUILDERS if b is not tied_models.one_block])
def test_an_embedding_and_a_head_that_share_a_weight_are_found(build):
    """As modules, by a closure, by a cache, as module and function, or stated."""
    assert find_ties(build(), seed=0) == (ENDS,)


def test_each_parameter_of_a_block_that_comes_several_times_is_a_tie():
    """As well as the ends."""
    names = ("inner.bias", "inner.weight", "over_words.bias", "over_words.weight")
    blocks = [tuple((layer, name) for layer in (1, 2, 3, 4)) for name in names]
    assert tied_models.one_block().tied == (ENDS, *blocks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "fields", "tied"),
    [
        ("gemma", {}, True),
        ("qwen3", {"tie_word_embeddings": True}, True),
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2}, True),
        ("gpt2", {"n_embd": 16, "n_layer": 2, "n_head": 2, "tie_word_embeddings": False}, False),
        ("llama", {}, False),
    ],
)
def test_hugging_face_models_are_tied_as_their_configuration_says(family, fields, tied):
    """By the family's own default where nothing is said."""
    pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 1}
    fields = {**({} if family == "gpt2" else sizes), **fields}
    name = "transformer.wte" if family == "gpt2" else "model.embed_tokens"
    expected = (((0, f"model.{name}.weight"), (3, "model.lm_head.weight")),) if tied else ()
    assert from_config(model_type=family, vocab_size=64, **fields).tied == expected


def test_layers_that_outlive_their_use_without_being_shared_are_not_tied():
    """A model that keeps the modules it hands out."""
    assert find_ties(cached_but_apart(), seed=0) == ()


def test_ties_with_a_common_layer_are_one():
    """Stated in pairs, in any order."""
    pairs = [((3, "w"), (0, "w")), ((5, "v"), (6, "v")), ((9, "w"), (3, "w"))]
    assert merged(pairs) == (((0, "w"), (3, "w"), (9, "w")), ((5, "v"), (6, "v")))


@pytest.mark.parametrize("build", tied_models.BUILDERS)
def test_layers_are_copies_and_the_first_owns_what_is_tied(build):
    """Layers that functions share do not learn twice; a copy is in no optimizer."""
    config = read_job_config(job())
    model = tied_model(build(), config)
    layers = all_layers(model, config.training)
    parameters = [id(parameter) for parameter in layers.parameters()]
    assert len(set(parameters)) == len(parameters)
    stepped = {
        id(parameter)
        for layer in layers
        if layer.optimizer is not None
        for group in layer.optimizer.param_groups
        for parameter in group["params"]
    }
    for number, tie in enumerate(model.tied):
        of_layers = [layers[index].module.get_parameter(layers[index].tied[number]) for index, _ in tie]
        assert [id(parameter) in stepped for parameter in of_layers] == [True] + [False] * (len(tie) - 1)


@pytest.mark.parametrize("build", tied_models.BUILDERS)
def test_a_rank_that_holds_only_the_last_layer_builds_it_as_one_process_does(build):
    """Also where a cache is filled by the first layer."""
    config = read_job_config(job())
    whole = tied_model(build(), config)
    # Rank 0 has searched its own; this rank has been told.
    told = with_ties(build(), whole.tied, seed=config.training.seed)
    made = [
        LayerSet(model, config.training, torch.device("cpu"), lambda index, module: module).make(5).module
        for model in (whole, told)
    ]
    if build in (tied_models.stated, tied_models.by_cache):
        assert all(torch.equal(a, b) for a, b in zip(*(m.parameters() for m in made), strict=True))
    assert [name for name, _ in made[0].named_parameters()] == [
        name for name, _ in made[1].named_parameters()
    ]


def test_a_shared_norm_with_running_statistics_is_refused():
    """Two copies of it would see half of the batches each."""
    norm = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match=r"layers 0 and 1 share .*running statistics"):
        Model.from_layers([norm, norm], loss=nn.functional.mse_loss)


def test_two_parameters_in_the_same_memory_are_refused():
    """``head.weight.data = embedding.weight.data`` ties nothing that an optimizer knows of."""
    embedding, head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
    head.weight.data = embedding.weight.data
    with pytest.raises(ValueError, match="'weight' of layer 0 and 'weight' of layer 1 are two parameters"):
        Model.from_layers([embedding, head], loss=nn.functional.cross_entropy)


def test_a_buffer_in_the_memory_of_a_parameter_is_refused():
    """It would keep its first values in the copy that is trained."""
    layer = nn.Linear(4, 4)
    layer.register_buffer("seen", layer.weight.detach())
    with pytest.raises(ValueError, match="'weight' of layer 0 and 'seen' of layer 0 are a parameter and a"):
        Model.from_layers([layer], loss=nn.functional.mse_loss)


def test_a_weight_that_a_layer_hides_is_refused_when_it_is_built():
    """It would be copied with the layer, and never learn with the other."""

    class Hiding(nn.Linear):
        def __init__(self, embedding):
            super().__init__(4, 4)
            self.hidden = [embedding]

    embedding = nn.Embedding(8, 4)
    model = Model.from_layers([embedding, Hiding(embedding)], loss=nn.functional.cross_entropy)
    model.build_layer(0)
    with pytest.raises(ConfigurationError, match=re.escape("layer 1 refers to 'weight' of layer 0 without")):
        model.build_layer(1)


def test_a_layer_whose_copy_cannot_learn_is_refused():
    """As of what torch.jit.script returns, whose copies have weights that were computed."""

    class Computed(nn.Linear):
        def __deepcopy__(self, memo):
            copied = Computed(4, 4)
            del copied.weight
            copied._parameters["weight"] = self.weight.clone()
            return copied

    model = Model.from_layers([Computed(4, 4)], loss=nn.functional.mse_loss)
    with pytest.raises(ConfigurationError, match="copy of layer 0 cannot learn 'weight'"):
        model.build_layer(0)


STATED = functools.partial(
    Model, layer_count=2, build_layer=lambda index: nn.Linear(4, 4 + index), loss=nn.functional.mse_loss
)


@pytest.mark.parametrize(
    ("tie", "reason"),
    [
        (((0, "weight"), (1, "weight")), "differ in shape"),
        (((0, "weight"), (2, "weight")), "have no parameter 'weight' of layer 2"),
        (((0, "weight"), (1, "wieght")), "have no parameter 'wieght' of layer 1"),
        (((0, "weight"), (0, "bias"), (1, "bias")), "one parameter of a layer"),
    ],
)
def test_a_stated_tie_that_is_none_is_refused(tie, reason):
    """Layers that do not exist, names that they lack, other shapes."""
    with pytest.raises(ConfigurationError, match=reason):
        check_ties(with_ties(STATED(), [tie], seed=0), read_job_config(job()))


FREEZING = {"kind": "freezing", "startStep": 1, "endStep": 2, "everySteps": 1, "target": 0.5}
PRUNING = {"kind": "pruning", "startStep": 1, "endStep": 2, "everySteps": 1, "target": 0.5}


@pytest.mark.parametrize(
    ("fields", "field", "reason"),
    [
        ({"pipeline": {"schedule": "PipeDream2BW"}}, "pipeline.schedule", "To fix: a schedule with a flush"),
        ({"pipeline": {"schedule": "PipeDream"}}, "pipeline.schedule", "at a time of its own"),
        ({"dynamics": [FREEZING]}, "dynamics", "freezing may stop layer 0 from learning"),
        ({"dynamics": [PRUNING]}, "dynamics", "pruning changes the parameters of layer 5"),
    ],
)
def test_what_cannot_be_right_with_tied_weights_is_refused(fields, field, reason):
    """With the field, both layers and what to change, before the first step."""
    validated = ValidatedJob.from_mapping(job(**fields))
    with pytest.raises(ConfigurationError, match=reason) as refused:
        validated.with_ties()
    assert str(refused.value).startswith(field)
    assert "'weight' of layer 0 and 'weight' of layer 5 are one parameter" in str(refused.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"dynamics": [PRUNING | {"pruning": {"structure": "heads"}}]},
        {"dynamics": [{"kind": "mixtureOfExperts"}]},
        {"dynamics": [{"kind": "earlyExit", "startStep": 1, "endStep": 2, "everySteps": 1, "target": 0.5}]},
        {"parallelism": {"tensor": 2}},
    ],
    ids=["heads", "experts", "exits", "tensor"],
)
def test_changes_of_the_blocks_between_are_accepted(fields):
    """Embedding and head stay as they are, or keep their parameters inside of what wraps them."""
    config = read_job_config(job(**fields))
    check_ties(build_gpt(layers=4, dim=16, heads=2, tied=True), config)


def test_a_split_layer_that_is_tied_is_refused():
    """Blocks are cut over the ranks of a tensor group."""
    gpt = build_gpt(layers=4, dim=16, heads=2)
    tied = with_ties(gpt, [((1, "mlp.up.weight"), (2, "mlp.up.weight"))], seed=0)
    with pytest.raises(ConfigurationError, match="layer 1 is split over the ranks"):
        check_ties(tied, read_job_config(job(parallelism={"tensor": 2})))


def test_a_layer_without_shapes_is_refused():
    """A lazy one has them after a forward, of which a rank that holds another layer makes none."""
    loss = nn.functional.mse_loss
    for layer in (nn.LazyLinear(4), lambda: nn.LazyLinear(4)):
        with pytest.raises(ConfigurationError, match=r"layer 0 \(LazyLinear\) has weights without shapes"):
            find_ties(Model.from_layers([layer], loss=loss), seed=0)
