"""The commands of the Makefile exist, and are told by `make help`."""

import importlib
import os
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAKEFILE = (ROOT / "Makefile").read_text()


def test_every_declared_command_has_a_recipe_and_a_line_of_help():
    """A command that is declared and absent would succeed without doing anything."""
    declared = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)[1].split()
    helped = re.findall(r"^([a-z0-9-]+):.*## .+$", MAKEFILE, re.MULTILINE)
    assert sorted(declared) == sorted({*helped, "clean"})


def test_every_quick_benchmark_is_there():
    """Each line of benchmarks/quick.txt is a script and its options."""
    for line in (ROOT / "benchmarks" / "quick.txt").read_text().splitlines():
        assert (ROOT / "benchmarks" / line.split()[0]).is_file(), line


def test_benchmarks_are_judged_by_the_last_releases_costs():
    """Within the range passes, above it fails, and so does a command that fails; a new one is only shown."""
    folder = str(ROOT / "benchmarks")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        compare = importlib.import_module("compare")

    def judged(command, ratio, code=0):
        cost = compare.Cost(command=command, cpu_seconds=1.0, ratio=ratio, code=code)
        (row,), passed = compare.judge(
            [cost], {"known": {"ratio": 10.0}, "noisy": {"ratio": 10.0, "most": 3}}
        )
        return row, passed

    assert judged("known", 12.0)[1]
    row, passed = judged("known", 20.0)
    assert (passed, "2.00 of the last release's 10.0: OVER 1.6" in row) == (False, True)
    assert judged("noisy", 20.0)[1]
    assert not judged("known", 1.0, code=1)[1]
    assert judged("new", 99.0)[1]


@pytest.mark.xdist_group("kept together")
def test_tests_of_a_group_are_kept_in_one_worker(request):
    """pytest-xdist sees the group in the test's id; else every worker would start every shared cluster.

    The fast tests, which share nothing, are distributed by file.
    """
    if request.config.getoption("loadgroup", False):
        assert request.node.nodeid.endswith("@kept together")


def test_the_results_on_a_gpu_are_kept_under_the_cards_name(tmp_path):
    """Beside those of other cards; pytest's file has each test."""
    programs = tmp_path / "venv" / "bin"
    programs.mkdir(parents=True)
    for name, says in (("nvidia-smi", "NVIDIA H200"), ("python", "$BALLAST_TEST_DEVICE $@")):
        (programs / name).write_text(f'#!/bin/sh\necho "{says}"\n')
        (programs / name).chmod(0o755)
    (tmp_path / "venv" / ".ballast-setup").touch()
    path = f"{programs}:{os.environ['PATH']}"
    command = ["make", "test-cuda", f"VENV={tmp_path / 'venv'}"]
    ran = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True, check=True
    )
    assert re.search(
        r"^cuda .*--junitxml=out/cuda/NVIDIA-H200.xml .*test_same_curve", ran.stdout, re.MULTILINE
    )
