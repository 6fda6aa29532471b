"""The commands, as they are called."""

import json

import pytest
from ballast_trainer.cli.main import LAZY, main
from click.testing import CliRunner


def test_the_commands_are_these():
    """A new one is a decision."""
    assert sorted(LAZY) == ["pod", "profile", "run", "simulate", "trace"]


def test_profile_gives_each_layer_in_the_planners_form(tmp_path):
    """Frozen layers have no backward; every layer has seconds and bytes."""
    path = tmp_path / "config.yaml"
    path.write_text(
        json.dumps(
            {
                "totalSteps": 10,
                "model": {"name": "gpt", "layers": 5, "args": {"dim": 16, "heads": 2, "context": 8}},
                "pipeline": {"microbatches": 2, "globalBatchSize": 4},
                "dynamics": [{"kind": "freezing", "startStep": 2, "endStep": 4, "target": 0.4}],
            }
        )
    )
    arguments = ["profile", "--config", str(path), "--steps", "2", "--at-step", "4", "--output", "json"]
    result = CliRunner().invoke(main, arguments)
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["microbatchSize"] == 2
    assert len(found["layers"]) == 5
    assert [row["backwardSeconds"] == 0 for row in found["layers"]] == [True, True, False, False, False]
    assert [row["activationBytes"] > 0 for row in found["layers"]] == [False, False, True, True, True]
    # Two sequences of eight positions of sixteen channels, fp32.
    assert found["layers"][1]["outputBytes"] == 2 * 8 * 16 * 4
    assert all(
        row["forwardSeconds"] > 0 and row["heldBytes"] >= row["weightBytes"] > 0 for row in found["layers"]
    )


@pytest.mark.parametrize("command", ["run", "simulate"])
def test_a_configuration_that_is_not_there_is_a_usage_error(command, tmp_path):
    """It says which file."""
    import subprocess
    import sys

    arguments = [sys.executable, "-m", "ballast_trainer", command, "--config", str(tmp_path / "none.yaml")]
    result = subprocess.run(arguments, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 2
    assert "none.yaml" in result.stderr
