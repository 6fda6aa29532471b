"""The quick start works as it is written: a cluster of one's own, a job, a look at it, and away."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from ballast_localcluster.supervision.processes import MARK_VARIABLE, PART_VARIABLE, marked_processes

from tests.docs.blocks import ROOT, blocks
from tests.support.waiting import eventually

pytestmark = [pytest.mark.e2e, pytest.mark.slow]


@pytest.fixture
def state():
    """A folder whose path leaves room for a socket's, from which pods are forked."""
    with tempfile.TemporaryDirectory(prefix="ballast-") as name:
        yield Path(name)


def test_the_commands_of_the_quick_start(state):
    """All but `make demo` (test_demo_story.py), in order, in a state folder of their own.

    The cluster outlives its command, is found again, and goes with everything that it had.
    """
    page = [b for b in blocks("console") if b.where.startswith("docs/quickstart.md")]
    commands = [command for block in page for command in block.commands if not command.startswith("make ")]
    assert commands[1] == "ballast up" and "ballast down" in commands
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
                for line in ("export KUBECONFIG=", "ballast top "):
                    assert f"\n  {line}" in done.stdout
                folder = Path(kubectl[1]).parent
                environment["PATH"] = f"{folder}{os.pathsep}{environment['PATH']}"
                # Before the job's ranks take the processors.
                again = json.loads(run("ballast up --output json").stdout)
                assert again["wasRunning"] is True
                _its_operator_comes_back(again)
        mark = f"{MARK_VARIABLE}={again['folder']}"
        eventually(lambda: not marked_processes(mark), "every process to end")
        assert not Path(again["folder"]).exists()
    finally:
        run("ballast down")


def _its_operator_comes_back(cluster):
    """Killed, once it has led."""
    log = Path(cluster["operatorLog"])
    eventually(lambda: "leader elected" in log.read_text(), "the operator's line")
    part = f"{PART_VARIABLE}={cluster['folder']}/operator"
    first = set(marked_processes(part))  # the operator, and its solver
    os.kill(min(first), signal.SIGKILL)
    eventually(lambda: set(marked_processes(part)) - first, "another operator")


def _succeeded(done):
    return done if done.returncode == 0 and done.stdout.strip() else None
