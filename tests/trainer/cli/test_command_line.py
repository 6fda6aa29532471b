"""The commands, as they are called."""

import contextlib
import json
import os
import signal
from pathlib import Path

import pytest
from ballast_operator.cli.main import main as ballast
from ballast_policies.contract.messages import ExitCode
from ballast_trainer.cli.main import main
from ballast_trainer.layer_profiler import overhead_seconds
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import first_daily
from tests.support.held_data import Gates
from tests.support.jobs import small_job
from tests.support.waiting import eventually, is_alive

UNDER_NOHUP = pytest.mark.skipif(
    signal.getsignal(signal.SIGHUP) is signal.SIG_IGN,
    reason="these tests run under nohup, and so does what they start: it trains on without a terminal",
)
IN_BACKGROUND = pytest.mark.skipif(
    signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
    reason="these tests run in the background of a script, and so does what they start: it ignores Ctrl-C",
)


def test_profile_gives_each_layer_in_the_planners_form(tmp_path):
    """Frozen layers have no backward; every layer has seconds and bytes."""
    path = tmp_path / "config.yaml"
    model = {"name": "gpt", "layers": 5, "args": {"dim": 16, "heads": 2, "context": 8}}
    freezing = {"kind": "freezing", "startStep": 2, "endStep": 4, "target": 0.4}
    path.write_text(json.dumps(small_job(model, steps=10, dynamics=[freezing])))
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
    for row in found["layers"]:
        assert 0 <= row["overheadSeconds"] <= row["forwardSeconds"] + row["backwardSeconds"]


@given(st.floats(0, 1), st.floats(0, 1), st.integers(1, 64), st.integers(2, 8), st.floats(0.5, 2))
def test_what_a_microbatch_takes_whatever_its_size_is_found_from_two_sizes(
    fixed, each, smaller, times, noise
):
    """Exactly where seconds are on a line; whatever was measured, it is none or a part of them."""
    size = smaller * times
    large, small = fixed + each * size, fixed + each * smaller
    assert overhead_seconds((size, large), (smaller, small)) == pytest.approx(fixed, abs=1e-9)
    assert 0 <= overhead_seconds((size, large), (smaller, small * noise)) <= large


def test_profile_measures_layers_that_take_no_smaller_microbatches(tmp_path, monkeypatch):
    """A batch norm of one sample is an error: what a microbatch takes whatever its size is not known."""
    (tmp_path / "of_pairs.py").write_text(
        "import torch\n"
        "from ballast_trainer.models.protocol import Model\n"
        "def model():\n"
        "    layers = [torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4)]\n"
        "    return Model.from_layers(layers, loss=torch.nn.functional.mse_loss)\n"
        "def data():\n"
        "    return lambda seed, step, size: (torch.randn(size, 4), torch.randn(size, 4))\n"
    )
    config = small_job("of_pairs:model", data="of_pairs:data")
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    monkeypatch.syspath_prepend(tmp_path)
    arguments = ["--config", str(tmp_path / "config.yaml"), "--steps", "1", "--output", "json"]
    result = CliRunner().invoke(main, ["profile", *arguments])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert [row["overheadSeconds"] for row in found["layers"]] == [0, 0]
    assert all(row["forwardSeconds"] > 0 for row in found["layers"])


def test_what_profile_prints_is_what_ballast_plan_reads(tmp_path):
    """As it is, without a key changed: every layer is on a GPU, at the measured seconds."""
    config = small_job({"name": "recurrent", "layers": 5, "args": {"dim": 8, "context": 4}})
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


def run(pods, config, *options):
    """``ballast-train run`` in a fork that has its imports: the process ``run``, its ranks forks of it."""
    path = pods.folder / "config.json"
    path.write_text(json.dumps(config))
    pods.start("run", ["run", "--log", "json", "--config", str(path), *options], {})


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
def test_local_ranks_say_once_what_is_wrong_with_their_configuration(options, words, pods, tmp_path):
    options = [option.format(folder=tmp_path) for option in options]
    run(pods, {"totalSteps": 2, "model": {"name": "recurrent", "layers": 3}}, "--ranks", "4", *options)
    assert pods.exit_code("run") == 2
    said = pods.errors()
    assert said.count("ballast-train: ConfigurationError") == 1
    assert words in said
    assert "Traceback" not in said


@pytest.mark.processes
def test_a_run_whose_output_is_closed_ends_with_a_message(pods):
    """As behind ``| head -1``: not as if another rank were gone, and without a traceback."""
    os.mkfifo(pods.folder / "run.out")
    run(pods, {"totalSteps": 100_000, "model": {"name": "recurrent", "layers": 4}})
    with (pods.folder / "run.out").open() as output:
        assert "launch" in output.readline()
    assert pods.exit_code("run") == 1
    assert (pods.folder / "run.err").read_text() == (
        "ballast-train: TrainingFailed: the reader has closed standard output. "
        "To fix: write to a file, or keep the reader open\n"
    )


@pytest.mark.processes
def test_a_full_disk_behind_what_it_prints_and_traces_does_not_end_the_training(pods):
    """A warning, once; the job ends as it would."""
    (pods.folder / "run.out").symlink_to("/dev/full")
    run(
        pods,
        {"totalSteps": 3, "model": {"name": "recurrent", "layers": 4}, "rebalance": {"enabled": False}},
        *("--trace", "/dev/full", "--trace-step", "2"),
    )
    assert pods.exit_code("run") == 0, pods.errors()
    assert pods.errors().count("/dev/full: no trace is written: [Errno 28]") == 1
    assert pods.errors().count("standard output cannot be written: [Errno 28]") == 1


@pytest.mark.processes
@pytest.mark.parametrize(
    ("number", "saved"),
    [
        pytest.param(signal.SIGHUP, {}, marks=UNDER_NOHUP),
        pytest.param(signal.SIGHUP, {"inMemoryEverySteps": 1}, marks=UNDER_NOHUP),
        (signal.SIGKILL, {}),
    ],
)
def test_ranks_save_and_leave_where_their_terminal_or_their_parent_is_gone(pods, tmp_path, number, saved):
    """None trains on unseen, with the folder's lock, and no step is lost."""
    config = {"totalSteps": 100_000, "model": {"name": "recurrent", "layers": 4}}
    saved = {**saved, "path": str(tmp_path / "saved"), "everySteps": 100_000}
    run(pods, {**config, "checkpoint": saved}, "--ranks", "2")
    pods.wait_for_step(1, "run")
    parent = pods.processes["run"].pid
    children = [int(c) for c in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]
    # A terminal tells all of its processes.
    for process in [*children, parent] if number == signal.SIGHUP else [parent]:
        os.kill(process, number)
    assert pods.exit_code("run") == (ExitCode.STOPPED if number == signal.SIGHUP else -number), pods.errors()
    eventually(lambda: not any(map(is_alive, children)), "the ranks are gone")
    assert list((tmp_path / "saved").glob("step-*/manifest.json"))


@IN_BACKGROUND
@pytest.mark.processes
@pytest.mark.parametrize("saved", [{}, {"inMemoryEverySteps": 1}])
def test_a_second_ctrl_c_ends_local_ranks_at_once_in_one_line(pods, tmp_path, saved):
    """Also where no step ends, and where ranks go on without one that is lost."""
    gates = Gates(tmp_path / "gates", 3)
    config = {"totalSteps": 100_000, "model": {"name": "gpt", "layers": 4, "args": {"context": 16}}}
    run(pods, gates.hold(config) | {"checkpoint": saved}, "--ranks", "2")
    eventually(gates.waiting, "the step waits", pods.errors)
    parent = pods.processes["run"].pid
    children = [int(c) for c in Path(f"/proc/{parent}/task/{parent}/children").read_text().split()]

    def pressed_until_it_ends() -> bool:
        for process in [parent, *children]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signal.SIGINT)
        return pods.processes["run"].exitcode is not None

    eventually(pressed_until_it_ends, "the command ends", pods.errors)
    assert pods.exit_code("run") == 128 + signal.SIGINT
    eventually(lambda: not any(map(is_alive, children)), "the ranks are gone")
    said = [line for line in pods.errors().splitlines() if line.startswith("ballast-train: ")]
    assert said == ["ballast-train: ended at once by a second Ctrl-C; the newest checkpoint counts"]
    assert "Traceback" not in pods.errors()


@pytest.mark.processes
def test_a_killed_local_rank_is_named(pods):
    """The others lose their peer; the command says which one was the cause, and ends as it did."""
    config = {"totalSteps": 100_000, "model": {"name": "recurrent", "layers": 4}, "data": None}
    run(pods, config, "--ranks", "2")
    pods.wait_for_step(1, "run")
    parent = pods.processes["run"].pid
    children = Path(f"/proc/{parent}/task/{parent}/children").read_text()
    os.kill(int(children.split()[-1]), signal.SIGKILL)
    assert pods.exit_code("run") == 128 + signal.SIGKILL
    said = pods.errors()
    assert "rank 1 was killed by SIGKILL" in said
    assert "another rank is gone" in said
    assert "GLHF" not in said
