"""The load of a dynamic model's example moves, and the balancer follows it over four ranks."""

import json
from pathlib import Path

import pytest
from ballast_trainer.cli.main import main
from click.testing import CliRunner

CURVES = sorted((Path(__file__).parent / "load_curves").glob("*.jsonl"))
EXAMPLES = Path(__file__).parents[3] / "examples/trainer"


@pytest.mark.parametrize("curve", CURVES, ids=[path.stem for path in CURVES])
def test_layers_move_three_times_as_the_recorded_load_changes(curve, tmp_path):
    """From the even split that a run begins with, by the example's own settings.

    ``benchmarks/trainer/pause.py --record`` has measured the seconds of the layers in a run of the example;
    replaying them depends on nothing that a machine does.
    """
    first = json.loads(curve.read_text().splitlines()[0])
    alike = {"event": "loads", "step": 0, "seconds": [0.01] * len(first["seconds"])}
    path = tmp_path / "loads.jsonl"
    path.write_text(json.dumps(alike) + "\n" + curve.read_text())
    config = EXAMPLES / f"{curve.stem}.yaml"
    options = ["--config", str(config), "--ranks", "4", "--loads", str(path), "--output", "json"]
    result = CliRunner().invoke(main, ["simulate", *options])
    assert result.exit_code == 0, result.output
    replay = json.loads(result.stdout)["replay"]
    assert len(replay["moves"]) >= 3
    assert replay["bestSeconds"] <= replay["followedSeconds"] < replay["staticSeconds"]
