"""The commands, as they are called."""

import json
from pathlib import Path

import pytest
from ballast_operator.cli.main import main as ballast
from ballast_trainer.cli.main import LAZY, main
from click.testing import CliRunner

from tests.support.examples import first_daily
from tests.support.waiting import WAIT_SECONDS, eventually


def test_the_commands_are_these():
    """A new one is a decision."""
    assert sorted(LAZY) == ["export", "pod", "profile", "run", "simulate", "trace"]


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


def test_what_profile_prints_is_what_ballast_plan_reads(tmp_path):
    """As it is, without a key changed: every layer is on a GPU, at the measured seconds."""
    config = {
        "totalSteps": 10,
        "model": {"name": "recurrent", "layers": 5, "args": {"dim": 8, "context": 4}},
        "pipeline": {"microbatches": 2, "globalBatchSize": 4},
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "cluster.yaml").write_text("gpus: [{type: a100, count: 2, memoryBytes: 1.0e+10}]")
    arguments = ["profile", "--config", str(tmp_path / "config.json"), "--steps", "2", "--output", "json"]
    printed = CliRunner().invoke(main, arguments).stdout
    (tmp_path / "profile.json").write_text(printed)
    planned = CliRunner().invoke(
        ballast, ["plan", str(tmp_path / "profile.json"), str(tmp_path / "cluster.yaml"), "--output", "json"]
    )
    assert planned.exit_code == 0, planned.output
    stages = json.loads(planned.stdout)["stages"]
    assert [stages[0]["firstLayer"], stages[-1]["endLayer"]] == [0, 5]
    measured = sum(row["forwardSeconds"] + row["backwardSeconds"] for row in json.loads(printed)["layers"])
    assert sum(stage["seconds"] for stage in stages) == pytest.approx(8 * measured)


def run_in_a_process(*arguments):
    """``ballast-train`` as it is called: its exit code, output and complaints."""
    import subprocess
    import sys

    command = [sys.executable, "-m", "ballast_trainer", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("options", "words"),
    first_daily(
        [
            ([], "4 stages need as many layers; 'recurrent' has 3"),
            (["--trace", "{folder}/none/trace.json"], "To fix: make it, or write elsewhere"),
            (
                ["--set", "model.layers=5", "--set", "metrics.writer=json:JSONDecoder"],
                "without scalars, event, close",
            ),
        ],
        1,
    ),
)
def test_local_ranks_say_once_what_is_wrong_with_their_configuration(options, words, tmp_path):
    """Not once each, and without a traceback."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"totalSteps": 2, "model": {"name": "recurrent", "layers": 3}}))
    options = [option.format(folder=tmp_path) for option in options]
    result = run_in_a_process("run", "--config", str(path), "--ranks", "4", *options)
    assert result.returncode == 2
    assert result.stderr.count("ballast-train: ConfigurationError") == 1
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.slow
@pytest.mark.parametrize("command", ["run", "simulate"])
def test_a_configuration_that_is_not_there_is_a_usage_error(command, tmp_path):
    """It says which file."""
    result = run_in_a_process(command, "--config", str(tmp_path / "none.yaml"))
    assert result.returncode == 2
    assert "none.yaml" in result.stderr


@pytest.mark.processes
def test_a_run_whose_output_is_closed_ends_with_a_message(tmp_path):
    """As behind ``| head -1``: not as if another rank were gone, and without a traceback."""
    import subprocess
    import sys

    config = {"totalSteps": 100_000, "model": {"name": "recurrent", "layers": 4}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "ballast_trainer", "run", "--log", "json", "--config"]
    with subprocess.Popen(
        [*command, tmp_path / "config.json"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert "launch" in process.stdout.readline()
        process.stdout.close()
        said = process.stderr.read()
    assert process.returncode == 1
    assert said == (
        "ballast-train: TrainingFailed: the reader has closed standard output. "
        "To fix: write to a file, or keep the reader open\n"
    )


@pytest.mark.processes
def test_a_full_disk_behind_standard_output_does_not_end_the_training(tmp_path):
    """A warning, once; the job ends as it would."""
    import subprocess
    import sys

    config = {"totalSteps": 3, "model": {"name": "recurrent", "layers": 4}, "rebalance": {"enabled": False}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "ballast_trainer", "run", "--log", "json", "--config", "config.json"]
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(  # noqa: PLW1510 - its exit code is looked at
            command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True
        )
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("standard output cannot be written: [Errno 28]") == 1


@pytest.mark.processes
def test_a_killed_local_rank_is_named(tmp_path):
    """The others lose their peer; the command says which one was the cause, and ends as it did."""
    import os
    import signal
    import subprocess
    import sys

    config = {"totalSteps": 100_000, "model": {"name": "recurrent", "layers": 4}, "data": None}
    (tmp_path / "config.json").write_text(json.dumps(config))
    command = [sys.executable, "-m", "ballast_trainer", "run", "--ranks", "2", "--log", "json"]
    with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
        process = subprocess.Popen([*command, "--config", tmp_path / "config.json"], stdout=out, stderr=err)
    try:
        eventually(
            lambda: '"loss"' in (tmp_path / "out").read_text(), "it trains", (tmp_path / "err").read_text
        )
        children = subprocess.run(
            ["ps", "-o", "pid=", "--ppid", str(process.pid)], capture_output=True, text=True, check=True
        )
        os.kill(max(int(child) for child in children.stdout.split()), signal.SIGKILL)
        assert process.wait(WAIT_SECONDS) == 128 + signal.SIGKILL
    finally:
        process.kill()
        process.wait()
    said = (tmp_path / "err").read_text()
    assert "rank 1 was killed by SIGKILL" in said
    assert "another rank is gone" in said
    assert "GLHF" not in said
