"""``ballast completion`` for each shell, as the shell asks for it."""

import os
import shutil
import subprocess
import sys

import pytest
from ballast_operator.cli.main import main
from click.testing import CliRunner


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_each_shell_has_a_script_that_asks_the_program(shell):
    """The script names the variable by which the program answers."""
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"_BALLAST_COMPLETE={shell}_complete" in done.stdout


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_takes_the_script_and_completes_commands_and_options():
    """Commands of `ballast` and, of each, its options."""
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
