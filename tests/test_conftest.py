"""What conftest.py does for all tests: each has a limit, and a cluster ends with the last that names it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.time_limits import STACKS_VARIABLE, is_over, now, stacks_of_children
from tests.support.waiting import eventually

CHILD = "import time\ndef hangs():\n    print('up', flush=True)\n    time.sleep(3600)\nhangs()"
PARENT = "import subprocess, sys; subprocess.run([sys.executable, '-c', sys.argv[1]], stdout=sys.stdout)"


@pytest.mark.processes
def test_a_child_that_hangs_says_where_and_is_ended(tmp_path):
    """Those from before the test are left alone; the processes of children count, too."""
    before, errors = now(), tmp_path / "errors"
    command = [sys.executable, "-c", PARENT, CHILD]
    with errors.open("w") as log, subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log) as process:
        assert process.stdout.readline() == b"up\n"
        assert stacks_of_children(now() + 1, process.pid) == ""
        text = stacks_of_children(before, process.pid)
        assert " in hangs\n" in text
        eventually(lambda: process.poll() is not None, "the parent, whose child has ended, to end")


def test_every_test_has_a_limit_and_children_are_able_to_tell(request):
    assert request.config.getoption("timeout") or request.node.get_closest_marker("timeout").args[0] > 0
    assert os.environ[STACKS_VARIABLE]


def test_only_a_wait_that_is_over_makes_children_tell():
    """Any other failure says its reason by itself."""
    with pytest.raises(AssertionError) as failed:
        raise AssertionError("1 == 2")
    assert not is_over(failed.value)
    assert is_over(TimeoutError("Timeout (>900.0s) from pytest-timeout."))


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
