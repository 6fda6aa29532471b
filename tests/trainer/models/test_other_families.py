"""A family of transformers whose layers cannot run one after the other is refused in words."""

import pytest
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob

pytestmark = pytest.mark.slow
pytest.importorskip("transformers")

SIZES = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
FIX = "To fix: give the layers to Model.from_layers (docs/trainer-models.md, A model of your own)"


def job(**args):
    return {
        "totalSteps": 2,
        "model": {"name": "ballast_trainer.models.hugging_face:from_config", "args": args},
        "pipeline": {"microbatches": 2, "globalBatchSize": 2},
    }


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (
            {"model_type": "t5", "vocab_size": 64, "d_model": 32, "num_layers": 2, "num_heads": 4},
            f"'t5' is no decoder that predicts the next token (it has an encoder and a decoder). {FIX}",
        ),
        ({"model_type": "vit"}, f"'vit' is no decoder that predicts the next token. {FIX}"),
        ({"model_type": "bert", **SIZES}, f"neither model (as Llama) nor transformer (as GPT-2). {FIX}"),
        (
            {"model_type": "gpt_neo", "vocab_size": 64, "hidden_size": 32, "num_layers": 2, "num_heads": 4}
            | {"attention_types": [[["global"], 2]]},
            f"'gpt_neo' of this transformers does not attend by scaled_dot_product_attention. {FIX}",
        ),
        ({"model_type": "lama"}, "transformers has no model_type 'lama'. To fix: e.g. llama"),
        ({"model_type": "mistral", **SIZES}, "To fix: sliding_window: null, or another model"),
        (
            {"model_type": "mixtral", **SIZES, "num_key_value_heads": 2, "intermediate_size": 32}
            | {"sliding_window": None, "output_router_logits": True},
            "would be lost: it is computed over all layers together",
        ),
    ],
    ids=lambda value: value["model_type"] if isinstance(value, dict) else "",
)
def test_what_is_no_chain_of_decoder_layers_is_refused_with_one_thing_to_do(args, reason):
    """Not with the text that transformers has for those who load models by themselves."""
    with pytest.raises(ConfigurationError) as refused:
        ValidatedJob.from_mapping(job(**args))
    text = str(refused.value)
    assert text.startswith("model.args: ") and reason in text
    assert text.count("To fix: ") == 1
    assert len(text) < 500
