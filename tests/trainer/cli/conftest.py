"""Forecast commands on a configuration of twelve layers and their profile."""

import json

import pytest
from ballast_trainer.cli.main import main
from click.testing import CliRunner

from tests.trainer.cli.profiled_layer import LAYER


@pytest.fixture
def call(tmp_path):
    """Call a command on a configuration of twelve layers and their profile."""

    def call(command, *arguments, layers=(LAYER,) * 12, schedule="1F1B", measured_at=1, **fields):
        config = {
            "totalSteps": 10,
            "model": {"name": "gpt", "layers": 12},
            "pipeline": {"microbatches": 8, "globalBatchSize": 16, "schedule": schedule},
            **fields,
        }
        (tmp_path / "config.yaml").write_text(json.dumps(config))
        (tmp_path / "profile.json").write_text(json.dumps({"tensor": measured_at, "layers": list(layers)}))
        files = ["--config", str(tmp_path / "config.yaml")]
        if not {"--even", "--loads"}.intersection(arguments):
            files += ["--profile", str(tmp_path / "profile.json")]
        return CliRunner().invoke(main, [command, *files, *arguments])

    return call
