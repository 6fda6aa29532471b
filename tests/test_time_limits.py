"""A test that hangs fails by name, with the stacks of the processes that it has started."""

import os
import subprocess
import sys

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
    """The limit is this one's mark, too."""

    assert request.config.getoption("timeout") or request.node.get_closest_marker("timeout").args[0] > 0
    assert os.environ[STACKS_VARIABLE]


def test_only_a_wait_that_is_over_makes_children_tell():
    """Any other failure says its reason by itself."""
    with pytest.raises(AssertionError) as failed:
        raise AssertionError("1 == 2")
    assert not is_over(failed.value)
    assert is_over(TimeoutError("Timeout (>900.0s) from pytest-timeout."))
