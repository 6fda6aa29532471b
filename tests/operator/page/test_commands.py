"""The page where people reach it: `ballast operator --ui-port`, `ballast ui`."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import types
import urllib.error
import urllib.request
from collections.abc import Iterator
from http.cookiejar import CookieJar
from pathlib import Path
from typing import Any

import pytest
from ballast_localcluster.binaries import PROGRAMS
from ballast_operator.cli.live.ui import ui
from ballast_operator.page.simulated import NotASimulationError, simulated
from ballast_policies.contract.messages import JOB_LABEL, REPORT_ANNOTATION, lease_name
from click.testing import CliRunner
from kubernetes import client

from tests.operator.api.objects import JOB, changed
from tests.operator.page.test_page import looked_at, plain, text_of
from tests.operator.page.world import Everybody
from tests.support.access import binding, new_account
from tests.support.control_plane import ControlPlane
from tests.support.waiting import WAIT_SECONDS, eventually


@contextlib.contextmanager
def ballast(log: Path, *arguments: str) -> Iterator[subprocess.Popen[bytes]]:
    """A command that runs until it is told to end."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "ballast_operator.cli", *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            # A shell's job in the background ignores it, and so would all that it starts.
            preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # noqa: PLW1509
        )
        try:
            yield process
        finally:
            process.send_signal(signal.SIGINT)
            process.wait(timeout=WAIT_SECONDS)


def told(log: Path, process: subprocess.Popen[bytes], pattern: str) -> str:
    """What the command says, once it does."""

    def look() -> str:
        assert process.poll() is None, log.read_text()
        found = re.search(rf"{pattern}\s", log.read_text())  # a line may be half written
        return found[1] if found else ""

    return eventually(look, pattern, details=log.read_text)


def opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(urllib.request.HTTPCookieProcessor(CookieJar()))


@pytest.mark.api
@pytest.mark.processes
def test_an_operator_serves_its_page_to_who_logs_in(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """On a port of its own; without a token there is the login and nothing else."""
    log = tmp_path / "log"
    with control_plane.client() as api:
        token = new_account(api, namespace, "ann")
        all_rights = binding("cluster-admin", namespace, "ann")
        client.RbacAuthorizationV1Api(api).create_cluster_role_binding(all_rights)
        job = changed(changed(JOB, "metadata.namespace", namespace), "metadata.name", "shown")
        jobs = ("ballast.dev", "v1alpha1", namespace, "trainingjobs")
        client.CustomObjectsApi(api).create_namespaced_custom_object(*jobs, job)
    arguments = ["--kubeconfig", str(control_plane.kubeconfig), "--lease-namespace", namespace]
    arguments += ["--metrics-host", "127.0.0.1", "--metrics-port", "0", "--ui-port", "0"]
    try:
        with ballast(log, "operator", *arguments) as process:
            page = f"http://127.0.0.1:{told(log, process, r'serving the page on port ([0-9]+)')}"
            with opener().open(page) as answer:
                assert answer.url == f"{page}/login"
            logged_in = opener()

            def shown() -> bool:
                data = f"token={token}&to=/jobs".encode()
                try:
                    with logged_in.open(f"{page}/login", data) as answer:
                        return f"{namespace}/shown" in answer.read().decode()
                except urllib.error.HTTPError:
                    return False  # the API server does not know of the account's rights yet

            eventually(shown, "the job on the page", details=log.read_text)
    finally:
        with control_plane.client() as api:
            client.RbacAuthorizationV1Api(api).delete_cluster_role_binding(f"ann-{namespace}")


RESULT: dict[str, Any] = {
    "policy": "makespan",
    "cluster": {"v100": 8, "p100": 4},
    "jobs": [
        {
            "name": f"job-{number}",
            "type": "ResNet-18",
            "gpus": 2,
            "weight": 1.0,
            "steps": 100.5,
            "arrival": 10.0 * number,
            "first_run": 10.0 * number,
            "finish": 3600.0 * (1 + number),
            "completion_time": 3600.0,
            "rho": 1.0,
            "deadline": None,
            "cost": 7.5,
            "lease_extensions": 1,
            "seconds_on": {"v100": 3600.0},
        }
        for number in range(2)
    ],
    "timeline": [
        {"job": "job-0", "gpu_type": "v100", "start": 0.0, "end": 3600.0},
        {"job": "job-1", "gpu_type": "p100", "start": 10.0, "end": 3000.0},
        {"job": "job-1", "gpu_type": "v100", "start": 3600.0, "end": 7200.0},
    ],
}


@pytest.mark.slow
async def test_a_simulation_is_looked_at_without_a_cluster() -> None:
    """Who ran where, from the first arrival to the end; jobs with their costs; decisions at their times."""
    from ballast_operator.page.server import Page

    recent = simulated(RESULT)
    assert recent.clock() == 7200.0
    page = Page(recent, Everybody(), window="all")
    async with looked_at(types.SimpleNamespace(page=page)) as asked:
        first = await text_of(asked, "/")
        spans = re.findall(r"<title>simulation/(job-\d: 2 GPUs of \w+, launch \d, [^<]*)</title>", first)
        assert sorted(spans) == [
            "job-0: 2 GPUs of v100, launch 1, 60 min",
            "job-1: 2 GPUs of p100, launch 1, 49.8 min",
            "job-1: 2 GPUs of v100, launch 2, 60 min",
        ]
        assert "simulation/job-1 Succeeded" in plain(await text_of(asked, "/jobs"))
        assert "7.50 so far for 2 GPU hours" in plain(await text_of(asked, "/jobs/simulation/job-1"))
        words = plain(await text_of(asked, "/decisions"))
        assert "at 3600 s" in words and "2 x v100" in words


@pytest.mark.parametrize(
    "wrong",
    [
        None,
        [],
        {"jobs": []},
        {**RESULT, "jobs": [{}]},
        {**RESULT, "timeline": [{"job": "job-0", "gpu_type": "v100", "start": 0.0, "end": float("nan")}]},
        {**RESULT, "timeline": [{"job": "job-0", "gpu_type": "v100", "start": 0.0, "end": 1e300}]},
        {**RESULT, "cluster": {"v100": "many"}},
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_result_is_refused(wrong: Any) -> None:
    with pytest.raises(NotASimulationError, match=r"To fix: give the file that `ballast simulate"):
        simulated(wrong)


def test_ballast_ui_refuses_what_it_cannot_show(tmp_path: Path) -> None:
    """A file that is no JSON, one that is another's, and two things at once."""
    for text, words in (("{", "no JSON"), ("[" * 100_000, "no JSON"), ("{}", "not a simulation's result")):
        file = tmp_path / "result.json"
        file.write_text(text)
        answer = CliRunner().invoke(ui, [str(file), "--no-open"])
        assert answer.exit_code == 1 and words in answer.output and "To fix" in answer.output
    assert "--direct reads a cluster" in CliRunner().invoke(ui, [str(file), "--direct"]).output


@pytest.mark.parametrize("built", [True, False])
def test_ballast_ui_forwards_by_the_kubectl_that_was_built(
    built: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On a machine without another one, as after `ballast up`; where that was not built it is said."""
    monkeypatch.setattr("ballast_operator.cli.live.ui.asked", lambda *_, **__: None)
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in PROGRAMS if built else ():
        (programs / name).write_text("#!/bin/sh\necho Forwarding from 127.0.0.1:8090 to 8090\n")
        (programs / name).chmod(0o755)
    monkeypatch.setenv("BALLAST_CONTROLPLANE", str(programs))
    monkeypatch.setenv("PATH", str(tmp_path))
    answer = CliRunner().invoke(ui, ["--no-open"])
    assert answer.exit_code == (not built), answer.output
    assert ("http://127.0.0.1:8090/" if built else "kubectl is not installed. To fix") in answer.output


@pytest.mark.processes
@pytest.mark.slow
def test_ballast_ui_opens_a_result_for_who_has_its_address(tmp_path: Path) -> None:
    """The address that it prints logs in; without its key there is nothing."""
    file, log = tmp_path / "result.json", tmp_path / "log"
    file.write_text(json.dumps(RESULT))
    with ballast(log, "ui", str(file), "--port", "0", "--no-open") as process:
        address = told(log, process, r"(http://127\.0\.0\.1:[0-9]+/open\?key=\S+)")
        with opener().open(address) as answer:
            assert "2 Succeeded" in plain(answer.read().decode())
        with pytest.raises(urllib.error.HTTPError, match="403"):
            opener().open(address[:-3])


@pytest.mark.api
@pytest.mark.processes
def test_ballast_ui_reads_a_cluster_directly(
    control_plane: ControlPlane, namespace: str, tmp_path: Path
) -> None:
    """With the rights of the kubeconfig, where no operator serves a page; layers and pods, too."""
    log = tmp_path / "log"
    stages = [{"rank": 0, "firstLayer": 0, "endLayer": 3}]
    report = json.dumps({"epoch": 1, "step": 1, "loss": 1.0, "stepsPerSecond": 1.0, "stages": stages})
    lease = {"name": lease_name("looked-at"), "labels": {JOB_LABEL: "looked-at"}}
    with control_plane.client() as api:
        job = changed(changed(JOB, "metadata.namespace", namespace), "metadata.name", "looked-at")
        jobs = ("ballast.dev", "v1alpha1", namespace, "trainingjobs")
        client.CustomObjectsApi(api).create_namespaced_custom_object(*jobs, job)
        body = {"metadata": {**lease, "annotations": {REPORT_ANNOTATION: report}}}
        client.CoordinationV1Api(api).create_namespaced_lease(namespace, body)
    kubeconfig = ["--kubeconfig", str(control_plane.kubeconfig)]
    with ballast(log, "ui", "--direct", *kubeconfig, "--port", "0", "--no-open") as process:
        address = told(log, process, r"(http://127\.0\.0\.1:[0-9]+/open\?key=\S+)")
        looks = opener()
        with looks.open(address) as answer:
            assert "Who ran where" in answer.read().decode()
        with looks.open(f"{address.partition('/open')[0]}/jobs/{namespace}/looked-at") as answer:
            assert "rank 0: layers 0-2" in answer.read().decode()
