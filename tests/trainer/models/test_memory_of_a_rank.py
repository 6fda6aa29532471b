"""No rank has memory for the weights of more layers than its own and the one that it makes."""

import pytest
from ballast_policies.contract import ExitCode

from tests.support.examples import first_daily
from tests.support.gang import Gang
from tests.trainer.models import large_models

MODULE = "tests.trainer.models.large_models"
WHOLE_BYTES = 200e6


def config(name, args):
    text = {"name": "tests.support.held_data:text", "args": {"context": 8}}
    return {
        "totalSteps": 1,
        "model": {"name": f"{MODULE}:{name}", "args": args},
        "pipeline": {"microbatches": 4, "globalBatchSize": 4},
        "training": {"optimizer": f"{MODULE}:noting_sgd"},
        **({} if name == "modules" else {"data": text}),
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", first_daily(["modules", "configured", "read"]))
def test_each_of_four_ranks_stays_far_below_the_whole_model(tmp_path, name):
    """Random weights, those of a checkpoint, and modules of one's own."""
    args = {}
    if name != "modules":
        pytest.importorskip("transformers")
    if name == "read":
        import transformers

        made = transformers.AutoConfig.for_model(**large_models.LLAMA)
        transformers.LlamaForCausalLM(made).save_pretrained(tmp_path / "whole")
        args = {"checkpoint": str(tmp_path / "whole")}
    gang = Gang.run(tmp_path / "gang", config(name, args), ranks=4, variables={"NOTES": str(tmp_path)})
    try:
        assert set(gang.exit_codes().values()) == {ExitCode.OK}, gang.errors()
    finally:
        gang.close()
    grown = [int((tmp_path / str(rank)).read_text()) for rank in range(4)]
    # A quarter of the layers, and some megabytes for others.
    print(grown)
    assert max(grown) < 0.45 * WHOLE_BYTES
