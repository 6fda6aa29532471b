"""A leader that cannot renew its Lease for longer than it lasts: `ballast operator` as a process."""

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from ballast_localcluster import LocalCluster
from ballast_localcluster.supervision.processes import PART_VARIABLE, marked_processes

from tests.operator.live.conftest import Stage
from tests.support.waiting import WAIT_SECONDS, eventually

# test_death_and_succession.py loses a lease in a process of its own, too, with the usual times.
pytestmark = [pytest.mark.api, pytest.mark.slow, pytest.mark.nightly]

LEADS, LAPSED, RENEWED = "leader elected", "leader lease lapsed", "leader lease renewed"
SOON = {
    "BALLAST_LEADER_LEASE_SECONDS": "3",
    "BALLAST_LEADER_FENCE_SECONDS": "2",
    "BALLAST_LEADER_RENEW_SECONDS": "0.5",
    "BALLAST_API_REQUEST_SECONDS": "2",
    "BALLAST_JOB_PROGRESS_SECONDS": "1",
}


@contextlib.contextmanager
def operator(stage: Stage, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    command = [sys.executable, "-m", "ballast_operator.cli", "operator"]
    command += ["--kubeconfig", str(stage.nursery.kubeconfig), "--lease-namespace", stage.namespace]
    command += ["--metrics-host", "127.0.0.1", "--metrics-port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **SOON})
    try:
        yield process
    finally:
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0, log.read_text()


@contextlib.contextmanager
def stopped_api_server(cluster: LocalCluster) -> Iterator[None]:
    """It answers no request, and closes no connection."""
    (server,) = marked_processes(f"{PART_VARIABLE}={cluster.folder}/kube-apiserver")
    os.kill(server, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(server, signal.SIGCONT)


def test_an_operator_whose_lease_has_lapsed_goes_on_where_nobody_has_led_since(
    stage: Stage, live_cluster: LocalCluster, tmp_path: Path
) -> None:
    """The API server is silent for longer than the Lease lasts: the same term sees the job through, which has
    noticed nothing.
    """
    log, finish = tmp_path / "operator.log", tmp_path / "finish"
    with operator(stage, log) as process:
        stage.add_job("one", script={"total": 18, "finishFile": str(finish)})
        stage.wait_for("one", "Running")
        uids = {pod.metadata.uid for pod in stage.pods("one").values()}
        with stopped_api_server(live_cluster):
            eventually(lambda: LAPSED in log.read_text(), "its Lease to lapse", log.read_text)
        eventually(lambda: RENEWED in log.read_text(), "it to renew again", log.read_text)
        finish.touch()
        stage.wait_for("one", "Succeeded")
        assert process.poll() is None
    assert log.read_text().count(LEADS) == 1
    assert {pod.metadata.uid for pod in stage.pods("one").values()} == uids
    assert stage.status("one")["launches"] == 1
    assert not stage.status("one").get("restarts")
