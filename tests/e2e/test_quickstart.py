"""The quick start works as it is written: a cluster of one's own, a job, a look at it, and away."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, blocks
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


def test_the_commands_of_the_quick_start(tmp_path):
    """All but `make demo` (test_demo_story.py), in order, in a state folder of their own."""
    page = [b for b in blocks("console") if b.where.startswith("docs/quickstart.md")]
    commands = [command for block in page for command in block.commands if not command.startswith("make ")]
    assert commands[0] == "ballast up"
    state = tmp_path / "state"
    environment = {**os.environ, "XDG_STATE_HOME": str(state), "COLUMNS": "80"}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"

    def run(command):
        return subprocess.run(
            command, shell=True, cwd=ROOT, env=environment, text=True, capture_output=True, check=False
        )

    try:
        for command in commands:
            if command.startswith("export KUBECONFIG="):
                path = command.removeprefix("export KUBECONFIG=").replace("~/.local/state", str(state))
                environment["KUBECONFIG"] = path
                assert Path(path).is_file()
                continue
            if re.match(r"ballast(-train)? simulate", command):
                continue  # tests/docs/test_commands.py
            if " logs " in command:
                # The pod has to run before it has logs.
                done = eventually(lambda command=command: _succeeded(run(command)), command)
            else:
                done = run(command)
            assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
            if command == "ballast up":
                kubectl = re.search(r"(\S*kubectl) apply", done.stdout)
                assert kubectl, done.stdout
                folder = Path(kubectl[1]).parent
                environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
    finally:
        run("ballast down")


def _succeeded(done):
    return done if done.returncode == 0 and done.stdout.strip() else None
