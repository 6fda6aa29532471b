"""`ballast operator` on a cluster that lacks what it needs: its pages say so, and each wait ends."""

import contextlib
import re
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_localcluster import LocalCluster
from kubernetes import client, config
from kubernetes.dynamic import DynamicClient

from tests.support.access import binding, kubeconfig_of, new_account
from tests.support.control_plane import CRDS
from tests.support.waiting import WAIT_SECONDS, eventually

pytestmark = pytest.mark.api

NAMESPACE = "not-there-yet"


class Pages:
    """The health pages of one `ballast operator` process."""

    def __init__(self, log: Path) -> None:
        self._log = log

    def get(self, page: str) -> tuple[int, str]:
        """(HTTP status, text); (0, "") before it serves."""
        port = re.search(r"/metrics on port (\d+)\s", self._log.read_text())
        if port is None:
            return 0, ""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port[1]}/{page}", timeout=WAIT_SECONDS) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            with error:
                return error.code, error.read().decode()

    def waits_for(self, words: str) -> None:
        eventually(lambda: words in self.get("readyz")[1], f"/readyz to say {words!r}")


@contextlib.contextmanager
def operator(kubeconfig: Path, folder: Path) -> Iterator[Pages]:
    log = folder / "operator.log"
    command = [sys.executable, "-m", "ballast_operator.cli", "operator", "--kubeconfig", str(kubeconfig)]
    command += ["--lease-namespace", NAMESPACE, "--metrics-host", "127.0.0.1", "--metrics-port", "0"]
    with log.open("wb") as output:
        process = subprocess.Popen(command, stdout=output, stderr=output)
    try:
        yield Pages(log)
    finally:
        process.terminate()
        assert process.wait(WAIT_SECONDS) == 0, log.read_text()


def account(api: Any, admin: Path, path: Path) -> Path:
    """A kubeconfig of an account without any rights."""
    core = client.CoreV1Api(api)
    # The API server makes this namespace by itself, beside its other work.
    eventually(lambda: "kube-public" in [n.metadata.name for n in core.list_namespace().items], "kube-public")
    return kubeconfig_of(new_account(api, "kube-public", "operator"), admin, path)


@pytest.mark.slow
@pytest.mark.nightly
def test_it_waits_in_the_open_for_rights_namespace_definitions_and_policy(tmp_path: Path) -> None:
    """Alive, not ready, and the text says what to do; each wait ends when that is done."""
    with (
        LocalCluster() as cluster,
        config.new_client_from_config(str(cluster.kubeconfig)) as api,
        operator(account(api, cluster.kubeconfig, tmp_path / "kubeconfig"), tmp_path) as pages,
    ):
        kube = DynamicClient(api)

        def apply(body: dict[str, Any]) -> None:
            kind = kube.resources.get(api_version=body["apiVersion"], kind=body["kind"])
            kind.server_side_apply(body=body, field_manager="tests")

        pages.waits_for('cannot get resource "leases"')
        pages.waits_for("(Permission)")
        apply(binding("cluster-admin", "kube-public", "operator"))
        pages.waits_for(f"To fix: kubectl create namespace {NAMESPACE}")
        assert pages.get("readyz")[0] == 503
        code, text = pages.get("healthz")
        assert code == 200 and text.startswith("ok\n") and NAMESPACE in text

        def waited() -> bool:
            series = r'ballast_operator_waiting_seconds\{reason="Namespace"\} (\S+)'
            found = re.search(series, pages.get("metrics")[1])
            return found is not None and float(found[1]) > 0

        eventually(waited, "its wait to be measured")
        apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE}})
        pages.waits_for("(Definitions)")
        assert pages.get("readyz")[0] == 503
        for path in CRDS:
            apply(yaml.safe_load(path.read_text()))
        pages.waits_for("(Policy)")
        eventually(lambda: pages.get("readyz")[0] == 200, "/readyz to be ok")
        assert pages.get("healthz")[0] == 200
        eventually(
            lambda: 'ballast_jobs{state="Waiting"} 0.0' in pages.get("metrics")[1],
            "no job to be counted as 0",
        )
