"""Text of pods and users on a terminal, completion of its shells, and numbers that are none."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import tomllib
from pathlib import Path

import click
import pytest
from ballast_operator.cli.main import main
from ballast_operator.cli.option_names import printable
from ballast_policies.gpus.catalogue import built_in_gpus
from ballast_trainer.cli.main import main as ballast_train
from click.testing import CliRunner

ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize("hostile", ["\x1b[2J", "\x1b]0;title\x07", "\r", "\x9b31m", "\u202e", "\x00"])
def test_a_message_cannot_write_to_the_terminal_but_its_letters(hostile):
    """Escape sequences, carriage returns and direction overrides are shown as U+FFFD."""
    shown = printable(f"loss is NaN{hostile}\nstep 3: größer als 1 €")
    assert shown.startswith("loss is NaN\N{REPLACEMENT CHARACTER}") and hostile not in shown
    assert shown.endswith("\nstep 3: größer als 1 €")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_the_program(shell):
    """The script names the variable by which the program answers."""
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"_BALLAST_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.processes
def test_what_ends_with_a_terminal_is_removed_though_a_second_signal_comes():
    code = """import signal
from ballast_operator.cli import __main__ as program, main as commands

def main(prog_name):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        signal.raise_signal(signal.SIGHUP)
        print("removed")

commands.main = main
program.main()"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (128 + signal.SIGTERM, "removed\n")


@pytest.mark.slow
@pytest.mark.processes
def test_closed_standard_input_is_empty_and_closed_output_no_fault(tmp_path):
    """As under a supervisor: ``ballast ... <&-``, and ``>&-``."""

    def run(closed, *words, module="ballast_operator.cli"):
        program = [sys.executable, "-m", module, *words]
        return subprocess.run(
            ["sh", "-c", f'exec "$@" {closed}', "sh", *program], capture_output=True, text=True, check=False
        )

    assert "Error: not JSON" in run("<&-", "allocate", "--policy", "fifo", "--input", "-").stderr
    assert "holds no manifest" in run("<&-", "submit", "-f", "-").stderr
    written = run(">&- 2>&-", "crds", "--output-dir", str(tmp_path / "crds"))
    assert written.returncode == 0 and len(list((tmp_path / "crds").iterdir())) == 2
    config, short = str(ROOT / "examples/trainer/1f1b.yaml"), ("--set", "totalSteps=1")
    trained = run("<&- >&-", "run", "--config", config, *short, module="ballast_trainer")
    assert (trained.returncode, trained.stderr) == (0, "")


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_the_script_and_completes_commands_and_options():
    script = CliRunner().invoke(main, ["completion", "bash"]).stdout
    assert subprocess.run(["bash", "-n"], input=script, text=True, check=False).returncode == 0

    def completed(*words):
        environment = {
            **os.environ,
            "_BALLAST_COMPLETE": "bash_complete",
            "COMP_WORDS": " ".join(("ballast", *words)),
            "COMP_CWORD": str(len(words)),
        }
        code = "from ballast_operator.cli.main import main; main(prog_name='ballast')"
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        return {line.partition(",")[2] for line in run.stdout.splitlines()}

    assert {"submit", "suspend"} <= completed("su")
    assert "--follow" in completed("logs", "--fo")


@pytest.mark.parametrize("number", ["nan", "inf", "-inf", "1e400"])
@pytest.mark.parametrize(
    "command",
    [["top", "--every"], ["whatif", "--over-time"], ["operator", "--history-days"], ["demo", "--time-limit"]],
    ids=lambda c: c[0],
)
def test_what_is_no_finite_number_is_refused_before_anything_is_done(command, number):
    """With the option's name and no traceback."""
    result = CliRunner().invoke(main, [*command, number])
    assert result.exit_code == 2
    assert command[1] in result.output and "Traceback" not in result.output


@pytest.mark.parametrize(
    "command",
    [
        ["plan", __file__, __file__, "--trace"],
        ["plan", __file__, __file__, "--picture"],
        ["demo", "--picture"],
        ["cost", "--plot"],
        ["support-bundle", "--file"],
    ],
    ids=lambda c: c[0],
)
def test_a_file_in_no_folder_is_refused_before_anything_is_done(command, tmp_path):
    """Not after the minutes that its content takes."""
    result = CliRunner().invoke(main, [*command, str(tmp_path / "none" / "x")])
    assert result.exit_code == 2
    assert f"'{command[-1]}': there is no folder {tmp_path / 'none'}. To fix: " in result.output


@pytest.mark.parametrize("command", [["ui", "--port"], ["operator", "--metrics-port"]], ids=lambda c: c[0])
def test_a_port_that_there_is_not_is_refused_before_anything_is_done(command):
    """The range is told, and no socket is asked."""
    result = CliRunner().invoke(main, [*command, "65536"])
    assert result.exit_code == 2
    assert f"'{command[1]}': 65536 is not in the range 0<=x<=65535" in result.output


@pytest.mark.parametrize(
    ("command", "line"), [("completion", "zsh:  echo"), ("submit", "ballast submit --name")]
)
def test_the_examples_of_a_help_text_keep_their_lines(command, line):
    """What is to be copied is not wrapped into a paragraph."""
    lines = CliRunner().invoke(main, [command, "--help"]).output.splitlines()
    assert [each for each in lines if each.strip().startswith(line)]


@pytest.mark.parametrize("program", [main, ballast_train], ids=["ballast", "ballast-train"])
def test_control_c_and_a_full_disk_end_a_command_without_a_traceback(program, monkeypatch):
    """130, as a shell says of a program that Ctrl-C ended."""

    def run_until(error):
        @click.command()
        def command():
            raise error

        monkeypatch.setattr(program, "get_command", lambda context, name: command)
        return CliRunner().invoke(program, ["simulate"])

    assert run_until(KeyboardInterrupt()).exit_code == 130
    if program is main:
        for error in (errno.ENOSPC, errno.EDQUOT, errno.ENAMETOOLONG, errno.EROFS, errno.EACCES):
            told = run_until(OSError(error, os.strerror(error), "/home/a"))
            assert told.exit_code == 1
            assert f"Error: /home/a: {os.strerror(error)}. To fix: " in told.stderr


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.parametrize("package", ["operator", "trainer-image"])
def test_control_c_while_a_program_is_imported_ends_it_silently(package, tmp_path):
    """Of each script that the package installs, before there is a command that could take it."""
    # A shell's background job has SIGINT ignored, and so would a program that it starts.
    heard = "signal.signal(signal.SIGINT, signal.default_int_handler)"
    (tmp_path / "click.py").write_text(f"import os, signal\n{heard}\nos.kill(os.getpid(), signal.SIGINT)\n")
    project = tomllib.loads((ROOT / package / "pyproject.toml").read_text())["project"]
    for entry in project["scripts"].values():
        module, _, function = entry.partition(":")
        code = f"from {module} import {function}; {function}()"
        environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
        run = subprocess.run(
            [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
        )
        assert (run.returncode, run.stdout, run.stderr) == (130, "", "")


def run(*arguments):
    return CliRunner().invoke(main, ["gpus", *arguments])


@pytest.mark.slow
@pytest.mark.processes
def test_control_c_stops_a_rank_that_has_just_begun():
    """It comes before the ranks listen: their parent, which it reaches too, tells each of them to stop."""
    code = """if True:
    import os, signal, sys, time
    from ballast_trainer.cli.local_ranks import run_local_ranks
    from ballast_trainer.distributed.stopping import StopSignal

    def body(rank, log):
        os.kill(os.getpid(), signal.SIGINT)
        if rank == 0:
            os.kill(os.getppid(), signal.SIGINT)
        while signal.SIGTERM not in signal.sigpending():
            time.sleep(0.01)
        stop = StopSignal()
        stop.install(interactive=True)
        return 0 if stop.received else 5

    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(run_local_ranks(2, body))
    """
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stderr) == (0, "")


def test_all_gpus_are_listed_with_their_sources():
    """As text for people and as JSON in bytes and FLOP/s."""
    text = run().output
    rows = json.loads(run("--output", "json").output)["gpus"]
    assert [row["name"] for row in rows] == [gpu.name for gpu in built_in_gpus()]
    assert all(row["name"] in text and f"{row['source']}, {row['year']}" in text for row in rows)


@pytest.mark.parametrize(
    "asked",
    [["Tesla-V100-SXM2-16GB"], ["--label", "nvidia.com/gpu.product=Tesla-V100-SXM2-16GB", "--label", "a="]],
)
def test_one_gpu_by_product_or_by_the_labels_of_a_node(asked):
    """The same row either way; what is not known is null."""
    (row,) = json.loads(run(*asked, "--output", "json").output)["gpus"]
    assert row["name"] == "v100-sxm2-16gb"
    assert row["memoryBytes"] == 16e9
    assert row["flops"]["fp16"] == pytest.approx(125e12)
    assert json.loads(run("Tesla-T4", "--output", "json").output)["gpus"][0]["memoryBytesPerSecond"] is None


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (["v100"], "'v100' may be v100-pcie-16gb, v100-pcie-32gb, v100-sxm2-16gb"),
        (["NVIDIA h100"], "h100-sxm5-80gb"),
        (["mi300"], "mi300x"),
        (["-"], "'-' is not in the catalogue"),
        (["v1000"], "'v1000' is not in the catalogue"),
        (["--label", "nvidia.com/gpu.product=Tesla-T4-SHARED"], "not in the catalogue"),
        (["--label", "nvidia.com/gpu.product"], "has no '='"),
        (["Tesla-T4", "--label", "a=b"], "To fix: give one of them"),
    ],
)
def test_what_cannot_be_found_is_refused(asked, reason):
    result = run(*asked)
    assert result.exit_code != 0
    assert reason in result.output
    assert "To fix" in result.output
