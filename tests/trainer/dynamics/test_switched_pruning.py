"""Pruning that is switched on, or off, for a checkpoint: the curve is that of one job, in each family."""

import pytest
from ballast_trainer.errors import CheckpointError

from tests.support.examples import first_daily
from tests.support.one_process import train_here

GPT2 = {
    "model_type": "gpt2",
    "vocab_size": 256,
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "n_positions": 16,
    "tie_word_embeddings": False,
}
FAMILIES = {
    "gpt": {"model": {"name": "gpt", "layers": 4, "args": {"dim": 16, "heads": 2, "context": 8}}},
    "gpt2": {
        "model": {"name": "ballast_trainer.models.hugging_face:from_config", "args": GPT2},
        "data": {"name": "tests.support.held_data:text", "args": {"context": 8}},
    },
}
CASES = [("gpt", "neurons"), ("gpt2", "heads"), ("gpt2", "weights"), ("gpt", "heads"), ("gpt2", "neurons")]


def job(family, folder, steps, change=None):
    return {
        "totalSteps": steps,
        **FAMILIES[family],
        "pipeline": {"microbatches": 2, "globalBatchSize": 4},
        "rebalance": {"enabled": False},
        "checkpoint": {"path": str(folder)},
        "dynamics": [change] if change else [],
    }


def pruning(structure, **steps):
    return {"kind": "pruning", "target": 0.5, "pruning": {"structure": structure}, **steps}


@pytest.mark.slow
@pytest.mark.parametrize(("family", "structure"), first_daily(CASES, 2))
def test_a_job_continues_as_it_was_while_nothing_is_pruned_yet(family, structure, tmp_path):
    """Switched on after step 2, off again after step 4: GPT-2's maps are turned, and turned back."""
    if family == "gpt2":
        pytest.importorskip("transformers")
    later = pruning(structure, startStep=100, endStep=200)
    whole = train_here(job(family, tmp_path / "whole", 6)).losses
    found = {}
    for steps, change in ((2, None), (4, later), (6, None)):
        found |= train_here(job(family, tmp_path / "parts", steps, change)).losses
    assert found == pytest.approx(whole, abs=1e-6)


@pytest.mark.slow
def test_what_was_removed_does_not_come_back(tmp_path):
    """The checkpoint of fewer neurons is refused without pruning, with the layer; pruned on, it continues."""
    cut = pruning("neurons", startStep=0, endStep=1)
    train_here(job("gpt", tmp_path, 2, cut))
    with pytest.raises(CheckpointError, match=r"does not fit layer 1: .*mlp\.up\.weight.*To fix"):
        train_here(job("gpt", tmp_path, 4))
    assert sorted(train_here(job("gpt", tmp_path, 4, cut)).losses) == [3, 4]
