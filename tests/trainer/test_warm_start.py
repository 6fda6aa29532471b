"""Pods forked from a warm process end as pods do."""

import json
import os
import select
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from ballast_policies.contract.messages import ExitCode
from ballast_trainer.channel.base import DirectoryChannel
from ballast_trainer.warm_start import WARM_START_ENV, start_warm

from tests.support.plans import local_plan
from tests.support.waiting import WAIT_SECONDS, eventually

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
    assert process.wait(WAIT_SECONDS) == ExitCode.OK, (tmp_path / "err").read_text()
    assert steps(tmp_path) == 4


def test_sigterm_reaches_the_fork(warm_pod, tmp_path):
    """The pod stops as it would by itself."""
    process = warm_pod(100_000, 32)
    eventually(lambda: steps(tmp_path) > 2, "it trains")
    process.send_signal(signal.SIGTERM)
    assert process.wait(WAIT_SECONDS) == ExitCode.STOPPED


def test_a_fork_does_not_outlive_its_pod(warm_pod, tmp_path):
    """SIGKILL of the pod's process ends the fork too."""
    process = warm_pod(100_000, 33)
    eventually(lambda: steps(tmp_path) > 2, "it trains")
    process.kill()
    process.wait()
    out = tmp_path / "out"
    eventually(lambda: not any(holds_open(pid, out) for pid in all_processes()), "the fork is gone")


def test_a_pod_that_is_killed_before_it_knows_its_fork_does_not_end_the_others(server):
    """Its connection is reset, and the server goes on: with it all forks would end."""
    request = {"arguments": ["--help"], "environment": dict(os.environ), "folder": os.sep}

    def asked(pod):
        pod.connect(server)
        with Path(os.devnull).open("r+") as nothing:
            socket.send_fds(pod, [json.dumps(request).encode()], [nothing.fileno()] * 3)

    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as killed:
        asked(killed)
        select.select([killed], [], [])
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as other:
        asked(other)
        assert int(other.recv(64)) > 0
        assert other.recv(64) == b"0", "the code of its fork"


def test_without_a_server_the_pod_starts_as_usual(tmp_path):
    """No variable, or nothing that listens: no fork, no error."""
    assert start_warm({}) is None
    assert start_warm({WARM_START_ENV: str(tmp_path / "absent")}) is None


def imports_torch(process):
    return "libtorch" in Path(f"/proc/{process.pid}/maps").read_text()


def test_a_pod_that_needs_an_import_of_its_own_is_not_forked(server):
    """Torch has read OMP_NUM_THREADS when the server forks: with another value the pod starts as usual."""
    assert start_warm({**os.environ, WARM_START_ENV: server, "OMP_NUM_THREADS": "3"}) is None


def test_a_forked_pod_has_a_session_of_its_own_and_its_own_process_stays_light(warm_pod, tmp_path):
    """So that a signal to one pod's group reaches no other pod, and not the server."""
    process = warm_pod(100_000, 35)
    eventually(lambda: steps(tmp_path) > 2, "it trains")
    assert not imports_torch(process)

    def forks():
        return [pid for pid in all_processes() if holds_open(pid, tmp_path / "out") and pid != process.pid]

    eventually(lambda: len(forks()) == 1, "one fork, whose server has closed what it was given")
    assert [os.getsid(pid) for pid in forks()] == forks()


def all_processes():
    return [int(folder.name) for folder in Path("/proc").iterdir() if folder.name.isdigit()]


def holds_open(pid, path):
    try:
        found = list(Path(f"/proc/{pid}/fd").iterdir())
    except OSError:  # it has ended, or is not ours
        return False
    return any(leads_to(fd, path) for fd in found)


def leads_to(fd, path):
    try:
        return fd.readlink() == path
    except OSError:  # it is closed meanwhile
        return False


HELD_SERVER = """
import select, sys
from ballast_trainer import warm_start
server = warm_start.WarmStartServer(sys.argv[1])
select.select([server._listener], [], [])
print("asked", flush=True)
sys.stdin.readline()
print("forks", flush=True)
server.serve()
"""


def test_pods_wait_for_a_server_that_is_still_importing(tmp_path):
    """It listens before it imports, so that a gang's pods share the one import."""
    path = tmp_path / "socket"
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HELD_SERVER, str(path)], **pipes) as server:
        try:
            eventually(path.exists, "the server listens")
            code = (
                "import os; from ballast_trainer.warm_start import start_warm; print(start_warm(os.environ))"
            )
            environment = {**os.environ, WARM_START_ENV: str(path)}
            with subprocess.Popen([sys.executable, "-c", code, "--help"], env=environment, **pipes) as pod:
                assert server.stdout.readline() == "asked\n"
                assert pod.poll() is None
                server.stdin.write("go\n")
                server.stdin.flush()
                output, _ = pod.communicate(timeout=WAIT_SECONDS)
            assert output.splitlines()[-1] == "0", "the code of the fork, which printed its help"
            assert "Usage" in output
        finally:
            server.kill()


_FORKS_WITH_THREADS = """
import os, sys, threading
from ballast_trainer import preload
import torch

torch.set_num_threads(8)
ones = torch.ones(300, 300)
ones.sum()
for _ in range(20):
    child = os.fork()
    if child == 0:
        threading.excepthook = lambda failed: (print(failed.exc_value, flush=True), os._exit(1))
        threads = [threading.Thread(target=ones.sum) for _ in range(8)]
        for step in (threading.Thread.start, threading.Thread.join):
            for thread in threads:
                step(thread)
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        sys.exit("a fork has failed")
"""


def test_threads_of_a_fork_may_all_begin_to_compute_at_once():
    """As those do that stand for the ranks while a layer that is cut is tried."""
    command = [sys.executable, "-c", _FORKS_WITH_THREADS]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=WAIT_SECONDS)
    assert run.returncode == 0, run.stdout + run.stderr
