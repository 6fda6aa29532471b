"""A policy, schedule, balancer, planner and kind of change: registered in one place, known everywhere."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.distributions import install

# The module's fixture is a process that imports everything: once, in one worker.
pytestmark = [pytest.mark.processes, pytest.mark.xdist_group("made-up rows")]

ROOT = Path(__file__).parents[2]
GROUPS = {
    "policy": "ballast.policies",
    "schedule": "ballast.schedules",
    "balancer": "ballast.balancers",
    "planner": "ballast.planners",
    "dynamic": "ballast.dynamics",
}


OWN, THEIRS = "madeup", "acme.madeup"


@pytest.fixture(scope="module")
def found(tmp_path_factory) -> Any:
    """What a fresh process says of rows of Ballast's own and of installed distributions, by name."""
    folder = tmp_path_factory.mktemp("installed")
    for kind, group in GROUPS.items():
        module = f"acme_{kind}"
        text = f"from tests.registries.made_up import INSTALLED\nROW = INSTALLED[{kind!r}]\n"
        install(folder, f"acme-{kind}", group, {THEIRS: f"{module}:ROW"}, {module: text})
    done = subprocess.run(
        [sys.executable, "-m", "tests.registries.made_up", OWN, THEIRS],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(ROOT)])},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_the_definitions_and_the_documentation_know_ours(found):
    """A made-up name is in each rule that lists names, its summary in each table."""
    assert found[OWN]["definitions"] == {"policy": True, "job": True}
    assert found[OWN]["docs"] == list(GROUPS)


def test_generated_files_do_not_depend_on_what_is_installed(found):
    """Another distribution's name passes admission by its prefix."""
    assert found[THEIRS]["definitions"] == {"policy": False, "job": False}
    assert found[THEIRS]["docs"] == []


@pytest.mark.parametrize("name", [OWN, THEIRS])
def test_the_operator_takes_them_and_refuses_what_they_cannot_do(name, found):
    """By the row's facts: stages a rank, no memory limit, no closed form, kinds that exclude each other."""
    said = found[name]["operator"]
    assert said["policy"] == name
    assert said["job"] == ""
    assert "stagesPerRank" in said["stagesPerRank"]
    assert "memoryBytes" in said["memoryBytes"]
    assert "is for the schedules 1F1B and GPipe" in said["mixedPools"]
    assert "pruning" in said["excluded"]
    assert "is not one of 1F1B" in said["unknown"]


@pytest.mark.parametrize("name", [OWN, THEIRS])
def test_the_trainer_takes_them_and_refuses_what_they_cannot_do(name, found):
    """The same; and a kind of change that leaves layers whole goes with tensor parallelism."""
    said = found[name]["trainer"]
    assert said["job"] == ""
    assert "stagesPerRank" in said["stagesPerRank"]
    assert "memoryBytes" in said["memoryBytes"]
    assert "made up to" in said["excluded"]
    assert said["tensor"] == ""


@pytest.mark.parametrize("name", [OWN, THEIRS])
def test_the_command_lines_take_them(name, found):
    """An unknown name is told the made-up one, too."""
    said = found[name]["commands"]
    assert (said["allocate"], said["plan"], said["simulate"]) == (name, name, 0)
    assert name in said["unknown"]
    if name == OWN:
        assert all(name in text for text in said["help"])
