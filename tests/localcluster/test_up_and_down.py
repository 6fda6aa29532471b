"""`ballast up` starts a cluster that stays; `ballast down` leaves nothing of it."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from ballast_localcluster.supervision.processes import MARK_VARIABLE, PART_VARIABLE, marked_processes

from tests.support.waiting import eventually

pytestmark = pytest.mark.api

COMMAND_SECONDS = 120
SCENARIO = "test_a_pod_may_only_read_its_plan_and_renew_its_lease"


@pytest.fixture
def command(tmp_path):
    """Runs the program, with a state folder of its own."""
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}

    def run(*words):
        return subprocess.run(
            [Path(sys.executable).with_name("ballast"), *words],
            env=environment,
            capture_output=True,
            text=True,
            timeout=COMMAND_SECONDS,
            check=False,
        )

    yield run
    for entry in (tmp_path / "ballast" / "clusters").glob("*"):
        run("down", "--name", entry.name)


def test_a_cluster_stays_until_it_is_taken_down(command, tmp_path):
    """It outlives the command, is found again by name, and goes with everything it had."""
    nodes = tmp_path / "nodes.yaml"
    nodes.write_text("nodes: [{name: only, gpus: 3}]")
    started = command("up", "--nodes", str(nodes), "--name", "mine")
    assert started.returncode == 0, started.stderr
    for line in ("export KUBECONFIG=", "apply -f ", "ballast top "):
        assert f"\n  {line}" in started.stdout or f"kubectl {line}" in started.stdout

    again = json.loads(command("up", "--name", "mine", "--output", "json").stdout)
    assert again["wasRunning"] is True
    assert "leader elected" in Path(again["operatorLog"]).read_text()
    operator = f"{PART_VARIABLE}={again['folder']}/operator"
    first = set(marked_processes(operator))  # the operator, and its solver
    os.kill(min(first), signal.SIGKILL)
    eventually(lambda: set(marked_processes(operator)) - first, "another operator")
    found = subprocess.run(
        [again["kubectl"], "--kubeconfig", again["kubeconfig"], "get", "nodes", "-o", "json"],
        capture_output=True,
        check=True,
        timeout=COMMAND_SECONDS,
    )
    (node,) = json.loads(found.stdout)["items"]
    assert (node["metadata"]["name"], node["status"]["capacity"]["nvidia.com/gpu"]) == ("only", "3")

    stopped = command("down", "--name", "mine")
    assert stopped.returncode == 0, stopped.stderr
    assert marked_processes(f"{MARK_VARIABLE}={again['folder']}") == []
    assert not Path(again["folder"]).exists()


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("down", "--name", "none"), "no cluster 'none' runs here"),
        (("up", "--name", "A b"), "cannot be a cluster's name"),
        (("up", "--nodes", "/no/such/file"), "/no/such/file: No such file"),
    ],
)
def test_what_cannot_be_done_is_one_line(command, words, message):
    """And no traceback."""
    done = command(*words)
    assert done.returncode == 1
    assert message in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_tests_may_use_a_cluster_of_ones_own(command):
    """With BALLAST_TEST_KUBECONFIG they bring their definitions along, and start no cluster."""
    words = ("up", "--nodes", "none", "--no-operator", "--name", "own", "--output", "json")
    started = json.loads(command(*words).stdout)
    assert started["operatorLog"] is None
    scenario = Path(__file__).parents[1] / "operator" / "api" / "test_rbac.py"
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(scenario), "-k", SCENARIO],
        env={**os.environ, "BALLAST_TEST_KUBECONFIG": started["kubeconfig"], "BALLAST_CONTROLPLANE": "/none"},
        cwd=scenario.parents[3],
        capture_output=True,
        text=True,
        timeout=COMMAND_SECONDS,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert " passed" in tested.stdout
    found = subprocess.run(
        [started["kubectl"], "--kubeconfig", started["kubeconfig"], "get", "crd", "-o", "name"],
        capture_output=True,
        check=True,
        text=True,
        timeout=COMMAND_SECONDS,
    )
    assert "customresourcedefinition.apiextensions.k8s.io/trainingjobs.ballast.dev" in found.stdout
