"""Pods forked from a warm process end as pods do."""

import json
import os
import signal
import subprocess
import sys

import pytest
from ballast_policies.contract import ExitCode
from ballast_trainer.channel.directory import DirectoryChannel
from ballast_trainer.testing import eventually, local_plan
from ballast_trainer.warm_start import WARM_START_ENV, start_warm

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    path = tmp_path_factory.mktemp("warm") / "socket"
    process = subprocess.Popen([sys.executable, "-m", "ballast_trainer.warm_start", str(path)])
    eventually(path.exists, "the server listens")
    yield str(path)
    process.kill()
    process.wait()


@pytest.fixture
def warm_pod(server, tmp_path, small_config):
    """Start ``ballast-train pod`` through the server; returns its process."""
    started = []

    def start(total_steps, network):
        folder = tmp_path / "channel"
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(small_config(totalSteps=total_steps)))
        DirectoryChannel(folder).publish(local_plan(["job-1-0"], network=network))
        environment = {
            **os.environ,
            WARM_START_ENV: server,
            "BALLAST_JOB": "job",
            "BALLAST_POD_NAME": "job-1-0",
            "BALLAST_CHANNEL": str(folder),
        }
        with (tmp_path / "out").open("w") as out, (tmp_path / "err").open("w") as err:
            command = [sys.executable, "-m", "ballast_trainer", "pod"]
            process = subprocess.Popen(command, env=environment, stdout=out, stderr=err, cwd=tmp_path)
        started.append(process)
        return process

    yield start
    for process in started:
        process.kill()
        process.wait()


def steps(tmp_path):
    return (tmp_path / "out").read_text().count('"step_seconds"')


def test_a_warm_pod_trains_and_ends_with_its_forks_code(warm_pod, tmp_path):
    """Its output goes to the pod's own streams."""
    process = warm_pod(4, 31)
    assert process.wait(60) == ExitCode.OK, (tmp_path / "err").read_text()
    assert steps(tmp_path) == 4


def test_sigterm_reaches_the_fork(warm_pod, tmp_path):
    """The pod stops as it would by itself."""
    process = warm_pod(100_000, 32)
    eventually(lambda: steps(tmp_path) > 2, "it trains")
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == ExitCode.STOPPED


def test_a_fork_does_not_outlive_its_pod(warm_pod, tmp_path):
    """SIGKILL of the pod's process ends the fork too."""
    process = warm_pod(100_000, 33)
    eventually(lambda: steps(tmp_path) > 2, "it trains")
    process.kill()
    process.wait()
    report = tmp_path / "channel/report.json"

    def silent():
        # The fork renews its report every second while it lives.
        before = report.stat().st_mtime_ns
        return not any(report.stat().st_mtime_ns != before for _ in _two_seconds())

    eventually(silent, "the fork is gone")


def _two_seconds():
    import threading

    waiter = threading.Event()
    for _ in range(20):
        waiter.wait(0.1)
        yield


def test_without_a_server_the_pod_starts_as_usual(tmp_path):
    """No variable, or nothing that listens: no fork, no error."""
    assert start_warm({}) is None
    assert start_warm({WARM_START_ENV: str(tmp_path / "nobody")}) is None
