"""`ballast up` and `ballast down`: their options; tests/e2e/test_quickstart.py runs both."""

import contextlib
import json
import os
import shlex
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from unittest import mock

import pytest
from ballast_localcluster import background
from ballast_localcluster.background import BackgroundCluster
from ballast_operator.cli.local.up import down, up
from ballast_operator.cli.main import main
from ballast_operator.demo.report import demo_manifests, read_manifests
from click.testing import CliRunner

from tests.support.control_plane import kubectl
from tests.support.waiting import WAIT_SECONDS

SCENARIO = "test_a_pod_may_only_follow_its_plan_and_renew_its_lease"


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        (down, ["--name", "none"], "no cluster 'none' runs here"),
        (up, ["--name", "A b"], "cannot be a cluster's name"),
        (up, ["--nodes", "/no/such/file"], "/no/such/file: No such file"),
        (up, ["--nodes", "none"], "BALLAST_PATIENCE=two is no factor of time. To fix: a number above 0"),
    ],
)
def test_what_cannot_be_done_is_one_line(tmp_path, command, words, message):
    environment = {
        "XDG_STATE_HOME": str(tmp_path),
        **({"BALLAST_PATIENCE": "two"} if "two" in message else {}),
    }
    done = CliRunner().invoke(command, words, env=environment)
    assert done.exit_code == 1 and isinstance(done.exception, SystemExit)
    assert message in done.stderr and done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nodes: [{name: a, gpus: 2, gpus: 3}]", "'gpus' is given twice"),
        (
            "n0: &n0 {a: 1}\n" + "".join(f"n{i + 1}: &n{i + 1} {{<<: [*n{i}, *n{i}]}}\n" for i in range(60)),
            "keys, with merged ones",
        ),
        ("nodes: [", "not YAML"),
        (" " * 2**21, "more than 1 MiB"),
    ],
    ids=["twice", "merges", "torn", "large"],
)
def test_a_file_of_nodes_is_read_as_every_yaml_of_people(tmp_path, text, message):
    """Of two equal keys the last would win silently, and merges of merges would take hours."""
    (tmp_path / "nodes.yaml").write_text(text)
    done = CliRunner().invoke(up, ["--nodes", str(tmp_path / "nodes.yaml"), "--name", "never"])
    assert done.exit_code == 1 and done.stderr.startswith(f"Error: {tmp_path}/nodes.yaml: ")
    assert message in done.stderr


def test_a_cluster_whose_api_server_is_not_there_is_not_said_to_run(monkeypatch, tmp_path):
    """Its warden is: it is being started, or has lost a part of it."""
    monkeypatch.setattr("ballast_localcluster.background.warden_pid", lambda folder: 1)
    done = CliRunner().invoke(up, ["--name", "half"], env={"XDG_STATE_HOME": str(tmp_path)})
    assert done.exit_code == 1 and "its API server has ended" in done.stderr
    assert "To fix: wait, or ballast down --name half" in done.stderr


def test_of_two_that_start_a_cluster_one_starts_it(monkeypatch, tmp_path):
    """The other waits, and finds it running: its files are not removed under it, whatever both waited for."""
    folder, others, starts = tmp_path / "ballast" / "clusters" / "same", threading.Event(), []

    @contextlib.contextmanager
    def start(**options):
        starts.append(options)
        assert others.wait(WAIT_SECONDS)
        folder.mkdir(parents=True)
        yield mock.Mock()

    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    for name, stub in (
        ("LocalCluster", start),
        ("warden_pid", lambda folder: 1 if folder.exists() else None),
        ("_answers", Path.exists),
        ("find_binaries", mock.Mock()),
        ("print_progress", lambda line: others.set()),
    ):
        monkeypatch.setattr(f"ballast_localcluster.background.{name}", stub)
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: background.up(name, []), ["same", "same"]))
    assert sorted(one.was_running for one in found) == [False, True] and len(starts) == 1


def test_the_end_of_a_cluster_is_told_on_standard_error(monkeypatch, tmp_path):
    """It takes minutes where its nodes have large images."""
    pids = iter([1])
    monkeypatch.setattr("ballast_localcluster.background.warden_pid", lambda folder: next(pids, None))
    monkeypatch.setattr("os.kill", lambda pid, number: None)
    done = CliRunner().invoke(down, ["--name", "large"], env={"XDG_STATE_HOME": str(tmp_path)})
    assert done.exit_code == 0 and done.stdout.count("\n") == 1, done.output
    assert "localcluster: removing its files" in done.stderr


@pytest.mark.parametrize("output", ["text", "json"])
def test_a_cluster_without_an_operator_names_what_starts_one(monkeypatch, tmp_path, output):
    """Nothing of Ballast is installed on it; with the nodes of a file or none; a shell takes what is told."""
    file = tmp_path / "nodes.yaml"
    file.write_text("nodes: [{name: only, gpus: 3}]")
    nodes = {"text": "none", "json": str(file)}[output]
    asked = []

    def start(name, nodes, crds=(), **options):
        asked.append((name, nodes, crds, options))
        return BackgroundCluster(
            name=name, kubeconfig=tmp_path / "my config", kubectl=Path("kubectl"), folder=tmp_path
        )

    monkeypatch.setattr("ballast_localcluster.background.up", start)
    words = ["--nodes", nodes, "--no-operator", "--name", "own", "--output", output]
    shown = CliRunner().invoke(up, words)
    assert shown.exit_code == 0, shown.output
    ((name, nodes, crds, options),) = asked
    assert (name, list(crds), options["warm_start"]) == ("own", [], True)
    assert [(node.name, node.gpus) for node in nodes] == {"text": [], "json": [("only", 3)]}[output]
    options["prepare"](None)  # it does nothing to the cluster, and so needs none
    if output == "json":
        assert json.loads(shown.stdout)["operatorLog"] is None
    else:
        told = [line.strip() for line in shown.stdout.splitlines()]
        assert shlex.split(told[told.index("Next:") + 1]) == ["export", f"KUBECONFIG={tmp_path}/my config"]
        (piped,) = [line for line in told if line.endswith("| kubectl apply --server-side -f -")]
        definitions = CliRunner().invoke(main, shlex.split(piped.partition("|")[0])[1:])
        assert "kind: CustomResourceDefinition" in definitions.stdout


def test_what_is_told_of_real_nodes_makes_the_examples_volume_before_their_jobs(monkeypatch, tmp_path):
    """Pods there are not root, and kubelet's folders are."""
    found = BackgroundCluster(
        name="ballast", kubeconfig=tmp_path / "config", kubectl=Path("kubectl"), folder=tmp_path
    )
    monkeypatch.setattr("ballast_localcluster.background.up", lambda *_, **__: found)
    told = CliRunner().invoke(up, ["--real-nodes", "1"]).stdout
    jobs = [manifest for manifest in read_manifests(demo_manifests()) if manifest["kind"] == "TrainingJob"]
    volumes = [volume for job in jobs for volume in job["spec"]["template"]["spec"]["volumes"]]
    (path,) = {volume["hostPath"]["path"] for volume in volumes}
    assert -1 < told.find(f"install -d -m 777 {path}\n") < told.find("apply -f")


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.api
def test_tests_may_use_a_cluster_of_ones_own(cluster):
    """With BALLAST_TEST_KUBECONFIG they bring their definitions along, and start no cluster."""
    scenario = Path(__file__).parents[1] / "operator" / "api" / "test_rbac.py"
    own = {"BALLAST_TEST_KUBECONFIG": str(cluster.kubeconfig), "BALLAST_CONTROLPLANE": "/none"}
    tested = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(scenario), "-k", SCENARIO],
        env={**os.environ, **own},
        cwd=scenario.parents[3],
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert tested.returncode == 0, tested.stdout
    assert " passed" in tested.stdout
    found = kubectl(cluster, "get", "crd", "-o", "name", namespace="default")
    assert "customresourcedefinition.apiextensions.k8s.io/trainingjobs.ballast.dev" in found
