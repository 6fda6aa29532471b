"""A policy, schedule, balancer, planner and kind of change: registered in one place, known everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributions import install

# The module's fixtures are processes that import everything: once, in one worker.
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("made-up rows")]

ROOT = Path(__file__).parents[2]
GROUPS = {
    "policy": "ballast.policies",
    "schedule": "ballast.schedules",
    "balancer": "ballast.balancers",
    "planner": "ballast.planners",
    "dynamic": "ballast.dynamics",
}


def run(folder: Path, name: str) -> Any:
    """What a fresh process says of rows called ``name``."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])}
    found = subprocess.run(
        [sys.executable, "-m", "tests.registries.made_up", name],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    return json.loads(found.stdout)


@pytest.fixture(scope="module")
def own(tmp_path_factory):
    """With rows of Ballast's own."""
    return run(tmp_path_factory.mktemp("own"), "madeup")


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """With rows of an installed distribution, one for each group."""
    folder = tmp_path_factory.mktemp("installed")
    for kind, group in GROUPS.items():
        module = f"acme_{kind}"
        text = f"from tests.registries.made_up import ROWS\nROW = ROWS[{kind!r}]\n"
        install(folder, f"acme-{kind}", group, {"acme.madeup": f"{module}:ROW"}, {module: text})
    return run(folder, "acme.madeup")


def test_the_definitions_and_the_documentation_know_ours(own):
    """A made-up name is in each rule that lists names, its summary in each table."""
    assert own["definitions"] == {"policy": True, "job": True}
    assert own["docs"] == list(GROUPS)


def test_generated_files_do_not_depend_on_what_is_installed(installed):
    """Another distribution's name passes admission by its prefix."""
    assert installed["definitions"] == {"policy": False, "job": False}
    assert installed["docs"] == []


@pytest.mark.parametrize("rows", ["own", "installed"])
def test_the_operator_takes_them_and_refuses_what_they_cannot_do(rows, request):
    """By the row's facts: stages a rank, no memory limit, no closed form, kinds that exclude each other."""
    found = request.getfixturevalue(rows)["operator"]
    assert found["policy"] == ("madeup" if rows == "own" else "acme.madeup")
    assert found["job"] == ""
    assert "stagesPerRank" in found["stagesPerRank"]
    assert "memoryBytes" in found["memoryBytes"]
    assert "is for the schedules 1F1B and GPipe" in found["mixedPools"]
    assert "pruning" in found["excluded"]
    assert "is not one of 1F1B" in found["unknown"]


@pytest.mark.parametrize("rows", ["own", "installed"])
def test_the_trainer_takes_them_and_refuses_what_they_cannot_do(rows, request):
    """The same; and a kind of change that leaves layers whole goes with tensor parallelism."""
    found = request.getfixturevalue(rows)["trainer"]
    assert found["job"] == ""
    assert "stagesPerRank" in found["stagesPerRank"]
    assert "memoryBytes" in found["memoryBytes"]
    assert "made up to" in found["excluded"]
    assert found["tensor"] == ""


@pytest.mark.parametrize("rows", ["own", "installed"])
def test_the_command_lines_take_them(rows, request):
    """An unknown name is told the made-up one, too."""
    name = "madeup" if rows == "own" else "acme.madeup"
    found = request.getfixturevalue(rows)["commands"]
    assert (found["allocate"], found["plan"], found["simulate"]) == (name, name, 0)
    assert name in found["unknown"]
    if rows == "own":
        assert all(name in text for text in found["help"])
