"""The jobs whose lines docs/comparison.md counts are complete: they run as they are, and have so many."""

import importlib.util
import re
from pathlib import Path

import pytest
from ballast_trainer.cli.config_file import read_config

from tests.support.examples import first_daily
from tests.support.one_process import train_here

ROOT = Path(__file__).parents[3]
JOBS = ROOT / "examples" / "jobs"
FILES = {
    "LoRA": ["lora.yaml", "texts.py"],
    "vision": ["vision.yaml", "images.py"],
    "decoder": ["decoder.yaml", "texts.py"],
    "mixture of experts": ["mixture-of-experts.yaml", "texts.py"],
    "own loop": ["../scripts/plain_ddp.py"],
}
"""By row of the table; ``tests/client/test_examples.py`` runs the last one, ``test_users_models.py`` and
``test_examples_move.py`` the decoder and the experts, each day."""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing:FutureWarning")  # peft's own
@pytest.mark.parametrize("name", first_daily([name for name in FILES if name != "own loop"], 2))
def test_a_job_whose_lines_are_counted_learns(name, monkeypatch, tmp_path):
    """With nothing but its files: the loss falls. The checkpoint for adapters is a tiny one."""
    transformers = pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(JOBS)
    config = read_config(JOBS / FILES[name][0], ("totalSteps=8",))
    config.pop("evaluation", None)
    if name == "LoRA":
        pytest.importorskip("peft")
        sizes = read_config(JOBS / FILES["decoder"][0], ())["model"]["args"]
        made = transformers.AutoConfig.for_model(**sizes)
        transformers.AutoModelForCausalLM.from_config(made).save_pretrained(tmp_path)
        config["model"]["args"]["checkpoint"] = str(tmp_path)
    losses = train_here(config).losses
    assert losses[8] < losses[1]


def test_the_table_states_the_lines_that_the_jobs_have():
    """As the script counts them, with which the other columns were counted."""
    spec = importlib.util.spec_from_file_location("code_lines", ROOT / "scripts" / "code_lines.py")
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    table = (ROOT / "docs" / "comparison.md").read_text()
    rows = {
        name: int(lines) for name, lines in re.findall(r"^\| \[([\w ]+)\]\(.*?\) \| (\d+) \|", table, re.M)
    }
    counted = {name: sum(script.code_lines(JOBS / file) for file in files) for name, files in FILES.items()}
    assert rows == counted
