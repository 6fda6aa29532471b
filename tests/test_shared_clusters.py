"""A cluster that tests share is there for them alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = """
import pytest

@pytest.fixture(scope="session")
def cluster():
    print("it starts")
    yield
    print("it ends")

@pytest.fixture(scope="session")
def part(cluster):
    yield
    print("its part ends")

def test_without(): print("without")
def test_one(part): print("one")
@pytest.mark.parametrize("number", [2, 3])
def test_more(cluster, number): print(number)
@pytest.mark.skip
def test_skipped(cluster): pass
"""


@pytest.mark.processes
def test_a_cluster_ends_with_the_last_test_that_names_it(tmp_path):
    """An idle one takes a tenth of a core from the tests that are left."""
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-qs", "-c", os.devnull, "--rootdir", str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "tests.conftest", "-p", "no:cacheprovider", "-p", "no:xdist", str(tmp_path)],
        cwd=Path(__file__).parents[1],
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    lines = [line.lstrip(".s") for line in done.stdout.splitlines()]
    told = ["it starts", "one", "2", "3", "its part ends", "it ends", "without"]
    assert [line for line in lines if line in told] == told, done.stdout
