"""The chart, its images and trainers on real kubelets (`make e2e-nodes`): root, containerd and buildah.

The operator runs in its image. Trainers run in the images' base, with torch and the packages of this
environment from a volume, unless BALLAST_TRAINER_ARCHIVE names an archive of the trainer's image.
"""

import collections
import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import yaml
from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.errors import StartError
from ballast_localcluster.kubelets.configuration import Network
from ballast_localcluster.kubelets.machine import cgroup_name, check_machine
from ballast_localcluster.kubelets.start import RealNodes, present_kubelets
from ballast_localcluster.nodes.node import default_nodes
from ballast_localcluster.rest import Rest
from ballast_localcluster.supervision.owner import ended
from ballast_localcluster.supervision.processes import MARK_VARIABLE, PART_VARIABLE, marked_processes
from ballast_policies.contract.messages import RENDEZVOUS_PORT
from kubernetes import client, config

from tests.e2e.conftest import Ballast, demo_object
from tests.e2e.endless_jobs import CHECKPOINT, ELASTIC, ENDLESS, SHRINKS, SMALL
from tests.e2e.registry import Registry
from tests.support.waiting import WAIT_SECONDS, eventually

ROOT = Path(__file__).parents[2]
REGISTRY, VERSION = "docker.io/ballast-dev", "0.1.0"
NAMESPACE = "ballast-system"
CHART = str(ROOT / "charts" / "ballast")
NODES = {node.name: node for node in default_nodes() if node.name in ("v100-0", "v100-1", "p100-0")}
BIND_SECONDS = WAIT_SECONDS / 3
"""Of a launch that does not pull: short, since tests wait for its end."""
MONITORING = "monitoring"
KUBELET = "/run/programs/kubelet"
GIB = 2**30
_SCRAPERS = [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": MONITORING}}}]
VALUES = {
    "image": {"repository": f"{REGISTRY}/operator"},
    "settings": {"JOB_BIND_SECONDS": BIND_SECONDS, "JOB_RESTART_BASE_SECONDS": 1},
    "trainer": {"readOnlyRootFilesystem": True, "tmpSize": "100Mi", "metricsPort": 9400},
    "ui": {"enabled": True},
    "networkPolicy": {"enabled": True, "metricsFrom": _SCRAPERS, "uiFrom": _SCRAPERS},
}
# Trainers do not run as root, and root's home is closed to them.
SITE = Path(sysconfig.get_path("purelib")).resolve()

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.nightly,
    pytest.mark.slow,
    pytest.mark.xdist_group("real nodes"),
    pytest.mark.timeout(20 * WAIT_SECONDS),
]


def needed() -> None:
    """Skip with the reason where real nodes cannot run."""
    try:
        check_machine(Path("/tmp"))
    except StartError as error:
        pytest.skip(str(error))
    if present_kubelets() is None:
        pytest.skip("kubelet is not built: `python -m ballast_localcluster.setup --kubelets` builds it once")


_CONNECT = """
import socket, sys
for address in sys.argv[1:]:
    host, port = address.split(":")
    try:
        socket.create_connection((host, int(port)), timeout=2).close()
        print(address)
    except OSError:
        pass
"""


class RealBallast(Ballast):
    """The chart's release on real nodes, and jobs whose pods run in containers."""

    def __post_init__(self):
        super().__post_init__()
        self.twice = []
        """Nodes of which jobs held more GPUs than they have, at any look at a job."""

    def job(self, name):
        """The job; all of them are looked at, for GPUs that two hold."""
        items = self.custom.list_namespaced_custom_object(**self.where)["items"]
        held = collections.Counter()
        for item in items:
            allocation = (item.get("status") or {}).get("allocation") or {}
            for node in allocation.get("nodes", ()):
                held[node] += allocation.get("gpusPerPod", 1)
        self.twice += [(node, n) for node, n in held.items() if node in NODES and n > NODES[node].gpus]
        return next((item for item in items if item["metadata"]["name"] == name), None)

    def end_job(self, name):
        super().end_job(name)
        assert not self.twice

    def start(self, name, tolerations=(), **spec):
        """A job without an end that has saved; the node of its pods."""
        spec = {"totalSteps": ENDLESS, "model": SMALL, "checkpoint": CHECKPOINT, **spec}
        job = self.real_job("recurrent", name, **spec)
        job["spec"]["template"]["spec"]["tolerations"] = list(tolerations)
        self.apply(job)
        self.wait_for_report(name, step=6, checkpoint=5)
        (node,) = {pod.spec.node_name for pod in self.pods(name)}
        return node

    def wait_for_next_launch(self, name, saved, node=""):
        """Wait until its second launch trains from the checkpoint, elsewhere than on ``node``."""
        eventually(lambda: self.status(name).get("launches") == 2, f"{name} to be launched again")
        resumed = self.wait_for_resumed(name)
        assert resumed >= saved
        self.wait_for_report(name, step=resumed + 1, checkpoint=resumed + 5)
        assert self.status(name)["launches"] == 2
        assert node not in {
            pod.spec.node_name for pod in self.pods(name) if not pod.metadata.deletion_timestamp
        }

    def wait_for_node(self, node, ready):
        """Wait until the cluster knows whether a node lives."""

        def look():
            conditions = self.core.read_node(node).status.conditions
            return ready is ("True" in [c.status for c in conditions if c.type == "Ready"])

        eventually(look, f"{node} to be {'Ready' if ready else 'NotReady'}")

    def set_link(self, node, state):
        """Cut a node off from all others and from the API server, or join it again."""
        bridge = Network.read(self.cluster.folder / "network.json").bridge
        configuration = json.loads((self.disk(node) / "configuration.json").read_text())
        inside = ["nsenter", "-t", str(bridge), "-n", "ip", "link", "set"]
        subprocess.run([*inside, f"node{configuration['index']}", state], check=True)

    def watch_from(self, namespace):
        """A pod without rights in a namespace, for ``reaches``."""
        self.kubectl("create", "namespace", namespace)
        words = ["run", "watcher", f"--namespace={namespace}", f"--image={REGISTRY}/operator:{VERSION}"]
        self.kubectl(*words, "--command", "--", "sleep", "infinity")

    def reaches(self, pod, *addresses, namespace):
        """Which of the addresses, each with a port, a pod connects to."""
        told = self.kubectl(
            "exec", f"--namespace={namespace}", pod, "--", "python3", "-c", _CONNECT, *addresses
        )
        return set(told.split())

    def disk(self, node):
        """A node's."""
        return self.cluster.folder / "nodes" / node

    def kill(self, *words):
        """SIGKILL to the one process of this cluster whose command has these words; it is started again."""
        (pid,) = self.processes(*words)
        os.kill(pid, signal.SIGKILL)

    def processes(self, program, *words):
        """Of this cluster and its containers, those whose command begins with a program and has the words."""
        mark, group = f"{MARK_VARIABLE}={self.cluster.folder}", cgroup_name(self.cluster.folder)
        found = []
        for folder in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):  # it has ended
                command = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
                if program in command[:2] and set(words) <= set(command):
                    environment = (folder / "environ").read_bytes().split(b"\0")
                    if mark.encode() in environment or f"/{group}" in (folder / "cgroup").read_text():
                        found.append(int(folder.name))
        return found

    def inside(self, node, *words):
        """Run a command in a node's namespaces."""
        (kubelet,) = self.processes(KUBELET, f"--hostname-override={node}")
        subprocess.run(["nsenter", "-t", str(kubelet), "-m", "-n", "-p", *map(str, words)], check=True)

    def restart_api_server(self):
        """Kill it and start it again; etcd stays."""
        part = "kube-apiserver"
        (pid,) = marked_processes(f"{PART_VARIABLE}={self.cluster.folder / part}")
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")[:-1]
        os.kill(pid, 9)
        eventually(lambda: pid in [end["pid"] for end in ended(self.cluster.folder)], "its end")
        self.cluster.run(part, command, grace_seconds=0.0)
        eventually(lambda: Rest(self.cluster.kubeconfig).answers("/readyz"), "the API server")

    def real_job(self, name: str, called: str, image: str = "", **spec):
        """One of the demo's jobs, with a trainer's image and a folder of this machine as its volume."""
        job = self.demo_job(name, called, **spec)
        (volume,) = job["spec"]["template"]["spec"]["volumes"]
        folder = Path(volume["hostPath"]["path"])
        folder.mkdir(parents=True)
        folder.chmod(0o777)  # kubelet makes subPathExpr's folder as root, with this mode
        (container,) = job["spec"]["template"]["spec"]["containers"]
        container["resources"] = {"requests": {"cpu": "50m", "memory": "200Mi"}}
        container["env"] = [{"name": "OMP_NUM_THREADS", "value": "1"}]
        if archive := os.environ.get("BALLAST_TRAINER_ARCHIVE"):
            container["image"] = image or f"{REGISTRY}/{Path(archive).stem}:{VERSION}"
            return job
        paths = [SITE, *(ROOT / folder for folder in ("client", "policies", "trainer-image"))]
        mounts = container.setdefault("volumeMounts", [])
        for number, path in enumerate(paths):
            source = {"name": f"path{number}", "hostPath": {"path": str(path)}}
            job["spec"]["template"]["spec"]["volumes"].append(source)
            mounts.append({"name": f"path{number}", "mountPath": str(path), "readOnly": True})
        container["env"].append({"name": "PYTHONPATH", "value": ":".join(map(str, paths))})
        container["command"] = ["python3", "-m", "ballast_trainer", "pod"]
        container["securityContext"] = {"runAsUser": 65532}
        container["image"] = image or f"{REGISTRY}/runtime:{VERSION}"
        return job


@pytest.fixture(scope="module")
def archives():
    """The images, built from the Dockerfile; unchanged layers come from buildah's storage."""
    needed()
    if shutil.which("buildah") is None:
        pytest.skip("images are built by buildah: apt-get install buildah mmdebstrap")
    if sys.version_info[:2] != (3, 11) and not os.environ.get("BALLAST_TRAINER_ARCHIVE"):
        pytest.skip(
            "torch of this environment is for another Python than the base image's: BALLAST_TRAINER_ARCHIVE"
        )
    given = os.environ.get("BALLAST_TRAINER_ARCHIVE")
    targets = ["operator", *([] if given else ["runtime"])]
    built = subprocess.run(
        [ROOT / "scripts" / "build-images", ROOT / "out" / "images", *targets],
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert built.returncode == 0
    return tuple(Path(path) for path in [*built.stdout.split(), *([given] if given else [])])


@pytest.fixture(scope="module")
def release(archives, tmp_path_factory):
    """Helm, the cluster, and the release."""
    helm = pytest.importorskip("helm_python", reason="Helm as a library has no wheel for this machine")
    folder = tmp_path_factory.mktemp("real")
    for part in (
        folder,
        *folder.parents[:2],
    ):  # pytest's folders are this user's alone, trainers run as another
        part.chmod(0o755)
    with (
        LocalCluster(nodes=NODES.values(), real_nodes=RealNodes(archives)) as cluster,
        config.new_client_from_config(str(cluster.kubeconfig)) as api,
        helm.Config(kubeconfig_path=str(cluster.kubeconfig), namespace=NAMESPACE) as asked,
    ):
        limit = int(WAIT_SECONDS)
        port = urlsplit(api.configuration.host).port
        values = {**VALUES, "networkPolicy": {**VALUES["networkPolicy"], "apiServerPorts": [port]}}
        asked.install(CHART, "ballast", values, namespace=NAMESPACE, create_namespace=True, timeout=limit)
        apps = client.AppsV1Api(api)
        eventually(
            lambda: apps.read_namespaced_deployment("ballast", NAMESPACE).status.ready_replicas,
            "the operator to be ready",
        )
        found = RealBallast(cluster, api, folder)
        found.helm, found.apps, found.values = asked, apps, values
        found.apply(demo_object("demo", folder))
        for policy in yaml.safe_load_all((ROOT / "examples" / "networkpolicy.yaml").read_text()):
            if ports := [to["ports"] for to in policy["spec"].get("egress", ()) if "ports" in to]:
                ports[0][:] = [{"port": port}]
            found.apply(policy)
        yield found


@pytest.fixture(autouse=True)
def clean_nodes(release):
    """Whatever became of the test before, each begins with all nodes and no job."""
    yield
    release.kubectl("uncordon", *NODES)
    release.kubectl("delete", "trainingjobs", "--all")


@pytest.fixture
def registry(release, archives):
    """A registry that the nodes reach, and that holds its image back."""
    gateway = Network.read(release.cluster.folder / "network.json").gateway
    with Registry(gateway, archives[-1]) as found:
        for node in NODES:
            found.known_to(release.disk(node))
        yield found


def test_a_job_trains_in_containers_with_gpus_of_the_device_plugin(release):
    """Rank and pod agree on the GPU, checkpoints reach the volume, and the pod is restricted."""
    job = release.real_job("recurrent", "first", totalSteps=ENDLESS, model=SMALL, checkpoint=CHECKPOINT)
    release.apply(job)
    release.wait_for_report("first", step=3, checkpoint=5)
    pod = release.pods("first")[0]
    asked = "echo $NVIDIA_VISIBLE_DEVICES; id -u; touch /var/x 2>&1 | grep -o Read-only; touch /tmp/x"
    told = release.kubectl("exec", pod.metadata.name, "--", "sh", "-c", asked)
    device, user, written = told.split()
    assert written == "Read-only"
    assert device in ("0", "1")
    assert user == "65532"
    assert list((release.folder / "checkpoints" / "first").iterdir())
    release.end_job("first")


def test_the_chart_tests_its_release(release):
    """`helm test`, through the NetworkPolicies."""
    release.helm.test("ballast", timeout=int(WAIT_SECONDS))


def test_layers_move_between_the_same_pods(release):
    """A rebalance, as layers freeze; training goes on."""
    release.apply(release.real_job("transformer", "moves", **{**SHRINKS, "repack": {"enabled": False}}))
    release.wait_for_report("moves")
    uids = {pod.metadata.uid for pod in release.pods("moves")}
    eventually(lambda: release.status("moves").get("rebalances"), "layers to move")
    release.wait_for_report("moves", step=release.status("moves")["rebalances"][0]["step"] + 3)
    assert release.status("moves")["launches"] == 1
    assert {pod.metadata.uid for pod in release.pods("moves")} == uids
    release.end_job("moves")


def test_a_gang_grows_onto_a_node_that_comes(release):
    """Its first pod trains on while another one joins, in the same launch."""
    release.kubectl("cordon", "v100-1")
    release.apply(release.real_job("transformer", "grows", **ELASTIC, repack={"enabled": False}))
    release.wait_for_report("grows", step=3)
    (first,) = release.pods("grows")
    release.kubectl("uncordon", "v100-1")
    eventually(lambda: release.condition("grows", "Grown").get("status") == "True", "the job to grow")
    release.wait_for_report("grows", step=release.report("grows")["step"] + 3)
    assert release.status("grows")["launches"] == 1
    pods = {pod.metadata.uid: pod.spec.node_name for pod in release.pods("grows")}
    assert pods[first.metadata.uid] == "v100-0" and sorted(pods.values()) == ["v100-0", "v100-1"]
    release.end_job("grows")


def test_jobs_take_turns_on_the_same_gpus(release):
    """The first saves, leaves its GPUs to the other, and goes on from there when it is its turn."""

    def least_run(seconds):
        moves = {"spec": {"moves": {"minRunSeconds": seconds}}}
        release.custom.patch_cluster_custom_object(
            "ballast.dev", "v1alpha1", "clusterpolicies", "demo", moves
        )

    least_run(WAIT_SECONDS / 3)  # longer than a start takes here: else none would train
    try:
        node = release.start("gives", gpuTypes=["p100"])
        saved = release.report("gives")["checkpointStep"]
        assert release.start("takes", gpuTypes=["p100"]) == node
        assert release.status("gives")["restarts"].keys() == {"Preempted"}
        assert release.wait_for_resumed("gives") >= saved
        assert release.status("gives").get("lostSteps", 0) == 0
    finally:
        least_run(600)
    release.end_job("gives")
    release.end_job("takes")


def test_a_job_that_shrinks_gives_its_pods_back(release):
    """The released pods end, and the survivors train on without a restart."""
    release.apply(release.real_job("transformer", "shrinks", **SHRINKS, checkpoint=CHECKPOINT))
    eventually(lambda: release.status("shrinks").get("repacks"), "a repack")
    repack = release.status("shrinks")["repacks"][0]
    released = set(repack["releasedPods"])
    eventually(
        lambda: released.isdisjoint(pod.metadata.name for pod in release.pods("shrinks")),
        "pods to be given back",
    )
    release.wait_for_report("shrinks", step=repack["step"] + 3)
    assert release.status("shrinks")["launches"] == 1
    release.end_job("shrinks")


def test_network_policies_let_through_what_the_documents_say(release):
    """A gang trains on two nodes under them; only who is named reaches a rank, the metrics or the page."""
    forbidden = subprocess.run(
        ["unshare", "-n", "ipset", "create", "a", "hash:ip"], capture_output=True, text=True, check=False
    )
    if forbidden.returncode:
        pytest.skip(f"this kernel cannot enforce NetworkPolicies: {forbidden.stderr}")
    for namespace in (MONITORING, "strangers"):
        release.watch_from(namespace)
    over_both = {**ELASTIC, "pipeline": {**ELASTIC["pipeline"], "minStages": 4}}
    release.apply(release.real_job("transformer", "ruled", **over_both))
    release.wait_for_report("ruled", step=3)
    first, last = release.plan("ruled").pods
    addresses = {pod.metadata.name: pod.status.pod_ip for pod in release.pods("ruled")}
    (operator,) = release.core.list_namespaced_pod(
        NAMESPACE, label_selector="app.kubernetes.io/name=ballast"
    ).items
    metrics, page = (f"{operator.status.pod_ip}:{port}" for port in (8080, 8090))
    rank, scraped = (f"{addresses[first]}:{port}" for port in (RENDEZVOUS_PORT, 9400))
    everything = (metrics, page, rank, scraped)
    for pod, namespace, allowed in (
        ("watcher", MONITORING, {metrics, page, scraped}),
        ("watcher", "strangers", set()),
        (last, "default", {rank, scraped}),
    ):
        eventually(
            lambda: release.reaches(pod, *everything, namespace=namespace) == allowed,  # noqa: B023
            f"{pod} of {namespace} to reach {allowed} of {everything}",
        )
    release.end_job("ruled")


def test_a_pull_slower_than_the_limit_of_a_launch_keeps_it(release, registry):
    """It is told, and no other node begins the same pull."""
    image = f"{registry.name}/runtime:{VERSION}"
    release.apply(release.real_job("recurrent", "pulls", image, totalSteps=ENDLESS, model=SMALL))
    eventually(lambda: len(release.pods("pulls")) == 2, "pods")
    made = max(pod.metadata.creation_timestamp for pod in release.pods("pulls"))
    late = made + datetime.timedelta(seconds=1.3 * BIND_SECONDS)
    eventually(lambda: datetime.datetime.now(datetime.UTC) > late, "the limit to pass")
    assert "PullingImage" in release.condition("pulls", "Running")["message"]
    assert release.status("pulls")["allocation"]["launch"] == 1
    registry.released.set()
    release.wait_for_report("pulls", step=1)
    status = release.status("pulls")
    assert (status["launches"], status.get("restarts") or {}) == (1, {})
    release.end_job("pulls")


def test_an_image_that_is_nowhere_fails_the_job_with_its_name(release, registry):
    """Within the limit of one launch, and its GPUs are free."""
    job = release.real_job("recurrent", "absent", f"{registry.name}/absent:1", model=SMALL, backoffLimit=0)
    release.apply(job)
    release.wait_for_state("absent", "Failed")
    assert f"{registry.name}/absent:1" in release.condition("absent", "Failed")["message"]
    eventually(lambda: not release.pods("absent"), "its pods to go")
    assert not release.status("absent").get("allocation")
    release.end_job("absent")


def test_an_image_of_a_private_registry_is_pulled_by_the_secret_that_the_job_names(release, registry):
    """``imagePullSecrets`` reach the kubelet, which has no other credentials."""
    registry.account = "reader:word"
    registry.released.set()
    account = ["--docker-username=reader", "--docker-password=word", f"--docker-server={registry.name}"]
    release.kubectl("create", "secret", "docker-registry", "registry", *account)
    image = f"{registry.name}/runtime:{VERSION}"
    job = release.real_job("recurrent", "private", image, totalSteps=ENDLESS, model=SMALL)
    job["spec"]["template"]["spec"]["imagePullSecrets"] = [{"name": "registry"}]
    release.apply(job)
    release.wait_for_report("private", step=1)
    release.end_job("private")
    release.kubectl("delete", "secret", "registry")


def test_a_trainer_over_its_memory_fails_with_what_to_raise(release):
    """By the kernel's word, not by the last line of a log."""
    job = release.real_job("recurrent", "large", model=SMALL, backoffLimit=0)
    (container,) = job["spec"]["template"]["spec"]["containers"]
    container["resources"] = {"requests": {"memory": "40Mi"}, "limits": {"memory": "80Mi"}}
    release.apply(job)
    release.wait_for_state("large", "Failed")
    message = release.condition("large", "Failed")["message"]
    assert "OOMKilled" in message
    assert "resources.limits.memory" in message
    release.end_job("large")


@pytest.mark.parametrize("kind", ["native", "injected"])
def test_a_sidecar_that_never_ends_keeps_no_job_from_its_end(release, kind):
    """The kubelet ends a native one; a pod with another goes once its trainer's end is written down."""
    job = release.real_job("recurrent", kind, totalSteps=5, model=SMALL)
    spec = job["spec"]["template"]["spec"]
    sidecar = {"name": "sidecar", "image": spec["containers"][0]["image"], "command": ["sleep", "infinity"]}
    sidecar["securityContext"] = {"runAsUser": 65532}
    if kind == "native":
        spec["initContainers"] = [{**sidecar, "restartPolicy": "Always"}]
    else:
        spec["containers"].append(sidecar)
    release.apply(job)
    release.wait_for_state(kind, "Succeeded")
    eventually(
        lambda: "Running" not in {pod.status.phase for pod in release.pods(kind)},
        f"the pods of {kind} to end",
    )
    release.end_job(kind)


def test_a_drain_loses_no_step(release):
    """``kubectl drain``: saved in the grace of the pods, trained on elsewhere; the operator may move, too."""
    node = release.start("drained")
    saved = release.report("drained")["checkpointStep"]
    release.kubectl("drain", node, "--ignore-daemonsets", "--delete-emptydir-data", "--force")
    release.wait_for_next_launch("drained", saved, node)
    status = release.status("drained")
    # The node tells its pods at once: the operator sees the eviction first, or that they saved and ended.
    assert status["restarts"] in ({"NodeLeaving": 1}, {"PodLost": 1})
    assert status.get("lostSteps", 0) <= 1
    release.end_job("drained")


def test_a_machine_that_the_cloud_takes_back_is_left_in_time(release):
    """By its notice alone: kubelet and pods live on."""
    node = release.start("spot")
    saved = release.report("spot")["checkpointStep"]
    release.announce_end(node)
    try:
        release.wait_for_next_launch("spot", saved, node)
    finally:
        release.stay(node)
    status = release.status("spot")
    assert status["restarts"] == {"NodeLeaving": 1}
    assert status.get("lostSteps", 0) <= 1
    release.end_job("spot")


def test_a_power_cut_costs_what_was_not_saved(release):
    """Kubelet and containers die at once; the node is lost, not leaving, and comes back clean."""
    node = release.start("cut")
    saved = release.report("cut")["checkpointStep"]
    release.cluster.lose_node(node)
    release.wait_for_next_launch("cut", saved, node)
    assert release.status("cut")["restarts"] == {"NodeLost": 1}
    release.cluster.add_node(NODES[node])
    release.end_job("cut")


def test_a_gang_behind_a_partition_is_replaced_and_ends_when_it_heals(release):
    """It trains on where nobody sees it, on the same folder, and writes no checkpoint there any more."""
    node = release.start("parted")
    saved = release.report("parted")["checkpointStep"]
    release.set_link(node, "down")
    try:
        release.wait_for_node(node, ready=False)
        release.wait_for_next_launch("parted", saved, node)
    finally:
        release.set_link(node, "up")
    release.wait_for_node(node, ready=True)
    eventually(
        lambda: node not in {pod.spec.node_name for pod in release.pods("parted")}, "the old gang to go"
    )
    release.wait_for_report("parted", checkpoint=release.report("parted")["checkpointStep"] + 5)
    assert release.status("parted")["launches"] == 2
    release.end_job("parted")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_gang_whose_pods_are_deleted_by_force_trains_on(release, ranks):
    """Their containers still end when the API server has forgotten them."""
    name = f"forced-{ranks}"
    release.start(name)
    saved = release.report(name)["checkpointStep"]
    pods = [pod.metadata.name for pod in release.pods(name)][:ranks]
    release.kubectl("delete", "pod", *pods, "--force", "--grace-period=0")
    release.wait_for_next_launch(name, saved)
    assert release.status(name)["restarts"] == {"PodLost": 1}
    release.end_job(name)


def test_two_nodes_drained_at_once_leave_their_gang_to_a_third(release):
    """Saved in the grace of its pods, with fewer ranks; the operator may move at the same time."""
    spec = {**SHRINKS, "dynamics": [], "repack": {"enabled": False}, "checkpoint": CHECKPOINT}
    release.apply(release.real_job("transformer", "both", **spec, gpuTypes=["v100", "p100"]))
    release.wait_for_report("both", step=6, checkpoint=5)
    saved = release.report("both")["checkpointStep"]
    assert len({pod.spec.node_name for pod in release.pods("both")}) == 2
    drain = [release.cluster.kubectl, f"--kubeconfig={release.cluster.kubeconfig}", "drain", "--force"]
    words = ["--ignore-daemonsets", "--delete-emptydir-data"]
    drains = [subprocess.Popen([*drain, *words, node]) for node in ("v100-0", "v100-1")]
    assert [drain.wait() for drain in drains] == [0, 0]
    release.wait_for_next_launch("both", saved, "v100-0")
    assert release.status("both").get("lostSteps", 0) <= 1
    release.end_job("both")


def test_a_node_that_restarts_before_it_is_missed_costs_what_was_not_saved(release):
    """What it ran is gone though the API server has pods that run: their end is the node's fault."""
    node = release.start("rebooted")
    saved = release.report("rebooted")["checkpointStep"]
    release.cluster.lose_node(node)
    release.cluster.add_node(NODES[node])
    release.wait_for_next_launch("rebooted", saved)
    assert release.status("rebooted")["restarts"].keys() <= {"PodLost", "NodeLost"}
    release.end_job("rebooted")


def test_a_gang_leaves_a_node_under_disk_pressure(release):
    """The kubelet evicts it there, which is no fault of the job's; ``kubectl describe`` has its words."""
    node = release.start("pressed")
    saved = release.report("pressed")["checkpointStep"]
    pods = [pod.metadata.name for pod in release.pods("pressed")]
    settings, filler = release.disk(node) / "kubelet.json", release.disk(node) / "filler"
    usual = settings.read_text()
    wanted = json.loads(usual)
    wanted["evictionHard"]["nodefs.available"] = str(shutil.disk_usage(settings).free - 2 * GIB)
    wanted["evictionPressureTransitionPeriod"] = "10s"

    def admitted():
        with contextlib.suppress(client.ApiException):  # the kubelet does not answer yet
            known = release.core.connect_get_node_proxy_with_path(node, "pods")
            return all(pod in known for pod in pods)

    try:
        settings.write_text(json.dumps(wanted))
        release.kill(KUBELET, f"--hostname-override={node}")
        # One that starts under pressure rejects the pods there, in other words.
        eventually(admitted, f"the kubelet of {node} to know its pods again")
        with filler.open("wb") as opened:
            os.posix_fallocate(opened.fileno(), 0, 3 * GIB)
        release.wait_for_next_launch("pressed", saved, node)
    finally:
        filler.unlink(missing_ok=True)
        settings.write_text(usual)
        release.kill(KUBELET, f"--hostname-override={node}")
    assert any("The node was low on resource" in event.message for event in release.events("pressed"))
    assert release.status("pressed")["restarts"] == {"PodLost": 1}
    release.end_job("pressed")
    eventually(lambda: not release.core.read_node(node).spec.taints, "the pressure to pass")


def test_a_full_volume_is_told_and_saved_on_when_it_has_room(release):
    """Training goes on from step to step meanwhile."""
    job = release.real_job("recurrent", "full", totalSteps=ENDLESS, model=SMALL, checkpoint=CHECKPOINT)
    folder = release.folder / "checkpoints" / "full"
    for node in NODES:
        release.inside(node, "mount", "-t", "tmpfs", "-o", "size=20m,mode=777", "tmpfs", folder)
    release.apply(job)
    release.wait_for_report("full", step=6, checkpoint=5)
    node = release.pods("full")[0].spec.node_name
    release.inside(node, "sh", "-c", f"dd if=/dev/zero of={folder}/other bs=1k 2>/dev/null || true")
    eventually(lambda: "No space left" in release.condition("full", "Running")["message"], "words of it")
    saved = release.report("full")["checkpointStep"]
    release.wait_for_report("full", step=release.report("full")["step"] + 10)
    release.inside(node, "rm", f"{folder}/other")
    release.wait_for_report("full", checkpoint=saved + 5)
    eventually(lambda: "No space" not in release.condition("full", "Running")["message"], "it to be gone")
    assert (release.status("full")["launches"], release.status("full").get("lostSteps", 0)) == (1, 0)
    release.end_job("full")


_SHIFTED = """
import datetime, time
shift, seconds, nanoseconds = {shift}, time.time, time.time_ns
time.time, time.time_ns = lambda: seconds() + shift, lambda: nanoseconds() + shift * 10**9


class Shifted(datetime.datetime):
    @classmethod
    def now(cls, tz=None):
        return cls.fromtimestamp(time.time(), tz)


datetime.datetime = Shifted
"""


@pytest.mark.parametrize("minutes", [10, -10])
def test_a_clock_that_is_wrong_by_minutes_ends_no_launch(release, minutes):
    """The trainer's; the operator's and the API server's are right."""
    name = f"clock{minutes}"
    job = release.real_job("recurrent", name, totalSteps=ENDLESS, model=SMALL, checkpoint=CHECKPOINT)
    folder = release.folder / name
    folder.mkdir(mode=0o755)
    (folder / "sitecustomize.py").write_text(_SHIFTED.format(shift=60 * minutes))
    spec = job["spec"]["template"]["spec"]
    (container,) = spec["containers"]
    spec["volumes"].append({"name": "clock", "hostPath": {"path": str(folder)}})
    container["volumeMounts"].append({"name": "clock", "mountPath": "/clock", "readOnly": True})
    paths = [variable["value"] for variable in container["env"] if variable["name"] == "PYTHONPATH"]
    container["env"].append({"name": "PYTHONPATH", "value": ":".join(["/clock", *paths])})
    release.apply(job)
    release.wait_for_report(name, step=6, checkpoint=5)
    release.wait_for_report(name, step=release.report(name)["step"] + 100)
    status = release.status(name)
    assert (status["launches"], status.get("restarts") or {}) == (1, {})
    release.end_job(name)


def test_jobs_train_through_a_killed_kubelet_and_a_killed_operator(release):
    """As the kernel kills what is over its memory: each is started again, and finds what it left."""
    node = release.start("through")
    release.kill(KUBELET, f"--hostname-override={node}")
    release.wait_for_report("through", step=release.report("through")["step"] + 5)
    release.kill("/opt/ballast/bin/ballast", "operator")

    def restarted():
        pods = release.core.list_namespaced_pod(
            NAMESPACE, label_selector="app.kubernetes.io/name=ballast"
        ).items
        states = [state for pod in pods for state in pod.status.container_statuses or ()]
        return any(state.restart_count and state.ready for state in states)

    eventually(restarted, "the operator to be ready again")
    release.wait_for_report("through", step=release.report("through")["step"] + 5)
    status = release.status("through")
    assert (status["launches"], status.get("restarts") or {}) == (1, {})
    release.end_job("through")


def test_a_gang_shrinks_while_the_operator_is_upgraded_to_another_image(release):
    """Whichever of the two answers its proposal."""
    image = f"{REGISTRY}/operator"
    for node in NODES:
        release.inside(node, *("ctr", "-n", "k8s.io", "images", "tag", f"{image}:{VERSION}", f"{image}:next"))
    release.apply(release.real_job("transformer", "upgraded", **SHRINKS, checkpoint=CHECKPOINT))
    release.wait_for_report("upgraded", step=1)
    values = {**release.values, "image": {"repository": image, "tag": "next"}}
    release.helm.upgrade(CHART, "ballast", values, namespace=NAMESPACE, timeout=int(WAIT_SECONDS))
    eventually(lambda: release.status("upgraded").get("repacks"), "a repack")
    released = set(release.status("upgraded")["repacks"][0]["releasedPods"])
    eventually(
        lambda: released.isdisjoint(pod.metadata.name for pod in release.pods("upgraded")),
        "pods to be given back",
    )
    release.wait_for_report("upgraded", step=release.report("upgraded")["step"] + 3)
    assert release.status("upgraded")["launches"] == 1
    release.end_job("upgraded")


def test_jobs_train_through_a_killed_api_server_and_an_upgrade_of_the_operator(release):
    """The same pods, the same launch; both new replicas are ready."""
    # A busy kubelet is late with its lease: elsewhere than here its pods have five minutes.
    keys = ("node.kubernetes.io/not-ready", "node.kubernetes.io/unreachable")
    release.start("steady", [{"key": key, "operator": "Exists", "effect": "NoExecute"} for key in keys])
    uids = {pod.metadata.uid for pod in release.pods("steady")}
    release.restart_api_server()
    release.wait_for_report("steady", step=release.report("steady")["step"] + 5)
    two = {**release.values, "replicas": 2, "podAnnotations": {"release": "next"}}
    release.helm.upgrade(CHART, "ballast", two, namespace=NAMESPACE, timeout=int(WAIT_SECONDS))

    def upgraded():
        status = release.apps.read_namespaced_deployment("ballast", NAMESPACE).status
        return (status.updated_replicas, status.ready_replicas, status.replicas) == (2, 2, 2)

    eventually(upgraded, "two new replicas")
    release.wait_for_report("steady", step=release.report("steady")["step"] + 5)
    status = release.status("steady")
    assert (status["launches"], status.get("restarts") or {}) == (1, {})
    assert {pod.metadata.uid for pod in release.pods("steady")} == uids
    release.end_job("steady")


def test_an_uninstall_leaves_jobs_training_and_deletable(release):
    """Definitions and jobs stay; pods go with their job, without an operator. Runs last."""
    release.start("left")
    release.helm.uninstall("ballast", timeout=int(WAIT_SECONDS))
    running = release.core.list_namespaced_pod
    eventually(lambda: not running(NAMESPACE).items, "the operator to go")
    release.wait_for_report("left", step=release.report("left")["step"] + 5)
    release.end_job("left")
    release.kubectl("get", "trainingjobs,clusterpolicies")
