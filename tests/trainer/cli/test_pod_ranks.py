"""The ranks of a pod, supervised as one: exit codes, messages, signals, and what they print."""

import json
import os
import signal
import subprocess
import sys

import pytest
from ballast_policies.contract.messages import ExitCode

from tests.support.waiting import WAIT_SECONDS, eventually, is_alive

pytestmark = pytest.mark.processes

BEGIN = """
import os, signal, subprocess, sys, time
from pathlib import Path
from ballast_policies.contract.messages import ExitReason
from ballast_trainer.cli.local_ranks import run_pod_ranks
from ballast_trainer.process_exit import end
def body(local_rank, log):
    def told(number, frame):
        Path(f"told-{local_rank}").touch()
        raise SystemExit(0)
    signal.signal(signal.SIGTERM, told)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    Path(f"process-{local_rank}").write_text(str(os.getpid()))
    try:
        return rank(local_rank, log)
    except SystemExit:
        return end(ExitReason.STOPPED, "saved", step=7, log=log)
"""
END = """
log = Path("termination")
log.touch()
sys.exit(run_pod_ranks(3, body, log, imports="json", leave_seconds=LEAVE, restarts=RESTARTS))
"""


@pytest.fixture
def supervised(tmp_path):
    """Start a supervisor of three ranks that run ``rank(local_rank, log)``; torch is not needed for it."""
    started = []

    def start(text, leave=WAIT_SECONDS, restarts=0):
        program = BEGIN + text + END.replace("LEAVE", str(leave)).replace("RESTARTS", str(restarts))
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        command = [sys.executable, "-c", program]
        started.append(subprocess.Popen(command, cwd=tmp_path, text=True, start_new_session=True, **streams))
        return started[-1]

    yield start
    for process in started:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def message(folder):
    return json.loads((folder / "termination").read_text())


@pytest.mark.parametrize(("restarts", "code"), [(2, 0), (1, 128 + 9)])
def test_a_killed_rank_is_started_again_so_often(supervised, restarts, code):
    """Its output goes on where it went; when it is killed once more than that, the pod ends with it."""
    pod = supervised(
        """
def rank(local_rank, log):
    if local_rank == 1:
        print("start", os.environ["BALLAST_RESTARTS"], flush=True)
        if os.environ["BALLAST_RESTARTS"] != "2":
            os.kill(os.getpid(), signal.SIGKILL)
        return end(ExitReason.FINISHED, "all done", log=log)
    while not Path("process-1").exists():
        time.sleep(0.01)
    return end(ExitReason.FINISHED, "all done", log=log)
""",
        restarts=restarts,
    )
    out, err = pod.communicate(timeout=WAIT_SECONDS)
    assert pod.returncode == code, err
    assert out.splitlines() == [f"[local rank 1] start {number}" for number in range(restarts + 1)]
    assert err.count("is started again") == restarts


def test_ranks_that_end_well_end_the_pod_well(supervised, tmp_path):
    """With the first rank's message; its figures are printed as they are, all else with the local rank."""
    pod = supervised("""
def rank(local_rank, log):
    print('{"step": %d}' % local_rank)
    print("hello", os.environ["LOCAL_RANK"], os.environ["LOCAL_WORLD_SIZE"], file=sys.stderr)
    return end(ExitReason.FINISHED, f"all done by {local_rank}", step=9, log=log)
""")
    out, err = pod.communicate(timeout=WAIT_SECONDS)
    assert pod.returncode == 0, err
    assert sorted(out.splitlines()) == [
        '[local rank 1] {"step": 1}',
        '[local rank 2] {"step": 2}',
        '{"step": 0}',
    ]
    assert sorted(err.splitlines()) == [f"[local rank {i}] hello {i} 3" for i in range(3)]
    assert message(tmp_path) == {"message": "all done by 0", "reason": "Finished", "step": 9}


@pytest.mark.parametrize(
    ("own", "said"),
    [
        ({1: "bad layer"}, ["local rank 1: bad layer"]),
        ({1: "bad layer", 2: "bad layer"}, ["local ranks 1, 2: bad layer"]),
        ({1: "bad layer", 2: "full"}, ["local rank 2: full", "local rank 1: bad layer"]),
        ({1: "rank 1: bad layer", 2: "rank 1: bad layer"}, ["rank 1: bad layer"]),
    ],
    ids=["one", "the same", "another", "one that all name"],
)
def test_the_first_rank_that_failed_by_itself_is_the_cause(supervised, tmp_path, own, said):
    """Although ranks that only lost it ended before, and after. Each error is said once, the cause last."""
    pod = supervised(f"""
def rank(local_rank, log):
    own = {own!r}
    process = Path("process-1")
    while local_rank == 1 and not Path("lost-0").exists():
        time.sleep(0.01)
    while local_rank == 2 and not (process.exists() and not Path("/proc", process.read_text()).exists()):
        time.sleep(0.01)
    if local_rank in own:
        return end(ExitReason.FAILED, own[local_rank], log=log)
    code = end(ExitReason.PEER_LOST, "rank 1 is gone", log=log)
    Path(f"lost-{{local_rank}}").touch()
    return code
""")
    _, err = pod.communicate(timeout=WAIT_SECONDS)
    assert pod.returncode == ExitCode.ERROR
    assert message(tmp_path)["message"] == said[-1]
    printed = [line.removeprefix("ballast-train: ") for line in err.splitlines() if "Failed" in line]
    assert printed == [f"TrainingFailed: {line}" for line in said]
    assert err.splitlines()[-1].endswith(said[-1])


def test_a_lost_rank_of_another_pod_is_not_this_pods_failure(supervised, tmp_path):
    """Every rank has lost a peer: the exit code says that this pod is healthy."""
    pod = supervised("""
def rank(local_rank, log):
    return end(ExitReason.PEER_LOST, "rank 5 is gone", log=log)
""")
    pod.communicate(timeout=WAIT_SECONDS)
    assert pod.returncode == ExitCode.PEER_LOST
    assert message(tmp_path)["reason"] == "PeerLost"


def test_sigterm_reaches_every_rank_and_each_may_save(supervised, tmp_path):
    """However long saving takes the slowest of them: the pod ends as stopped."""
    pod = supervised(
        """
def rank(local_rank, log):
    try:
        Path(f"saves-{local_rank}").touch()
        time.sleep(3600)
    except SystemExit:
        if local_rank == 2:
            while not all(Path(f"told-{other}").exists() for other in range(3)):
                time.sleep(0.01)
            time.sleep(0.3)
            Path("saved").touch()
        raise
""",
        leave=0.1,
    )
    eventually(lambda: all((tmp_path / f"saves-{i}").exists() for i in range(3)), "the ranks run")
    pod.send_signal(signal.SIGTERM)
    pod.communicate(timeout=WAIT_SECONDS)
    assert pod.returncode == ExitCode.STOPPED
    assert (tmp_path / "saved").exists()
    said = message(tmp_path)
    assert (said["reason"], said["step"]) == ("CheckpointedAndStopped", 7)
    assert said["message"].endswith(": saved")


def test_a_killed_rank_ends_the_pod_by_its_signal(supervised, tmp_path):
    """As if the container had been killed; ranks that hang on it are killed, too."""
    pod = supervised(
        """
def rank(local_rank, log):
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    if local_rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(3600)
""",
        leave=0.2,
    )
    _, err = pod.communicate(timeout=WAIT_SECONDS)
    assert pod.returncode == 128 + signal.SIGKILL
    assert (tmp_path / "termination").read_text() == "local rank 2 was killed by SIGKILL"
    assert "local rank 0 did not leave after another had failed" in err


def test_no_rank_outlives_its_supervisor(supervised, tmp_path):
    """A supervisor that is killed takes its ranks with it, also outside of a container."""
    pod = supervised("""
def rank(local_rank, log):
    time.sleep(3600)
""")
    files = [tmp_path / f"process-{i}" for i in range(3)]
    eventually(lambda: all(file.exists() and file.read_text() for file in files), "the ranks run")
    processes = [int(file.read_text()) for file in files]
    pod.kill()
    eventually(lambda: not any(map(is_alive, processes)), "the ranks are gone")


def test_what_a_rank_leaves_behind_is_reaped(supervised):
    """The supervisor is the pod's first process: a process whose parent has ended is its child."""
    pod = supervised("""
import ctypes
ctypes.CDLL(None).prctl(36, 1)  # PR_SET_CHILD_SUBREAPER: as the first process of a container is

def rank(local_rank, log):
    if local_rank == 0:
        left = subprocess.run(["sh", "-c", "sleep 0 & echo $!"], check=True, capture_output=True).stdout
        while Path("/proc", left.decode().strip()).exists():
            time.sleep(0.01)
    return 0
""")
    _, err = pod.communicate(timeout=WAIT_SECONDS)
    assert pod.returncode == 0, err
