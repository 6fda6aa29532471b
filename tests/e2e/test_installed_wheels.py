"""`ballast up` to `ballast down` from installed wheels, without a checkout: a job trains to its end."""

import json
import os
import shutil
import site
import subprocess
import sys
import venv
from pathlib import Path

import pytest
import yaml

from tests.docs.blocks import ROOT
from tests.support.waiting import eventually

UV = shutil.which("uv") or shutil.which("uv", path=ROOT / ".venv-tools" / "bin")
PACKAGES = ("policies", "operator", "trainer-image", "localcluster")

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.slow,
    pytest.mark.nightly,  # tests/packaging installs the same wheels, and starts their commands
    pytest.mark.skipif(UV is None, reason="uv is not installed; `make setup` installs it"),
]


@pytest.fixture
def installed(tmp_path):
    """A folder of commands: our packages from their wheels, all others from this environment."""
    environment = tmp_path / "environment"
    venv.create(environment, symlinks=True)
    wheels = tmp_path / "wheels"
    for package in PACKAGES:
        subprocess.run([UV, "build", "--wheel", "--quiet", "--out-dir", wheels, ROOT / package], check=True)
    python = environment / "bin" / "python"
    install = [UV, "pip", "install", "--quiet", "--offline", "--no-deps", "--python", python]
    subprocess.run([*install, *wheels.glob("*.whl")], check=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    # A folder that a .pth file names has its own .pth files ignored: editable installs are not seen.
    (packages / "others.pth").write_text("\n".join(site.getsitepackages()))
    return environment / "bin"


def small_job(commands):
    """One of the demo's jobs, as the installed package has it, with a few steps."""
    (folder,) = commands.parent.glob("lib/python*/site-packages/ballast_operator/demo/examples")
    job = yaml.safe_load((folder / "03-recurrent.yaml").read_text())
    job["spec"]["totalSteps"] = 4
    return folder / "00-clusterpolicy.yaml", job


def test_a_job_trains_to_its_end_on_a_cluster_of_the_installed_commands(installed, tmp_path):
    """Nothing is read from a checkout: the working folder is empty, and no path leads to it."""
    away = tmp_path / "away"
    away.mkdir()
    kept = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "KUBECONFIG", "VIRTUAL_ENV")}
    system = os.pathsep.join(
        p for p in kept["PATH"].split(os.pathsep) if p != str(Path(sys.executable).parent)
    )
    environment = {**kept, "XDG_STATE_HOME": str(tmp_path / "state")}
    environment["PATH"] = f"{installed}{os.pathsep}{system}"

    def run(*command, text=None):
        done = subprocess.run(
            command, cwd=away, env=environment, text=True, input=text, capture_output=True, check=False
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    where = "import ballast_operator, ballast_trainer as t; print(ballast_operator.__file__, t.__file__)"
    assert all(Path(file).is_relative_to(installed.parent) for file in run("python", "-c", where).split())
    try:
        cluster = json.loads(run("ballast", "up", "--output", "json"))
        environment["KUBECONFIG"] = cluster["kubeconfig"]
        policy, job = small_job(installed)
        run(cluster["kubectl"], "apply", "-f", policy)
        run(cluster["kubectl"], "apply", "-f", "-", text=json.dumps(job))
        query = ("ballast", "explain", "recurrent", "--output", "json")
        eventually(lambda: json.loads(run(*query))["state"] == "Succeeded", "the job to succeed")
        assert "recurrent" in run("ballast", "top", "--once")
    finally:
        run("ballast", "down")
