"""Every command that the README and the documentation show can be typed."""

import itertools
import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from ballast_operator.cli.main import main as ballast
from ballast_trainer.cli.main import main as ballast_train
from click import Context, Group
from click.testing import CliRunner

from tests.docs.blocks import PAGES, ROOT, blocks
from tests.support.examples import first_daily

BIN = Path(sys.executable).parent
TYPED = blocks("console", "sh")
FOLDER = {block.where: block.folder for block in TYPED}
COMMANDS = sorted(
    {(block.where, command) for block in TYPED for command in block.commands if not command.startswith("cd ")}
)
OFFLINE = re.compile(
    r"ballast (allocate|plan|simulate|crds|\S+ --help)|ballast-train (profile|simulate|trace)"
)
TRAINS = re.compile(r"ballast-train run")
ON_A_CLUSTER = re.compile(
    r"kubectl (get|apply|describe|delete|label|logs|patch|--namespace)|ballast (explain|top|whatif|cost)"
)
LOCAL_CLUSTER = re.compile(r"ballast (up|down|demo)|export (KUBECONFIG|PATH)=|BALLAST_TEST_KUBECONFIG=")
CHART = re.compile(r"helm (install|upgrade|test|template|uninstall|rollback)")
MAKE = re.compile(r"make ([a-z-]+)")
DOCKER = re.compile(r"docker build")
LOOKS = re.compile(r"ballast (ui|doctor|support-bundle)")
PIP = re.compile(r"pip install ")
PROGRAMS = {"ballast": ballast, "ballast-train": ballast_train}
PROBLEM = {
    "gpu_types": ["v100", "k80"],
    "capacity": {"v100": 1, "k80": 1},
    "jobs": [{"name": "a", "throughput": {"v100": 4.0, "k80": 1.0}}],
}


def of_kind(kind):
    """Commands with their folders; what several pages show is run once, under the first of them."""
    shown = {(FOLDER[where], command): where for where, command in reversed(COMMANDS) if kind.match(command)}
    return [
        pytest.param(folder, command, id=f"{where} {command}")
        for (folder, command), where in sorted(shown.items(), key=lambda item: (item[1], item[0][1]))
    ]


@pytest.fixture
def checkout(tmp_path):
    """A folder like the repository's root, with the files that the pages speak of."""
    for name in ("examples", "charts", "crds"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / "jobs.json").write_text(json.dumps(PROBLEM))
    for block in blocks("yaml"):
        value = yaml.safe_load(block.text)
        for name, key in (("profile", "layers"), ("cluster", "gpus")):
            if key in value and "kind" not in value:
                (tmp_path / f"{name}.yaml").write_text(block.text)
                (tmp_path / f"{name}.json").write_text(json.dumps(with_numbers(value)))
    return tmp_path


def with_numbers(value):
    """``value`` with the numbers that YAML 1.1 reads as text, as 6.0e8."""
    if isinstance(value, dict):
        return {key: with_numbers(each) for key, each in value.items()}
    if isinstance(value, list):
        return [with_numbers(each) for each in value]
    return float(value) if isinstance(value, str) and re.fullmatch(r"\d[\d.]*e\d+", value) else value


def run(command, folder, **environment):
    """Run ``command`` as a shell would, with this environment's programs first on the path."""
    path = f"{BIN}{os.pathsep}{os.environ['PATH']}"
    return subprocess.run(
        command,
        shell=True,
        check=False,
        cwd=folder,
        text=True,
        capture_output=True,
        env={**os.environ, "PATH": path, "COLUMNS": "120", **environment},
    )


def test_every_command_is_of_a_kind_that_is_tested():
    """A command that no test below takes is added to one, or is no command."""
    kinds = (OFFLINE, TRAINS, ON_A_CLUSTER, LOCAL_CLUSTER, CHART, MAKE, DOCKER, LOOKS, PIP)
    assert [item for item in COMMANDS if not any(kind.match(item[1]) for kind in kinds)] == []


@pytest.mark.slow
@pytest.mark.parametrize(("folder", "command"), of_kind(OFFLINE))
def test_commands_that_need_no_cluster_succeed(folder, command, checkout, monkeypatch):
    """Run as they stand, beside the files that their page shows."""
    monkeypatch.chdir(checkout / folder)
    monkeypatch.setattr(sys, "path", [*sys.path])
    typed, _, target = command.partition(" > ")
    done = run_here(typed, {})
    assert done.returncode == 0, done.stderr
    if target:
        Path(target).write_text(done.stdout)


@pytest.mark.processes
@pytest.mark.parametrize(
    ("folder", "command"), first_daily([(".", "ballast --help"), *(case.values for case in of_kind(TRAINS))])
)
def test_programs_start_and_train(folder, command, checkout):
    """As processes of their own; the first steps of what they train."""
    steps = " --set totalSteps=3 --set checkpoint=null" if TRAINS.match(command) else ""
    done = run(command + steps, checkout / folder)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(("folder", "command"), [*of_kind(LOOKS), *of_kind(TRAINS)])
def test_what_runs_on_is_started_by_options_that_there_are(folder, command, checkout, monkeypatch):
    """What each shows is tested in tests/operator/page/test_commands.py and tests/operator/live; that a
    process trains, by the notebooks.
    """
    monkeypatch.chdir(checkout / folder)
    Path("run.json").touch()
    program, name, *words = shlex.split(command, comments=True)
    with PROGRAMS[program].make_context(program, [name, *words]) as context:
        found = PROGRAMS[program].get_command(context, name)
        found.make_context(name, words, parent=context)


def test_commands_within_sentences_have_the_options_that_they_name():
    """Of the README, the pages, the decisions and the laboratory's."""
    pages = [
        *PAGES,
        *(page for folder in ("docs/decisions", "lab") for page in (ROOT / folder).rglob("*.md")),
    ]
    unknown = []
    for page in pages:
        for text in re.findall(r"`(ballast(?:-train)? [a-z][^`\n]*)`", page.read_text()):
            program, *words = text.partition(" | ")[0].split()
            found = PROGRAMS[program]
            while isinstance(found, Group) and words and not words[0].startswith("-"):
                found = found.get_command(Context(found), words.pop(0))
            assert found is not None, f"{page.relative_to(ROOT)}: {text}"
            known = {"--help"}.union(*((*each.opts, *each.secondary_opts) for each in found.params))
            given = {word.partition("=")[0] for word in words if re.match(r"--[a-z]", word)}
            if not given <= known:
                unknown.append(f"{page.relative_to(ROOT)}: {text}")
    assert unknown == []


@pytest.mark.parametrize(("folder", "command"), of_kind(MAKE))
def test_make_targets_exist(folder, command):
    target = MAKE.match(command)[1]
    assert re.search(rf"^{target}:.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize(("folder", "command"), of_kind(DOCKER))
def test_images_are_built_from_files_that_exist(folder, command):
    """The Dockerfile that the command names, or the root's."""
    words = shlex.split(command)
    file = words[words.index("-f") + 1] if "-f" in words else "Dockerfile"
    assert (ROOT / file).is_file()
    assert words[-1] == "."


@pytest.mark.parametrize(("folder", "command"), of_kind(CHART))
def test_chart_commands_name_the_chart_and_values_that_it_has(folder, command):
    """tests/operator/chart installs, upgrades and uninstalls the chart on a real API server."""
    words = shlex.split(command.split("|")[0])
    if words[1] in {"install", "upgrade", "template"}:
        assert words[3] == "charts/ballast"
    schema = json.loads((ROOT / "charts/ballast/values.schema.json").read_text())
    for option, value in itertools.pairwise(words):
        if option == "--set":
            at = schema
            for part in value.split("=")[0].split("."):
                at = at["properties"][part]


@pytest.mark.parametrize(("folder", "command"), of_kind(PIP))
def test_packages_that_are_installed_exist_with_their_extras(folder, command):
    """tests/packaging installs the wheels that are built from this checkout."""
    name, extra = re.fullmatch(r"ballast-([a-z]+)(?:\[([a-z]+)\])?", shlex.split(command)[-1]).groups()
    folder = {"trainer": "trainer-image", "policies": "policies"}.get(name, name)
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"]
    assert project["name"] == f"ballast-{name}"
    assert extra is None or extra in project["optional-dependencies"]


def run_here(command, environment):
    """Run a command in this process, whose imports are made: many commands are, one after the other."""
    program, *words = shlex.split(command)
    done = CliRunner().invoke(PROGRAMS[program], words, env={"COLUMNS": "120", **environment})
    return subprocess.CompletedProcess(command, done.exit_code, done.stdout, done.output)


@pytest.mark.api
def test_commands_on_a_cluster_succeed(control_plane, checkout, monkeypatch):
    """In the order of the pages, on a real API server that has the examples; changes only by a dry run."""
    kubectl = control_plane.cluster.kubectl if control_plane.cluster else "kubectl"
    (checkout / "bin").mkdir()
    (checkout / "bin/kubectl").symlink_to(kubectl)
    path = f"{checkout / 'bin'}{os.pathsep}{BIN}{os.pathsep}{os.environ['PATH']}"
    environment = {"KUBECONFIG": str(control_plane.kubeconfig), "PATH": path}
    folder = checkout
    monkeypatch.chdir(folder)
    existing = (
        "-f examples/trainingjob.yaml -f examples/clusterpolicy.yaml -f examples/demo/01-transformer.yaml"
    )
    done = run(f"kubectl apply --server-side {existing}", folder, **environment)
    assert done.returncode == 0, done.stderr
    try:
        shown = {command: where for where, command in reversed(COMMANDS)}
        for command, where in sorted(shown.items(), key=lambda item: (item[1], item[0])):
            # Logs and roll-outs need pods: tests/e2e/test_quickstart.py has a cluster with nodes.
            if not ON_A_CLUSTER.match(command) or " logs " in command or " rollout " in command:
                continue
            tried = command
            if re.match(r"kubectl (apply|delete|label|patch)", command):
                tried += " --dry-run=server"
            if command == "ballast top":
                tried += " --once"
            here = tried.startswith("ballast ")
            done = run_here(tried, environment) if here else run(tried, folder, **environment)
            assert done.returncode == 0, f"{where}: {tried}\n{done.stderr}"
    finally:
        run(f"kubectl delete --ignore-not-found {existing}", folder, **environment)
