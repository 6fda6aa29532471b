"""What the Dockerfile installs: each image its own packages, no test helpers, and commands that work."""

import os
import re
import shlex
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = {
    "policies": "ballast_policies",
    "operator": "ballast_operator",
    "trainer-image": "ballast_trainer",
    "client": "ballast ballast_client",
    "localcluster": "ballast_localcluster",
    "lab": "ballast_lab",
}
UV = shutil.which("uv") or shutil.which("uv", path=ROOT / ".venv-tools" / "bin")

pytestmark = [
    pytest.mark.processes,
    pytest.mark.xdist_group("packaging"),
    pytest.mark.skipif(UV is None, reason="uv is not installed; `make setup` installs it"),
]


def stage(name):
    """The instructions of one stage of the Dockerfile, each on one line."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    stages = re.split(r"^FROM (\S+)(?: AS (\S+))?$", text, flags=re.MULTILINE)
    return dict(zip(stages[2::3], stages[3::3], strict=True))[name].splitlines()


def copied(name):
    """Sources in the repository that a stage copies."""
    lines = [line.split() for line in stage(name) if re.match(r"COPY (?!--from)", line)]
    return [source for line in lines for source in line[1:-1]]


def uv_commands(name):
    """The arguments that a stage gives uv."""
    lines = [line for line in stage(name) if line.startswith("RUN") and "uv sync" in line]
    return [shlex.split(line)[shlex.split(line).index("uv") + 1 :] for line in lines]


def uv(*words, folder, **environment):
    """Run uv with what `make setup` left in its cache, or with the network where that is not enough."""
    for offline in ("1", "0"):
        done = subprocess.run(
            [UV, *words],
            cwd=folder,
            env={**os.environ, "UV_OFFLINE": offline, **environment},
            capture_output=True,
            text=True,
            check=False,
        )
        if done.returncode == 0:
            break
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def context(tmp_path_factory):
    """Copies what the stages of an image copy: ``context("operator")`` is the folder."""

    def make(image):
        folder = tmp_path_factory.mktemp(image)
        for source in dict.fromkeys([*copied("workspace"), *copied(f"build-{image}")]):
            if (ROOT / source).is_dir():
                shutil.copytree(
                    ROOT / source,
                    folder / source,
                    dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("__pycache__"),
                )
            else:
                (folder / source).parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / source, folder / source)
        return folder

    return make


@pytest.fixture(scope="module")
def operator_image(context, tmp_path_factory):
    """The operator image's environment, made by the image's own commands from what the image copies."""
    environment = tmp_path_factory.mktemp("image") / "ballast"
    folder = context("operator")
    for words in uv_commands("build-operator"):
        # As in the image: of links into uv's cache, all environments would see the changes.
        uv(*words, folder=folder, UV_PROJECT_ENVIRONMENT=str(environment), UV_LINK_MODE="copy")
    (last,) = [line for line in stage("build-operator") if "tidy-image" in line]
    for command in last.removeprefix("RUN ").replace("/opt/ballast", str(environment)).split("&&"):
        words = shlex.split(command)
        done = subprocess.run(
            [UV if words[0] == "uv" else words[0], *words[1:]],
            cwd=folder,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr
    return environment


def ballast(image, *words):
    """Run the image's command, away from the repository."""
    command = [image / "bin" / "ballast", *words]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(command, cwd=image, env=environment, capture_output=True, text=True, check=False)


def test_the_operators_image_has_the_operator_and_the_policies_alone(operator_image):
    """No local cluster, no trainer, no torch, nothing of the tests; and the files that commands read."""
    (packages,) = operator_image.glob("lib/python*/site-packages")
    assert {entry.name for entry in packages.glob("ballast_*") if "-" not in entry.name} == {
        "ballast_client",
        "ballast_operator",
        "ballast_policies",
    }
    assert not any((packages / name).exists() for name in ("torch", "pytest", "hypothesis"))
    assert list((packages / "ballast_operator/demo/examples").glob("*.yaml"))


def test_the_operators_image_has_no_solver_that_no_policy_asks_for(operator_image):
    """Nor tests of packages, or bytecode that depends on the time; convex programs are solved."""
    (packages,) = operator_image.glob("lib/python*/site-packages")
    assert not [name for name in ("scs", "osqp", "sparsediffpy", "pygments") if (packages / name).exists()]
    assert not list(packages.rglob("tests"))
    assert not list(packages.glob("*/uv_cache.json"))
    compiled = list(packages.glob("ballast_operator/**/*.pyc"))
    assert compiled
    assert {file.read_bytes()[4] for file in compiled} == {1}  # PEP 552: by the source's hash, unchecked
    assert {file.lstat().st_mtime for file in packages.rglob("*")} == {0}
    solved = "import cvxpy as c; x = c.Variable(); print(c.Problem(c.Maximize(c.log(x)), [x <= 1]).solve())"
    done = subprocess.run(
        [operator_image / "bin/python", "-c", solved], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert abs(float(done.stdout)) < 1e-6


SOLVES = """
from ballast_policies.allocation.problem import Job, Problem
from ballast_policies.allocation.registry import POLICIES, allocate

rates = {"one": {"a": 3.0, "b": 1.0}, "two": {"a": 2.0, "b": 1.0}, "three": {"a": 1.0, "b": 0.5}}
jobs = tuple(Job(name=name, throughput=rate, steps_remaining=100.0) for name, rate in rates.items())
types = {"capacity": {"a": 1, "b": 1}, "prices": {"a": 2.0, "b": 1.0}}
problem = Problem(gpu_types=("a", "b"), jobs=jobs, entities={}, **types)
for name in POLICIES.builtin:
    assert max(allocate(name, problem).levels.values()) > 0, name
"""


def test_every_policy_solves_in_the_operators_image(operator_image):
    """With what is left of the solvers' packages, which have a limit."""
    command = [operator_image / "bin/python", "-c", SOLVES]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    size = sum(file.lstat().st_size for file in operator_image.rglob("*"))
    assert size < (220 if shutil.which("strip") else 260) * 1e6


def test_the_installed_command_simulates(operator_image):
    """Without an extra: the solvers come with the command."""
    done = ballast(
        operator_image,
        *("simulate", "--policy", "max-min-fairness", "--static", "5", "--seed", "0"),
        *("--cluster", "v100=8,p100=8,k80=8", "--rules", "ballast", "--output", "json"),
    )
    assert done.returncode == 0, done.stderr
    assert '"jobs_measured": 5' in done.stdout


def test_the_operators_image_names_the_laboratory_that_it_lacks(operator_image):
    """Gavel's rules, the default, come with ballast-lab."""
    done = ballast(operator_image, "simulate", "--policy", "fifo", "--static", "5", "--cluster", "v100=8")
    assert done.returncode == 1
    assert "To fix: pip install ballast-lab" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("command", ["up", "demo"])
def test_a_command_that_needs_an_extra_names_it(operator_image, command):
    """One line with the command that installs it; the help needs no extra."""
    done = ballast(operator_image, command)
    assert done.returncode == 1
    assert "pip install 'ballast-operator[local]'" in done.stderr
    assert "Traceback" not in done.stderr
    assert ballast(operator_image, command, "--help").returncode == 0


def test_the_trainers_image_has_torch_and_no_kubernetes_client(context):
    """Its locked requirements: what is of this repository, torch, no solver, no client of Kubernetes."""
    (words,) = [words for words in uv_commands("build-trainer") if "--no-editable" in words]
    words = [word for word in words[1:] if word != "--no-editable"]
    lines = uv("export", *words, "--no-hashes", "--quiet", folder=context("trainer")).splitlines()
    own = {line.removeprefix("-e ./") for line in lines if line.startswith("-e ")}
    others = {re.split(r"[=<> ;\[]", line)[0] for line in lines if line and line[0] not in "#- "}
    assert own == {"client", "policies", "trainer-image"}
    assert "torch" in others
    assert not others & {"kubernetes", "kopf", "cvxpy", "highspy", "scipy", "pytest"}


STANDS_FOR = {
    "id": "echo 0",
    "buildah": "",
    "mmdebstrap": "",
    "df": "echo 99999",
    "unshare": 'while [[ $1 == --* ]]; do shift; done; test -x "$1" && echo "$2"',
}


def test_images_are_built_from_any_folder(tmp_path):
    """The script starts itself again, and its folder is named as seen from where it is called."""
    programs, called = tmp_path / "programs", tmp_path / "called"
    programs.mkdir()
    called.mkdir()
    for name, body in STANDS_FOR.items():
        (programs / name).write_text(f"#!/usr/bin/env bash\n{body}\n")
        (programs / name).chmod(0o755)
    script = os.path.relpath(ROOT / "scripts" / "build-images", called)
    path = {"PATH": f"{programs}:{os.environ['PATH']}"}
    done = subprocess.run(
        [script, "made", "operator"], cwd=called, env=path, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"{(called / 'made').resolve()}\n"), done.stderr


def test_archives_have_the_names_that_chart_and_examples_give_images():
    """What nodes have is not pulled: a job of the examples runs as it is."""
    (group,) = re.findall(
        r":docker\.io/(\S+)/\$target:\$version", (ROOT / "scripts/build-images").read_text()
    )
    examples = (ROOT / "operator/ballast_operator/demo/examples").glob("*.yaml")
    named = {name for file in examples for name in re.findall(r"image: (\S+)", file.read_text())}
    assert {name.partition(":")[0] for name in named} == {f"{group}/trainer"}
    assert f"repository: {group}/operator" in (ROOT / "charts/ballast/values.yaml").read_text()


LOADS = """
import importlib, pkgutil, sys
for found in pkgutil.walk_packages(importlib.import_module(sys.argv[1]).__path__, sys.argv[1] + "."):
    importlib.import_module(found.name)
print("loaded")
"""


@pytest.mark.parametrize("package", ["ballast_operator", "ballast_trainer", "ballast_localcluster"])
def test_to_load_a_module_runs_no_program(package):
    """As scripts/tidy-image does in an image: a program that started there would end the build."""
    command = [sys.executable, "-c", LOADS, package]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.splitlines()[-1:]) == (0, ["loaded"]), done.stderr


@pytest.mark.parametrize("folder", PACKAGES)
def test_a_wheel_holds_its_package_its_data_and_the_license(folder, tmp_path):
    """Every file of the package and nothing else: the Go module of the control plane is in its package."""
    uv("build", "--wheel", "--quiet", "--out-dir", str(tmp_path), str(ROOT / folder), folder=ROOT)
    (wheel,) = tmp_path.glob("*.whl")
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    tracked = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", *PACKAGES[folder].split()],
        cwd=ROOT / folder,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert held == {name for name in tracked if (ROOT / folder / name).exists()}
    assert (ROOT / folder / "LICENSE").read_bytes() == (ROOT / "LICENSE").read_bytes()
    assert not [name for name in held if "test" in Path(name).name.split("_")]
