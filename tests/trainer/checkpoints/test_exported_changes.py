"""Exports of models that a change gives other tensors: refused where the format cannot hold them."""

import pytest
from ballast_trainer.errors import ConfigurationError
from ballast_trainer.launch import ValidatedJob
from safetensors.torch import load_file

from tests.support.one_process import train_here
from tests.trainer.checkpoints.small_families import GPT2, LLAMA

PRUNED = {"kind": "pruning", "startStep": 1, "endStep": 3, "everySteps": 1, "target": 0.5}
FROZEN = {"kind": "freezing", "everySteps": 1, "target": 0.5, "freezing": {"criterion": "plasticity"}}
DATA = {"name": "tests.support.held_data:text", "args": {"context": 8}}


@pytest.fixture
def job(small_config, tmp_path):
    """``job(arguments, **fields)``: four steps of a decoder of Hugging Face's, saved at the end."""
    pytest.importorskip("transformers")

    def make(arguments, **fields):
        model = {"name": "ballast_trainer.models.hugging_face:from_config", "args": arguments}
        saved = {"path": str(tmp_path / "saved")}
        return small_config(totalSteps=4, model=model, data=DATA, checkpoint=saved, **fields)

    return make


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"kind": "mixtureOfExperts", "experts": {"everyBlocks": 1}}, "mixtureOfExperts adds 'layer.mlp"),
        ({"kind": "mixtureOfDepths", "target": 0.5, "depths": {"everyBlocks": 1}}, "mixtureOfDepths adds"),
        ({"kind": "earlyExit", "exits": {"confidence": "head"}}, "earlyExit adds"),
        ({"kind": "pruning", "target": 0.5, "pruning": {"structure": "heads"}}, "pruning removes heads"),
    ],
)
def test_a_folder_of_a_model_with_other_tensors_is_refused_before_the_first_step(
    job, tmp_path, change, words
):
    """``from_pretrained`` could not load it; what changes no tensors is no obstacle."""
    wanted = {"path": str(tmp_path / "model"), "format": "huggingFace"}
    with pytest.raises(ConfigurationError, match=rf"export.format: .*{words}.*To fix: safetensors"):
        ValidatedJob.from_mapping(job(LLAMA, export=wanted, dynamics=[change]))
    harmless = [PRUNED, FROZEN, {"kind": "sparseAttention"}, {"kind": "earlyExit"}]
    ValidatedJob.from_mapping(job(LLAMA, export=wanted, dynamics=harmless))


@pytest.mark.slow
def test_cut_maps_of_gpt2_are_exported_as_it_has_them(job, tmp_path):
    """Under its names, inputs first; as many neurons less in one as in the other."""
    change = PRUNED | {"pruning": {"structure": "neurons"}}
    train_here(job(GPT2, dynamics=[change], export={"path": str(tmp_path / "model")}))
    found = load_file(tmp_path / "model")
    for block in range(2):
        into = found[f"transformer.h.{block}.mlp.c_fc.weight"].shape
        away = found[f"transformer.h.{block}.mlp.c_proj.weight"].shape
        assert into == away[::-1]
        assert into[0] == 16 and into[1] < 64
