"""The keeper of one node, or of the network between nodes: with its process all that it started ends.

A node is namespaces (network, mounts, processes, host name) that live as long as the first process in them,
``pause``: a power cut is its SIGKILL, which the kernel also sends when the keeper dies of anything.
Inside, /run is new at each start; /var/lib and /var/log are the node's disk.
"""

import json
import logging
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ballast_localcluster.errors import StartError
from ballast_localcluster.kubelets.configuration import (
    CLUSTERS,
    MOST_NODES,
    PAUSE,
    Network,
    NodeConfiguration,
    share_images,
)
from ballast_localcluster.kubelets.machine import make_cgroup, remove_cgroups
from ballast_localcluster.nodes.node import GPU_RESOURCE
from ballast_localcluster.supervision.processes import die_with_parent
from ballast_localcluster.waiting import Limit, wait_until

log = logging.getLogger(__name__)

UNHEALTHY = "unhealthy-gpus"
"""A file on a node's disk: numbers of the GPUs that its device plugin calls unhealthy, one a line."""

REGISTRIES = "certs.d"
"""A folder on a node's disk: what containerd is to know of a registry, as HOST:PORT/hosts.toml."""

_RESTART_PAUSE_SECONDS = 1.0

# $0: the node's disk, $1: its name, $2: programs, $3: the folder of its images; empty: none.
_ENTER = """
set -e
hostname "$1"
mkdir -p "$0/run" "$0/var-lib" "$0/var-log"
mount -t tmpfs -o mode=755 tmpfs "$0/run"
mkdir -p "$0/run/node" "$0/run/programs" "$0/run/netns" "$0/run/lock"
mount --bind "$0" "$0/run/node"
mount --bind "$2" "$0/run/programs"
if [ "$3" ]; then
    mkdir "$0/run/images"
    mount -o bind,ro "$3" "$0/run/images"
fi
mount -n --move "$0/run" /run
mount --bind /run/node/var-lib /var/lib
mount --bind /run/node/var-log /var/log
mkdir -p /var/lib/kubelet /var/log/containers /var/log/pods
mount --make-rshared /
exec /run/programs/pause
"""


class Namespaces:
    """Namespaces of a node's own, and the processes that this one runs in them."""

    def __init__(self, kinds: Sequence[str], command: Sequence[str]) -> None:
        self._holder = subprocess.Popen(
            ["unshare", *kinds, "--fork", "--kill-child=KILL", *command],
            preexec_fn=die_with_parent(),  # noqa: PLW1509 - no other thread runs yet
            start_new_session=True,
        )
        self._kinds = kinds
        self.first = wait_until(self._find, "the first process of a node", Limit.NODES_READY)
        """Its process id, as this machine sees it."""

    def _find(self) -> int:
        if (code := self._holder.poll()) is not None:
            raise StartError(f"a node's namespaces could not be made: unshare ended with code {code}")
        children = Path(f"/proc/{self._holder.pid}/task/{self._holder.pid}/children").read_text().split()
        return next((int(p) for p in children if Path(f"/proc/{p}/comm").read_text() == "pause\n"), 0)

    def inside(self, command: Sequence[str | Path]) -> list[str]:
        """A command in the namespaces."""
        flags = [kind for kind in self._kinds if len(kind) == 2]
        return ["nsenter", "-t", str(self.first), *flags, *map(str, command)]

    def call(self, *command: str) -> str:
        """Run a command inside to its end; what it printed. Raises StartError: it failed."""
        return call(*self.inside(command))

    def keep(self, *command: str | Path) -> None:
        """Run a program inside, and again whenever it ends."""

        def run() -> None:
            while True:
                with subprocess.Popen(self.inside(command), stdin=subprocess.DEVNULL) as process:
                    process.wait()
                log.warning("%s ended with code %s", command[0], process.returncode)
                time.sleep(_RESTART_PAUSE_SECONDS)

        # The kernel ends the program with the namespaces' first process, and that one with this process.
        threading.Thread(target=run, daemon=True).start()

    def end(self) -> None:
        """End everything inside at once."""
        self._holder.kill()
        self._holder.wait()
        wait_until(lambda: not Path(f"/proc/{self.first}").exists(), "a node to end", Limit.STOPPED)


def call(*command: str) -> str:
    """Run a command to its end; what it printed. Raises StartError: it failed, with its words."""
    done = subprocess.run(command, capture_output=True, text=True, check=False, stdin=subprocess.DEVNULL)
    if done.returncode != 0:
        raise StartError(f"`{' '.join(command)}`: {(done.stderr or done.stdout).strip()[-1000:]}")
    return done.stdout


def start_network(folder: Path, programs: Path) -> Namespaces:
    """Make a bridge in a namespace of its own, with a link to this machine, and write ``network.json``.

    On this machine there is one interface and its routes, which vanish with the namespace.
    """
    spaces = Namespaces(["-n"], [str(programs / "pause")])
    network = _link_machine(spaces.first)
    spaces.call("ip", "link", "set", "lo", "up")
    spaces.call("ip", "link", "add", "bridge", "type", "bridge")
    spaces.call("ip", "addr", "add", f"{network.names}/24", "dev", "bridge")
    for link in ("machine", "bridge"):
        spaces.call("ip", "link", "set", link, "up")
    spaces.call("ip", "link", "set", "machine", "master", "bridge")
    part = folder / "network.json.part"
    part.write_text(json.dumps({"number": network.number, "bridge": spaces.first}))
    part.rename(folder / "network.json")
    return spaces


def _link_machine(bridge: int) -> Network:
    """Take the first network whose interface is not there, and join this machine to it."""
    fault = ""
    for number in range(CLUSTERS):
        network = Network(number=number, bridge=bridge)
        try:
            call(
                *("ip", "link", "add", network.link, "type", "veth"),
                *("peer", "name", "machine", "netns", str(bridge)),
            )
        except StartError as error:
            fault = str(error)
            if "exists" in fault:
                continue
            break
        call("ip", "addr", "add", f"{network.gateway}/24", "dev", network.link)
        call("ip", "link", "set", network.link, "up")
        return network
    raise StartError(f"this machine cannot be joined to a network of real nodes: {fault}")


class Node:
    """One node, or, without a network, a disk that images are imported to."""

    def __init__(self, configuration: NodeConfiguration) -> None:
        self._configuration = configuration
        self._spaces: Namespaces | None = None

    def start(self) -> None:
        """Start it; kubelet registers it a moment later."""
        c = self._configuration
        remove_cgroups(c.cgroup)
        make_cgroup(c.cgroup)
        containerd = c.folder / "var-lib" / "containerd"
        if c.images and not containerd.exists():
            containerd.parent.mkdir(parents=True, exist_ok=True)
            share_images(c.images, containerd)
        script = ["sh", "-c", _ENTER, str(c.folder), c.node.name, str(c.programs), str(c.images or "")]
        kinds = ["-n", "-m", "-p", "-u"]
        spaces = self._spaces = Namespaces([*kinds, "--propagation=private", "--mount-proc"], script)
        spaces.call("ip", "link", "set", "lo", "up")
        self._write_containerd()
        spaces.keep("containerd", "-c", "/run/node/containerd.toml")
        wait_until(self._containerd_answers, "containerd to answer", Limit.NODES_READY)
        for archive in c.archives:
            log.info("importing %s", archive)
            spaces.call("ctr", "-n", "k8s.io", "images", "import", str(archive))
        if c.network:
            self._join(c.network, spaces)

    def end(self) -> None:
        """Cut its power, and give back its control group."""
        if self._spaces:
            self._spaces.end()
        remove_cgroups(self._configuration.cgroup)

    def _containerd_answers(self) -> bool:
        assert self._spaces is not None
        try:
            self._spaces.call("ctr", "version")
        except StartError:
            return False
        return True

    def _join(self, network: Network, spaces: Namespaces) -> None:
        c = self._configuration
        address = network.node(c.index)
        on_bridge = ["nsenter", "-t", str(network.bridge), "-n", "ip", "link"]
        link = f"node{c.index}"
        call(*on_bridge, *("add", link, "type", "veth", "peer", "name", "eth0", "netns", str(spaces.first)))
        call(*on_bridge, "set", link, "master", "bridge", "up")
        spaces.call("ip", "addr", "add", f"{address}/24", "dev", "eth0")
        spaces.call("ip", "link", "set", "eth0", "up")
        spaces.call("ip", "route", "add", "default", "via", network.gateway)
        for other in range(1, MOST_NODES + 1):
            if other != c.index:
                spaces.call("ip", "route", "add", network.pods(other), "via", network.node(other))
        route = ("ip", "route", "replace", network.pods(c.index), "via", address, "dev")
        call(*route, network.link)
        call(*on_bridge[:-2], *route, "bridge")
        spaces.call("sh", "-c", "echo 1 > /proc/sys/net/ipv4/ip_forward")
        self._write_kubelet(network)
        self._write_proxy(network)
        labels = c.node.manifest()["metadata"]["labels"]
        own = ",".join(f"{key}={value}" for key, value in labels.items() if "kubernetes.io/" not in key)
        taints = ",".join(f"{taint.key}={taint.value}:{taint.effect}" for taint in c.node.taints)
        spaces.keep(
            "/run/programs/kubelet",
            "--config=/run/node/kubelet.json",
            "--kubeconfig=/run/node/kubeconfig",
            f"--hostname-override={c.node.name}",
            f"--node-ip={address}",
            f"--node-labels={own}",
            *([f"--register-with-taints={taints}"] if taints else []),
        )
        spaces.keep("/run/programs/kube-proxy", "--config=/run/node/kube-proxy.json")
        spaces.keep(
            "/run/programs/kube-router",
            *("--run-firewall=true", "--run-router=false", "--run-service-proxy=false"),
            *("--health-port=0", "--metrics-port=0"),
            "--kubeconfig=/run/node/policies.kubeconfig",
        )
        if c.node.gpus:
            slowdown = json.dumps(dict(c.node.slowdown), sort_keys=True)
            variables = {"BALLAST_EMULATED_SLOWDOWN": slowdown} if c.node.slowdown else {}
            variables |= c.node.environment
            told = [f"{name}={value}" for name, value in variables.items()]
            spaces.keep(
                *("/run/programs/device-plugin", GPU_RESOURCE, str(c.node.gpus)),
                f"/run/node/{UNHEALTHY}",
                *told,
            )

    def _write_containerd(self) -> None:
        c = self._configuration
        cri = 'plugins."io.containerd.grpc.v1.cri"'
        (c.folder / "containerd.toml").write_text(
            f"""version = 2
[{cri}]
  sandbox_image = "{PAUSE}"
  restrict_oom_score_adj = true
  disable_apparmor = true
  disable_hugetlb_controller = true
  tolerate_missing_hugetlb_controller = true
  [{cri}.registry]
    config_path = "/run/node/{REGISTRIES}"
  [{cri}.cni]
    bin_dir = "{c.plugins}"
    conf_dir = "/run/node/cni"
  [{cri}.containerd]
    default_runtime_name = "runc"
    [{cri}.containerd.runtimes.runc]
      runtime_type = "io.containerd.runc.v2"
      [{cri}.containerd.runtimes.runc.options]
        SystemdCgroup = false
"""
        )
        if c.network is None:
            return
        (c.folder / "cni").mkdir(exist_ok=True)
        bridge = {
            "type": "bridge",
            "bridge": "cni0",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "dataDir": "/run/ipam",
                "ranges": [[{"subnet": c.network.pods(c.index)}]],
                "routes": [{"dst": "0.0.0.0/0"}],
            },
        }
        ports = {"type": "portmap", "capabilities": {"portMappings": True}}
        (c.folder / "cni" / "ballast.conflist").write_text(
            json.dumps({"cniVersion": "0.4.0", "name": "ballast", "plugins": [bridge, ports]})
        )

    def _write_kubelet(self, network: Network) -> None:
        c = self._configuration
        pki = "/run/node/certificates"
        none = dict.fromkeys(
            (
                "memory.available",
                "nodefs.available",
                "nodefs.inodesFree",
                "imagefs.available",
                "imagefs.inodesFree",
            ),
            "0%",
        )
        settings = {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": network.node(c.index),
            "readOnlyPort": 0,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": f"{pki}/ca.crt"},
            },
            "authorization": {"mode": "AlwaysAllow"},
            "tlsCertFile": f"{pki}/kubelet.crt",
            "tlsPrivateKeyFile": f"{pki}/kubelet.key",
            "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{c.cgroup}",
            "failSwapOn": False,
            "failCgroupV1": False,
            "makeIPTablesUtilChains": False,
            "clusterDNS": [network.names],
            "clusterDomain": "cluster.local",
            "resolvConf": "/dev/null",
            # All nodes share one disk and one memory: none may be emptied for another's sake.
            "evictionHard": none,
            "imageGCHighThresholdPercent": 100,
            "imageGCLowThresholdPercent": 99,
            "nodeStatusUpdateFrequency": "2s",
            "nodeLeaseDurationSeconds": 4,
            "syncFrequency": "10s",
        }
        (c.folder / "kubelet.json").write_text(json.dumps(settings, indent=1))

    def _write_proxy(self, network: Network) -> None:
        c = self._configuration
        settings = {
            "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
            "kind": "KubeProxyConfiguration",
            "mode": "iptables",
            "bindAddress": network.node(c.index),
            "healthzBindAddress": "127.0.0.1:10256",
            "metricsBindAddress": "127.0.0.1:10249",
            "clusterCIDR": network.whole,
            "hostnameOverride": c.node.name,
            "clientConnection": {"kubeconfig": "/run/node/proxy.kubeconfig"},
            # Limits of the whole machine, which are not a node's to change.
            "conntrack": {
                "maxPerCore": 0,
                "min": 0,
                "tcpEstablishedTimeout": "0s",
                "tcpCloseWaitTimeout": "0s",
            },
        }
        (c.folder / "kube-proxy.json").write_text(json.dumps(settings, indent=1))


def main() -> int:
    """``... network FOLDER PROGRAMS``, ``... node CONFIGURATION`` or ``... images CONFIGURATION``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    what, *arguments = sys.argv[1:]
    if what == "network":
        spaces = start_network(Path(arguments[0]), Path(arguments[1]))
        try:
            signal.pause()
        finally:
            spaces.end()
    node = Node(NodeConfiguration.read(Path(arguments[0])))
    try:
        node.start()
        if what == "node":
            signal.pause()
    finally:
        node.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
