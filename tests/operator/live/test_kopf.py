"""The operator under kopf's command line."""

import os
import subprocess
import sys
import urllib.request
from pathlib import Path

import pytest

from tests.operator.live.conftest import Stage
from tests.support.ports import free_port
from tests.support.waiting import WAIT_SECONDS, eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]


def answer(url: str) -> str:
    """What the probe answers; empty: nothing yet."""
    try:
        with urllib.request.urlopen(url, timeout=WAIT_SECONDS) as found:
            return str(found.read().decode())
    except OSError:
        return ""


def test_kopf_run_sees_a_job_through_answers_its_probe_and_ends_gracefully(
    stage: Stage, tmp_path: Path
) -> None:
    """Its handlers start and end the operator, which gives its Lease back."""
    log, probe = tmp_path / "kopf.log", f"http://127.0.0.1:{free_port()}/healthz"
    command = [sys.executable, "-m", "kopf", "run", "--module", "ballast_operator.handlers"]
    command += ["--all-namespaces", "--standalone", "--liveness", probe]
    environment = {
        "KUBECONFIG": str(stage.nursery.kubeconfig),
        "BALLAST_NAMESPACE": stage.namespace,
        "BALLAST_METRICS_HOST": "127.0.0.1",
        "BALLAST_METRICS_PORT": "0",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment})
        try:
            stage.add_job("one", script={"total": 8})
            stage.wait_for("one", "Succeeded")
            eventually(lambda: "waiting" in answer(probe), "the probe", log.read_text)
        finally:
            process.terminate()
            code = process.wait(WAIT_SECONDS)
    assert code == 0, log.read_text()
    assert not stage.leader()
