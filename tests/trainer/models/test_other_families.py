"""A family of transformers whose layers cannot run one after the other is refused in words."""

import pytest
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob

from tests.support.jobs import small_job
from tests.trainer.models import families

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FIX = "To fix: give the layers to Model.from_layers (docs/trainer-models.md, A model of your own)"


ENCODER = {"model_type": "bert", **SIZES, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            {"model_type": "switch_transformers", "vocab_size": 64, "d_model": 32, "d_ff": 48}
            | {"num_layers": 2, "num_decoder_layers": 2, "num_heads": 4, "d_kv": 8, "num_experts": 2},
            "SwitchTransformersForConditionalGeneration is no chain of layers: its forward does not run on",
        ),
        (
            {"model_type": "encoder-decoder", "encoder": ENCODER, "decoder": ENCODER},
            "no attribute 'hidden_size'",
        ),
        ({"model_type": "clip_text_model"}, f"predicts neither tokens nor classes of images. {FIX}"),
        (
            {"model_type": "albert", **SIZES, "embedding_size": 16, "intermediate_size": 32},
            "AlbertForMaskedLM is no chain of layers: it has no list of layers of which each is called once, "
            f"one after the other. {FIX}",
        ),
        ({"model_type": "lama"}, "transformers has no model_type 'lama'. To fix: e.g. llama"),
        (
            {"model_type": "biogpt", **SIZES, "intermediate_size": 32, "layerdrop": 0.1},
            "BioGptForCausalLM leaves out layers at random (layerdrop). To fix: layerdrop: 0.0",
        ),
        (
            {"model_type": "big_bird", **SIZES, "intermediate_size": 32},
            "attends in sparse blocks. To fix: attention_type: original_full",
        ),
        (
            {"model_type": "jetmoe", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}
            | {"num_key_value_heads": 2, "kv_channels": 8, "intermediate_size": 32, "num_local_experts": 4}
            | {"output_router_logits": True},
            "adds a loss of its routers (output_router_logits: true) that is not computed here",
        ),
        (
            {"model_type": "llama", **SIZES, "architecture": "LlamaForSequenceClassification"}
            | {"num_key_value_heads": 2, "intermediate_size": 32, "pad_token_id": 0},
            "LlamaForSequenceClassification one after the other do not compute what it computes",
        ),
        (
            {"model_type": "bert", **SIZES, "architecture": "BertForSequenceClassification"}
            | {"intermediate_size": 32, "num_labels": 1},
            "BertForSequenceClassification has a loss of its own, no cross entropy",
        ),
        (
            {"model_type": "llama", "architecture": "LlamaForCausal"},
            "transformers has no class 'LlamaForCausal'. To fix: e.g. LlamaForCausalLM",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_is_no_chain_of_decoder_layers_is_refused_with_one_thing_to_do(args, reason):
    """Not with the text that transformers has for those who load models by themselves."""
    with pytest.raises(ConfigurationError) as refused:
        ValidatedJob.from_mapping(small_job(families.model("llama") | {"args": args}, batch=2))
    text = str(refused.value)
    assert text.startswith("model.args: ") and reason in text
    assert text.count("To fix: ") == 1
    assert len(text) < 500


def test_a_decoder_that_changes_what_its_encoder_returned_is_refused():
    """Its layers would go on with what the first batch's encoder returned."""
    import transformers
    from ballast_trainer.models.hugging_face import decoder

    fields = {key: value for key, value in families.arguments("bart").items() if key != "model_type"}
    model = transformers.BartForConditionalGeneration(transformers.BartConfig(**fields))

    class Scaled(type(model.model.decoder)):
        def forward(self, *args, encoder_hidden_states, **kwargs):
            return super().forward(*args, encoder_hidden_states=2 * encoder_hidden_states, **kwargs)

    model.model.decoder.__class__ = Scaled
    with pytest.raises(ValueError, match="which depends on hidden states"):
        decoder(model)
