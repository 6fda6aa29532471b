"""``ballast plan`` with batches that nobody trains with."""

import json

import pytest
from ballast_operator.cli.main import main
from click.testing import CliRunner

PROFILE = "layers: [{repeat: 6, forwardSeconds: 0.03, backwardSeconds: 0.06, heldBytes: 50, outputBytes: 10}]"
CLUSTER = """
gpus: [{type: a100, count: 2, speed: 2.0}, {type: v100, count: 2}]
gpusPerServer: 2
bandwidth: {insideServer: 1.0e+6, betweenServers: 1.0e+4}
"""


@pytest.mark.slow
@pytest.mark.parametrize("name", ["best", "pipedream", "2bw", "megatron", "amp"])
def test_a_batch_beyond_all_measure_is_planned_without_being_played(tmp_path, name):
    """A step's length follows from shorter ones; best has no more microbatches than a job may have."""
    (tmp_path / "profile.yaml").write_text(PROFILE)
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    files = [str(tmp_path / "profile.yaml"), str(tmp_path / "cluster.yaml")]
    options = ["--planner", name, "--batch-size", "1000000000", "--output", "json"]
    result = CliRunner().invoke(main, ["plan", *files, *options])
    assert result.exit_code == 0, result.output
    (plan, *_) = json.loads(result.output)["plans"]
    assert plan["microbatches"] * plan["microbatchSize"] == 10**9
    assert plan["stepSeconds"] > 0
    if name == "best":
        assert plan["refused"] is None and plan["microbatches"] <= 65_536
