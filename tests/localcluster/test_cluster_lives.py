"""Clusters start and stop, side by side, and leave nothing, whatever their owner dies of."""

import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import types
from pathlib import Path

import pytest
from ballast_localcluster import LocalCluster, ProcessNode, waiting
from ballast_localcluster.components import Settings
from ballast_localcluster.errors import StartError
from ballast_localcluster.supervision.processes import MARK_VARIABLE, marked_processes
from ballast_localcluster.supervision.warden import await_end, warden_pid
from ballast_localcluster.waiting import Limit

from tests.chaos.processes.machine import parent
from tests.support.control_plane import ControlPlane, fresh_namespace
from tests.support.waiting import WAIT_SECONDS, eventually, is_alive

from .conftest import Pods

pytestmark = pytest.mark.api

OWNER = """
import signal, sys, time
from ballast_localcluster import LocalCluster, ProcessNode, waiting
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
cluster = LocalCluster(nodes=[ProcessNode(name="n")]).start()
print(cluster.folder, cluster.kubeconfig, cluster.kubectl, flush=True)
try:
    time.sleep(1000)
finally:
    cluster.stop()
"""

WARDEN_OWNER = """
import signal, sys, time
from pathlib import Path
from ballast_localcluster.supervision.owner import WardenHandle
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where the tests run in the background
folder = Path(sys.argv[1])
warden = WardenHandle(folder, folder / "logs" / "warden.log")
warden.start("sleeper", ["sh", "-c", "setsid sleep 1000 & sleep 1000"], folder / "logs" / "sleeper.log")
print("started", flush=True)
try:
    time.sleep(1000)
finally:
    warden.stop(keep_logs=False)
"""

SLEEPER = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "a"},
    "spec": {
        "containers": [
            {"name": "c", "image": "none", "command": ["sh", "-c", "setsid sleep 1000 & sleep 1000"]}
        ]
    },
}


@pytest.fixture
def owner():
    """A program of its own that runs a cluster with a pod; and the cluster's folder."""
    with subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True) as program:
        folder, kubeconfig, kubectl = map(Path, program.stdout.readline().split())
        command = [kubectl, "--kubeconfig", kubeconfig]
        subprocess.run([*command, "apply", "-f", "-"], input=json.dumps(SLEEPER), text=True, check=True)
        subprocess.run(
            [*command, "wait", "--for=condition=Ready", "pod/a", f"--timeout={WAIT_SECONDS:g}s"], check=True
        )
        yield program, folder
        program.kill()


def processes_of(folder):
    return marked_processes(f"{MARK_VARIABLE}={folder}")


def expect_nothing_left(folder):
    eventually(lambda: not processes_of(folder), f"the processes of {folder} to be gone")
    eventually(lambda: not folder.exists(), f"{folder} to be removed")


@pytest.mark.nightly
def test_a_cluster_ends_with_its_owner(owner):
    """Killed: control plane, agent, pods and files are gone."""
    program, folder = owner
    eventually(lambda: len(processes_of(folder)) >= 7, "four components, an agent, and the pod's processes")
    program.send_signal(signal.SIGKILL)
    program.wait(WAIT_SECONDS)
    expect_nothing_left(folder)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT], ids=lambda n: n.name)
def test_a_warden_ends_what_it_runs_when_its_owner_ends(number, tmp_path):
    """However that ends: the processes are gone, and the folder."""
    folder = tmp_path / "cluster"
    (folder / "logs").mkdir(parents=True)
    command = [sys.executable, "-c", WARDEN_OWNER, str(folder)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as program:
        assert program.stdout.readline() == "started\n"
        eventually(lambda: len(processes_of(folder)) >= 2, "the warden and its program")
        program.send_signal(number)
        program.wait(WAIT_SECONDS)
    expect_nothing_left(folder)


def test_pods_end_with_their_agent_and_everything_ends_with_the_warden(owner):
    """A SIGKILL of the node agent leaves no process of its pods, also none that left its group; one of the
    warden itself leaves nothing.
    """
    _, folder = owner
    agents = [pid for pid in processes_of(folder) if b"ballast_localcluster.nodes" in command_line(pid)]
    # What it starts is like it until it runs another program.
    (agent,) = [pid for pid in agents if parent(pid) not in agents]

    def sleeping():
        return [pid for pid in processes_of(folder) if b"sleep" in command_line(pid)]

    eventually(lambda: len(sleeping()) >= 3, "the shell and two sleepers")
    sleepers = sleeping()
    os.kill(agent, signal.SIGKILL)
    eventually(lambda: not any(is_alive(pid) for pid in sleepers), "the pods to be gone")
    assert processes_of(folder), "the control plane keeps running"
    os.kill(warden_pid(folder), signal.SIGKILL)
    eventually(lambda: not processes_of(folder), "the processes to be gone")
    shutil.rmtree(folder)  # nothing was left to remove it


def test_a_warden_that_removes_gigabytes_is_waited_for(tmp_path, monkeypatch):
    """The limit of the processes is not that of their files: killed, it would leave them. Both are told."""
    clock = itertools.count(step=10)
    monkeypatch.setattr(
        waiting, "time", types.SimpleNamespace(monotonic=clock.__next__, sleep=lambda _: None)
    )
    waited = Limit.STOPPED.seconds + 100
    told: list[str] = []
    await_end(tmp_path, lambda: next(clock) > waited, told.append)
    assert told == [f"ending the processes of {tmp_path}", "removing its files; large images take minutes"]
    with pytest.raises(TimeoutError, match="to be removed"):
        await_end(tmp_path, lambda: False)


def command_line(pid):
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:  # it has gone meanwhile
        return b""


def test_two_clusters_do_not_meet_and_one_that_fails_keeps_its_logs(cluster, capsys, tmp_path):
    """Own ports, own nodes, own pod addresses; after a failure the logs stay, neither keys nor data."""
    with pytest.raises(RuntimeError, match="made to fail"):  # noqa: SIM117 - what is inside raises
        with LocalCluster(nodes=[ProcessNode(name="other")], folder=tmp_path / "second") as second:
            folder = second.folder
            assert second.server != cluster.server
            addresses = set()
            for each in (cluster, second):
                plane = ControlPlane(kubeconfig=each.kubeconfig, cluster=each)
                with fresh_namespace(plane) as namespace:
                    pods = Pods(each, namespace)
                    pods.create("a", "exec sleep 1000")
                    addresses.add(pods.wait_for_phase("a", "Running")["podIP"])
            assert len(addresses) == 2
            assert "fast" not in Pods(second, "default").kubectl("get", "nodes")
            raise RuntimeError("made to fail")
    second.stop()  # once more, as from a finally: it does nothing
    eventually(lambda: not processes_of(folder), "the processes to be gone")
    assert str(folder / "logs") in capsys.readouterr().err
    assert {entry.name for entry in folder.iterdir()} <= {"logs", "exits.jsonl"}
    assert (folder / "logs" / "kube-apiserver.log").stat().st_size > 0
    assert Pods(cluster, "default").kubectl("get", "--raw", "/readyz") == "ok"


def test_a_machine_without_a_loopback_address_is_told_so_before_anything_waits_for_it():
    """As in a container without any network."""
    alone = ["unshare", "--map-root-user", "--net"]
    if shutil.which("unshare") is None or subprocess.run([*alone, "true"], check=False).returncode:
        pytest.skip("no network namespace may be made here")
    code = "from ballast_localcluster import LocalCluster; LocalCluster().start()"
    done = subprocess.run([*alone, sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "StartError: 127.0.0.1 does not answer on this machine" in done.stderr
    assert "To fix: ip link set lo up" in done.stderr


def test_a_component_that_cannot_start_is_named_with_its_log(tmp_path, monkeypatch):
    """The error says which ended, with what code, why, and of a full disk what to do; no stacks of Go."""
    crash = tmp_path / "crash"
    stack = "".join(f"main.f{n}(0x{n}, {{...}})\n\t/src/main.go:{n} +0x1\n" for n in range(30))
    endless = "x" * 300_000  # is looked at once, not as often as it is long
    crash.write_text(
        f"{endless}\nbroken on purpose: no space left on device\n\ngoroutine 1 [running]:\n{stack}"
    )
    for name in ("etcd", "kube-controller-manager", "kube-scheduler", "kubectl", "kube-apiserver"):
        program = tmp_path / name
        program.write_text(f"#!/bin/sh\n[ ${{0##*/}} = etcd ] && exec sleep 1000\ncat {crash}; exit 7\n")
        program.chmod(0o755)
    monkeypatch.setenv("BALLAST_CONTROLPLANE", str(tmp_path))
    with pytest.raises(StartError, match="kube-apiserver ended with code 7") as caught:
        LocalCluster(folder=tmp_path / "cluster").start()
    text = str(caught.value)
    assert "broken on purpose" in text and "goroutine" not in text and "main." not in text
    assert "To fix: free some space" in text


STAYS = {"tolerations": [{"operator": "Exists"}]}
"""Of a pod that no silent node evicts."""


def test_a_lost_node_and_its_return():
    """Back before it is missed, its agent fails pods whose processes are gone, or starts them again, by their
    policy. Gone for longer, the lease runs out, the node is tainted, and its pods are deleted.
    """
    quick = Settings(node_monitor_grace_seconds=6, eviction_seconds=1)
    node = ProcessNode(name="n")
    with LocalCluster(nodes=[node], settings=quick) as cluster:
        # Where every node is lost, Kubernetes thinks that it is itself cut off, and evicts no pod.
        cluster.add_node(ProcessNode(name="other"))
        pods = Pods(cluster, "default")
        for name, policy in (("never", "Never"), ("always", "Always")):
            pods.create(name, "exec sleep 1000", nodeName="n", restartPolicy=policy, **STAYS)
        for name in ("never", "always"):
            pods.wait_for_phase(name, "Running")
        cluster.lose_node("n")
        cluster.add_node(node)
        status = pods.wait_for_phase("never", "Failed")
        assert status["containerStatuses"][0]["state"]["terminated"]["reason"] == "NodeLost"

        def restarted():
            (container,) = pods.status("always")["containerStatuses"]
            return container["restartCount"] == 1 and "running" in container["state"]

        eventually(restarted, "the other pod to run again")

        def runs():
            # With so short a grace, a busy machine may take the node for lost by itself, and evict the pod.
            if (pod := pods.get("a")) is None:
                pods.create("a", "exec sleep 1000", nodeName="n")
                return False
            return pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]

        eventually(runs, "a third pod to run")
        cluster.lose_node("n")

        def lost():
            found = json.loads(pods.kubectl("get", "node", "n", "-o", "json"))
            (ready,) = [c for c in found["status"]["conditions"] if c["type"] == "Ready"]
            pod = pods.get("a")
            return ready["status"] == "Unknown" and (pod is None or "deletionTimestamp" in pod["metadata"])

        eventually(lost, "the node to be lost and its pod evicted")
        cluster.add_node(node)
        pods.wait_until_gone("a")
        assert pods.run("b", "true", **STAYS)["exitCode"] == 0
