"""Families of transformers by name learn as their own classes do, whatever masks and scales these make."""

import pytest
import torch
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob

from tests.support.examples import first_daily
from tests.support.gang import assert_same_curve
from tests.support.held_data import Gates
from tests.support.jobs import small_job
from tests.support.one_process import train_here
from tests.support.replans import replan, stages_at
from tests.trainer.models import families

pytestmark = pytest.mark.slow
transformers = pytest.importorskip("transformers")


def losses_of_the_class(name, steps, *, learning_rate):
    """Four samples a step through the whole class, in training mode, with its own loss."""
    from ballast_trainer.models.hugging_face import _built
    from ballast_trainer.seeding import host_seeded

    fields = families.arguments(name)
    made = transformers.AutoConfig.for_model(**fields)
    with host_seeded(0):
        whole = _built(made, None, lambda build, **how: build._from_config(made, **how)).train()
    optimizer, losses = torch.optim.SGD(whole.parameters(), lr=learning_rate), {}
    for step in range(steps):
        inputs, labels = batch_of(name)(0, step, 4)
        if labels.dim() == 2 and labels[0, -1] == -100:
            labels = inputs
        named = inputs if isinstance(inputs, dict) else {whole.main_input_name: inputs}
        loss = whole(**named, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses[step + 1] = float(loss.detach())
    return losses


def images(seed, step, size):
    generator = torch.Generator().manual_seed(1000 * seed + step)
    return torch.randn(size, 3, 16, 16, generator=generator), torch.arange(size) % 2


def image_batches():
    return images


def pairs(kind):
    """Sentences, or sounds, and what is to be written of them, of another length."""

    def batch(seed, step, size):
        generator = torch.Generator().manual_seed(1000 * seed + step)
        written = torch.randint(3, 64, (size, 9), generator=generator)
        inputs = {"decoder_input_ids": written.roll(1, dims=1)}
        if kind == "sounds":
            inputs["input_features"] = torch.randn(size, 6, 20, generator=generator)
        else:
            inputs["input_ids"] = torch.randint(3, 64, (size, 12), generator=generator)
        return inputs, written

    return batch


PAIRS = {"whisper": "sounds"} | dict.fromkeys(
    ("t5", "bart", "umt5", "longt5", "m2m_100", "marian", "pegasus"), "sentences"
)


def batch_of(name):
    if name in PAIRS:
        return pairs(PAIRS[name])
    if name in ("vit", "dinov2"):
        return images
    return families.batches("same" if name == "bert" else "next")


def sgd(parameters, learning_rate):
    return torch.optim.SGD(parameters, lr=learning_rate)


def job(name, **fields):
    module = "tests.trainer.models"
    data = {"name": f"{module}.families:batches", "args": {"kind": "same" if name == "bert" else "next"}}
    if name in PAIRS:
        data = {"name": f"{module}.test_hugging_face_families:pairs", "args": {"kind": PAIRS[name]}}
    if batch_of(name) is images:
        data = {"name": f"{module}.test_hugging_face_families:image_batches"}
    optimizer = f"{module}.test_hugging_face_families:sgd"
    training = {"optimizer": optimizer, "learningRate": 0.1, "clipNorm": 0.0}
    given = {"data": data, "steps": 4, "microbatches": 1, "training": training}
    return small_job(families.model(name), **given) | fields


def test_labels_that_transformers_would_shift_are_shifted_where_the_job_says_so_else_refused():
    """The whole class predicts the next token from them; its layers one after the other would repeat it."""
    data = {"name": "tests.trainer.models.families:batches", "args": {"kind": "same"}}
    with pytest.raises(ConfigurationError, match="own tokens") as caught:
        train_here(job("qwen2", data=data))
    assert caught.value.field == "data.name"
    shifted = train_here(job("qwen2", data={**data, "shiftLabels": True}))
    assert shifted.losses == train_here(job("qwen2")).losses
    with pytest.raises(ConfigurationError, match="next tokens already") as caught:
        train_here(job("qwen2", data={**job("qwen2")["data"], "shiftLabels": True}))
    assert caught.value.field == "data.shiftLabels"


def test_an_encoder_with_a_decoder_is_told_which_inputs_it_lacks():
    """As transformers' own data have them: tokens of the encoder alone, and labels."""
    data = {"name": "tests.trainer.models.families:batches", "args": {"kind": "same"}}
    with pytest.raises(
        ConfigurationError, match=r"takes input_ids and decoder_input_ids\. To fix: a dict of both"
    ):
        train_here(job("t5", data=data))


DAILY = (
    *("gemma3_text", "llama4_text", "gpt_oss with its routers' loss", "opt", "falcon with alibi", "gptj"),
    *("jamba", "bert", "vit", "t5", "whisper"),
)
"""One of each way in which families differ."""


@pytest.mark.parametrize(
    "name", first_daily(sorted(families.FAMILIES, key=lambda name: name not in DAILY), len(DAILY))
)
def test_a_family_learns_as_its_own_class_does(name):
    """Windows, chunks, alibi, scales, state spaces, encoders, images, losses of routers."""
    trained = train_here(job(name))
    assert_same_curve(trained.losses, losses_of_the_class(name, 4, learning_rate=0.1))


@pytest.mark.nightly
@pytest.mark.processes
@pytest.mark.parametrize(
    "name",
    ["mixtral with its routers' loss", "gemma2", "bert", "falcon with alibi", "jamba", "t5", "whisper"],
)
def test_a_family_learns_so_on_three_ranks(gang, name):
    """Figures of routers travel beside hidden states; weights are tied; the loss is that of one process."""
    config = job(name, evaluation={"everySteps": 2, "batches": 1})
    config["model"]["args"] |= {"tie_word_embeddings": True}
    config["evaluation"]["data"] = config["data"]
    config["training"]["recompute"] = True
    config["pipeline"]["microbatches"] = 4
    running = gang(config, ranks=3).succeeded()
    assert_same_curve(running.losses(), train_here(config).losses)


@pytest.mark.processes
def test_tokens_of_a_models_own_experts_are_counted_where_its_layers_are(gang, tmp_path):
    """By layer and expert, over all ranks and after a move, what one process counts; the loss is its own.

    Figures of routers travel beside hidden states, and weights are tied.
    """
    config = job("mixtral with its routers' loss", pipeline={"microbatches": 4, "globalBatchSize": 4})
    config["model"]["args"] |= {"tie_word_embeddings": True}
    gates = Gates(tmp_path / "gates", 2)
    held = gates.hold_own(config)
    running = gang(held, ranks=3, options=["--channel", str(tmp_path / "channel")])
    moved = stages_at((0, 3, 4, 5), range(3))
    replan(running, tmp_path, gates, lambda plan: plan.replace(epoch=2, stages=moved))
    running.succeeded()
    assert running.events("migrate")
    alone = train_here(held)
    assert_same_curve(running.losses(), alone.losses)
    (counted,) = (event["loads"] for event in alone.events if event["event"] == "tokenImbalance")
    # One sample of 16 tokens, each by two of four experts.
    assert [sum(loads) for loads in counted.values()] == [32, 32, 32]
    (found,) = running.events("tokenImbalance")
    assert found["loads"] == {str(layer): loads for layer, loads in counted.items()}


@pytest.mark.parametrize(
    "name",
    [
        "llama4_text",
        "gpt_oss",
        "jamba",
        "longcat_flash",
        *first_daily(["deepseek_v3", "phimoe", "qwen3_moe with its routers' loss"]),
    ],
)
def test_loads_of_a_models_own_experts_are_told(name):
    """Each of 64 tokens by two of four experts, in each layer that has them; two more without weights."""
    (event,) = (one for one in train_here(job(name)).events if one["event"] == "tokenImbalance")
    layers = {"jamba": [2], "deepseek_v3": [2, 3], "longcat_flash": [1]}.get(name, [1, 2, 3])
    assert {layer: sum(loads) for layer, loads in event["loads"].items()} == dict.fromkeys(layers, 128)
    count = 6 if name == "longcat_flash" else 4
    assert all(len(loads) == count for loads in event["loads"].values())


SHARE = [{"kind": "mixtureOfExperts", "experts": {"parallel": True}}]


@pytest.mark.processes
@pytest.mark.parametrize(
    "name", first_daily(["mixtral with its routers' loss", "gpt_oss", "deepseek_v3", "jamba"])
)
def test_replicas_share_the_experts_that_a_model_came_with(gang, name):
    """Tokens travel to the rank of their expert, which follows the loads; the curve is one process's."""
    config = job(name, pipeline={"microbatches": 4, "globalBatchSize": 8}, totalSteps=6)
    shared = {**config, "dynamics": SHARE, "parallelism": {"data": 2}}
    running = gang(shared, ranks=2).succeeded()
    assert_same_curve(running.losses(), train_here(config).losses)
    newest = running.events("tokenImbalance")[-1]
    assert newest["loads"].keys() == newest["rankLoads"].keys() == newest["placement"].keys()
    for layer, loads in newest["rankLoads"].items():
        # Of both replicas, two samples of 16 tokens, each by two of four experts.
        assert (len(loads), sum(loads), sum(newest["loads"][layer])) == (2, 128, 64)
        assert set(newest["placement"][layer]) <= {0, 1}
    assert sum(newest["placed"].values()) > 0


@pytest.mark.parametrize(
    ("name", "fields", "words"),
    [
        ("mixtral with its routers' loss", {}, "experts of its own, which its model balances"),
        ("mixtral", {"parallel": True, "count": 8}, "experts of its own, whose count are its model's"),
        ("llama4_text", {"parallel": True}, "experts that each compute all tokens"),
        ("longcat_flash", {"parallel": True}, "experts some of which have no weights"),
    ],
)
def test_changes_of_the_experts_of_the_model_are_refused(name, fields, words):
    """``experts.balance`` would be of copies of all of its experts together, and balance none of these."""
    arguments = families.arguments("mixtral with its routers' loss" if name == "mixtral" else name)
    config = job("mixtral with its routers' loss", dynamics=[{"kind": "mixtureOfExperts", "experts": fields}])
    config["model"]["args"] = arguments
    config["pipeline"]["microbatches"], config["parallelism"] = 2, {"data": 2}
    with pytest.raises(ConfigurationError, match=words):
        ValidatedJob.from_mapping(config)


def test_every_name_of_the_whole_model_is_in_an_export():
    """Each parameter belongs to one layer, by the name that the class gives it."""
    from ballast_trainer.models.hugging_face import from_config

    for name in ("opt", "bert", "vit", "mamba", "gpt_oss with its routers' loss", "t5", "whisper"):
        model = from_config(**families.arguments(name))
        found = [
            model.name_of(index, key)
            for index in range(model.layer_count)
            for key in model.build_layer(index).state_dict()
        ]
        made = transformers.AutoConfig.for_model(**families.arguments(name))
        kinds = transformers.MODEL_FOR_MASKED_LM_MAPPING if name == "bert" else None
        kinds = transformers.MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING if name == "vit" else kinds
        kinds = transformers.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING if name == "t5" else kinds
        kinds = transformers.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING if name == "whisper" else kinds
        whole = (kinds or transformers.MODEL_FOR_CAUSAL_LM_MAPPING)[type(made)](made)
        assert sorted(found) == sorted(whole.state_dict())


def test_a_checkpoint_in_bf16_is_trained_in_fp32(tmp_path):
    """As most on the hub are; ``training.dtype`` says what the weights are."""
    from ballast_trainer.models.hugging_face import pretrained

    made = transformers.AutoConfig.for_model(**families.arguments("llama"))
    whole = transformers.AutoModelForCausalLM.from_config(made).to(torch.bfloat16)
    whole.save_pretrained(tmp_path)
    model, known = pretrained(checkpoint=str(tmp_path)), whole.state_dict()
    for index in range(model.layer_count):
        for name, value in model.build_layer(index).named_parameters():
            assert value.dtype == torch.float32
            assert torch.equal(value, known[model.name_of(index, name)].float())


def decoder_in_half(name, dtype):
    """A model of a user's own that is stored in two bytes a number."""
    from ballast_trainer.models.hugging_face import _built, decoder

    made = transformers.AutoConfig.for_model(**families.arguments(name))
    return decoder(_built(made, None, lambda build, **how: build._from_config(made, **how)).to(dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", first_daily(["llama", "vit", "mixtral with its routers' loss", "bert"], 2))
def test_a_model_stored_in_two_bytes_a_number_is_taken_apart(name, dtype):
    """Its loss is compared in full precision, in which training computes it."""
    value, targets = batch_of(name)(0, 0, 4)
    model = decoder_in_half(name, dtype)
    value = value.to(dtype) if value.is_floating_point() else value
    for index in range(model.layer_count):
        value = model.build_layer(index)(value)
    assert all(one.dtype == dtype for one in model.build_layer(1).parameters())
    assert torch.isfinite(model.loss(value, targets))


def test_a_checkpoint_of_a_class_is_read_as_that_class(tmp_path):
    """A classifier of sequences keeps its head."""
    from ballast_trainer.models.hugging_face import pretrained

    made = transformers.AutoConfig.for_model(**families.arguments("bert"), num_labels=5)
    whole = transformers.BertForSequenceClassification(made).eval()
    whole.save_pretrained(tmp_path)
    model = pretrained(checkpoint=str(tmp_path))
    value = tokens = torch.arange(22).reshape(2, 11) + 1
    for index in range(model.layer_count):
        value = model.build_layer(index).eval()(value)
    assert torch.equal(value, whole(tokens).logits)
    labels = torch.tensor([0, 4])
    torch.testing.assert_close(model.loss(value, labels), whole(tokens, labels=labels).loss)
