"""`ballast up --real-nodes`: kubelets and containers on this machine, and nothing of them once it is down."""

import json
import os
import socket
import struct
import subprocess
import sys
from pathlib import Path

import pytest
from ballast_localcluster.errors import LocalClusterError, StartError
from ballast_localcluster.kubelets import machine
from ballast_localcluster.kubelets.configuration import IMAGES, MOST_NODES, PAUSE, Network, share_images
from ballast_localcluster.kubelets.machine import cgroup_name, check_machine
from ballast_localcluster.kubelets.start import present_kubelets
from ballast_localcluster.supervision.processes import MARK_VARIABLE, marked_processes
from ballast_operator.cli.local.up import up
from click.testing import CliRunner

from tests.support.waiting import WAIT_SECONDS, eventually


def unfit() -> str:
    """Why this machine cannot run real nodes now; empty: it can."""
    try:
        check_machine(Path("/tmp"))
    except StartError as error:
        return str(error)
    return "" if present_kubelets() else "kubelet is not built: `ballast up --real-nodes 1` builds it once"


POD = f"""
apiVersion: v1
kind: Pod
metadata: {{name: one, labels: {{app: one}}}}
spec:
  containers:
  - {{name: main, image: "{PAUSE}", resources: {{limits: {{nvidia.com/gpu: 2, memory: 64Mi}}}}}}
---
apiVersion: v1
kind: Service
metadata: {{name: one}}
spec: {{clusterIP: None, selector: {{app: one}}, ports: [{{port: 80}}]}}
"""


def resolve(name: str, server: str) -> str | None:
    """The address of a name, asked of one server; None where it has none."""
    labels = b"".join(bytes([len(part)]) + part.encode() for part in name.split("."))
    question = struct.pack(">6H", 7, 0x100, 1, 0, 0, 0) + labels + b"\0" + struct.pack(">2H", 1, 1)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.settimeout(WAIT_SECONDS)
        asking.sendto(question, (server, 53))
        answer = asking.recv(512)
    return socket.inet_ntoa(answer[-4:]) if struct.unpack(">H", answer[6:8])[0] else None


@pytest.mark.nightly
@pytest.mark.processes
def test_a_real_cluster_runs_pods_and_leaves_nothing(tmp_path):
    """Pods get GPUs, addresses and names; a killed warden and `down` leave no group, link or process."""
    if why := unfit():
        pytest.skip(why)
    environment = {**os.environ, "XDG_STATE_HOME": str(tmp_path)}

    def run(*words: object, stdin: str | None = None) -> str:
        done = subprocess.run(
            [str(word) for word in words],
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=4 * WAIT_SECONDS,
            check=False,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    ballast = Path(sys.executable).with_name("ballast")
    started = run(
        ballast, *("up", "--real-nodes", "2", "--no-operator", "--name", "real", "--output", "json")
    )
    cluster = json.loads(started)
    folder = Path(cluster["folder"])
    try:
        kubectl = (cluster["kubectl"], "--kubeconfig", cluster["kubeconfig"])
        nodes = json.loads(run(*kubectl, "get", "nodes", "-o", "json"))["items"]
        assert [node["metadata"]["name"] for node in nodes] == ["v100-0", "v100-1"]
        for node in nodes:
            assert node["status"]["nodeInfo"]["containerRuntimeVersion"].startswith("containerd://")
            assert node["status"]["allocatable"]["nvidia.com/gpu"] == "2"
            assert node["metadata"]["labels"]["ballast.dev/pool"] == "v100"
        ours = marked_processes(f"{MARK_VARIABLE}={folder}")
        mounts = [line for pid in ours for line in Path(f"/proc/{pid}/mountinfo").read_text().splitlines()]
        assert {line.split()[5].split(",")[0] for line in mounts if line.split()[4] == str(IMAGES)} == {"ro"}
        run(*kubectl, "apply", "-f", "-", stdin=POD)
        address = eventually(
            lambda: run(*kubectl, *("get", "pod", "one", "-o", "jsonpath={.status.podIP}")), "a pod's address"
        )
        network = Network.read(folder / "network.json")
        found = eventually(lambda: resolve("one.default.svc.cluster.local", network.names), "the pod's name")
        assert found == address
        (warden,) = (pid for pid in marked_processes(f"XDG_STATE_HOME={tmp_path}") if is_warden(pid))
        os.kill(warden, 9)
        eventually(lambda: not marked_processes(f"{MARK_VARIABLE}={folder}"), "every process to end")
    finally:
        run(ballast, "down", "--name", "real")
    assert not folder.exists()
    assert not list(Path("/sys/fs/cgroup").glob(f"*/{cgroup_name(folder)}*"))
    assert not Path(f"/sys/class/net/{network.link}").exists()
    assert str(tmp_path) not in Path("/proc/self/mounts").read_text()


def is_warden(pid: int) -> bool:
    """Whether a process is a cluster's warden."""
    return b"supervision.warden" in Path(f"/proc/{pid}/cmdline").read_bytes()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sys.platform": "darwin"}, "real nodes need Linux"),
        ({"os.geteuid": lambda: 1000}, "real nodes need root"),
        ({"shutil.which": lambda program: None}, "apt-get install"),
    ],
)
def test_a_machine_that_cannot_have_them_is_refused_in_words(monkeypatch, tmp_path, change, words):
    """With what to do; programs that are missing are named by their packages, all at once."""
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine.os, "geteuid", lambda: 0)
    for name, value in change.items():
        module, attribute = name.split(".")
        monkeypatch.setattr(getattr(machine, module), attribute, value)
    with pytest.raises(StartError, match=words) as refused:
        check_machine(tmp_path)
    assert "To fix:" in str(refused.value)
    if "shutil.which" in change:
        assert {"containerd", "runc", "iptables"} <= set(str(refused.value).split())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--real-nodes", "9"), "describes 5 nodes"),
        (("--real-nodes", "1", "--karpenter"), "process nodes"),
        (("--image", "x.tar"), "--image needs --real-nodes"),
        (("--real-nodes", "0"), "is not in the range"),
    ],
)
def test_real_nodes_that_cannot_be_are_a_wrong_use(words, message):
    done = CliRunner().invoke(up, list(words))
    assert done.exit_code == 2
    assert message in done.output


def test_no_two_nodes_share_an_address():
    """Nodes, pods, names and the gateway of all clusters side by side."""
    networks = [Network(number=number) for number in (0, 1, 31)]
    single = [a for n in networks for a in (n.gateway, n.names, *map(n.node, range(1, MOST_NODES + 1)))]
    pods = [n.pods(index) for n in networks for index in range(1, MOST_NODES + 1)]
    assert len({*single, *pods}) == len(single) + len(pods)
    assert not {address.rpartition(".")[0] for address in single} & {net.rpartition(".")[0] for net in pods}
    assert networks[2].pods(MOST_NODES) == "198.19.255.0/24"


def test_a_node_shares_its_images_layers_and_has_databases_of_its_own(tmp_path):
    """However many files a layer has, a node costs one link to make and to remove."""
    source, target = tmp_path / "images", tmp_path / "node"
    blob, layer = Path("content", "blobs", "sha256", "a"), Path("overlayfs", "snapshots", "1")
    for file in (source / "meta.db", source / blob, source / layer / "fs" / "program"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("of the images")
    share_images(source, target)
    assert (target / layer).readlink() == IMAGES / layer
    assert (target / blob).samefile(source / blob)
    (target / "meta.db").write_text("of the node")
    assert (source / "meta.db").read_text() == "of the images"


def test_a_control_group_that_stays_is_named_with_the_reason(monkeypatch, tmp_path):
    """Removal waits for processes that end, and tells of those that do not; inner groups go first."""
    (tmp_path / "ballast-1-node" / "pod").mkdir(parents=True)
    (tmp_path / "ballast-2-node").mkdir()
    monkeypatch.setattr(machine.sys, "platform", "linux")
    monkeypatch.setattr(machine, "_hierarchies", lambda *kinds: [tmp_path])
    machine.remove_cgroups("ballast-1-")
    assert [group.name for group in tmp_path.iterdir()] == ["ballast-2-node"]
    monkeypatch.setenv("BALLAST_PATIENCE", "0.001")
    (tmp_path / "ballast-2-node" / "cgroup.procs").touch()
    with pytest.raises(LocalClusterError, match=r"ballast-2-node.*To fix: end the processes"):
        machine.remove_cgroups("ballast-2-")


def test_groups_of_control_differ_by_cluster(tmp_path):
    """So that `ballast down` removes its own alone."""
    assert cgroup_name(tmp_path / "a") != cgroup_name(tmp_path / "b")
    assert cgroup_name(tmp_path / "a", "n").startswith(cgroup_name(tmp_path / "a"))
