"""The command lines of the control plane's components: pure, from paths and ports to arguments.

Settings differ from a production cluster's where a laptop wants something else: no fsync, no leader
election, short periods of the node and pod collectors, and only the controllers that mean something here.
"""

import dataclasses
import json
from pathlib import Path

from ballast_localcluster.binaries import Binaries
from ballast_localcluster.certificates import Identity

HOST = "127.0.0.1"
SERVICE_RANGE = "10.96.0.0/16"


def certificates(address: str) -> tuple[Identity, ...]:
    """Whom the certificates name, with the API server at ``address``."""
    return (
        Identity(file="etcd", common_name="etcd", hosts=(HOST, "localhost")),
        Identity(
            file="api-server",
            common_name="kube-apiserver",
            hosts=(
                address,
                "10.96.0.1",
                "localhost",
                "kubernetes",
                "kubernetes.default",
                "kubernetes.default.svc",
                "kubernetes.default.svc.cluster.local",
            ),
        ),
        Identity(file="api-server-as-client", common_name="kube-apiserver"),
        Identity(file="node-agent", common_name="node-agent", hosts=(HOST, "localhost")),
    )


# Process nodes have no service network, no pod network and no storage: endpoints at loopback addresses are
# refused by the API server.
_OF_REAL_NODES = (
    "endpoints-controller",
    "endpointslice-controller",
    "endpointslice-mirroring-controller",
    "service-cidr-controller",
    "persistentvolume-attach-detach-controller",
    "persistentvolume-binder-controller",
    "persistentvolume-expander-controller",
    "persistentvolume-protection-controller",
    "ephemeral-volume-controller",
)

DISABLED_CONTROLLERS = (
    # No cloud.
    "node-ipam-controller",
    # Certificates are made once, by this package.
    "certificatesigningrequest-signing-controller",
    "certificatesigningrequest-approving-controller",
    "certificatesigningrequest-cleaner-controller",
    "legacy-serviceaccount-token-cleaner-controller",
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Options of a control plane.

    Attributes:
        node_monitor_grace_seconds: a node whose agent is silent for this long is NotReady. Agents renew
            every few seconds; shorter is livelier, and less forgiving on a machine that is busy.
        eviction_seconds: pods leave a NotReady node after this long, unless they tolerate it longer.
        audit: the API server writes a line of JSON for each request (``Layout.audit_log``).
        address: the API server's. Another than the loopback address is one that real nodes and pods reach:
            then Services have endpoints, and volumes are bound to claims.
        pod_groups: Kubernetes' own gangs, of Kubernetes 1.37 and later.
    """

    node_monitor_grace_seconds: int = 16
    eviction_seconds: int = 5
    audit: bool = False
    address: str = HOST
    pod_groups: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """TCP ports on the loopback address."""

    etcd: int
    etcd_peers: int
    api_server: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """Paths of a cluster's files."""

    folder: Path

    @property
    def certificates(self) -> Path:
        """Keys and certificates."""
        return self.folder / "certificates"

    @property
    def credentials(self) -> Path:
        """Kubeconfigs and the token file."""
        return self.folder / "credentials"

    @property
    def logs(self) -> Path:
        """One file a component; kept after a failure."""
        return self.folder / "logs"

    @property
    def audit_log(self) -> Path:
        """Log of all requests to the API server, where the settings ask for it."""
        return self.folder / "audit.log"

    def kubeconfig(self, user: str) -> Path:
        """Kubeconfig of one of ``credentials.USERS``, by its ``file``."""
        return self.credentials / f"{user}.kubeconfig"


def etcd(binaries: Binaries, layout: Layout, ports: Ports) -> list[str]:
    """Command of etcd: let in by certificate only, since others may share the machine."""
    pki = layout.certificates
    client, peer = f"https://{HOST}:{ports.etcd}", f"https://{HOST}:{ports.etcd_peers}"
    return [
        str(binaries.program("etcd")),
        f"--data-dir={layout.folder / 'etcd'}",
        f"--listen-client-urls={client}",
        f"--advertise-client-urls={client}",
        f"--listen-peer-urls={peer}",
        f"--initial-advertise-peer-urls={peer}",
        f"--initial-cluster=default={peer}",
        "--client-cert-auth",
        f"--trusted-ca-file={pki / 'ca.crt'}",
        f"--cert-file={pki / 'etcd.crt'}",
        f"--key-file={pki / 'etcd.key'}",
        "--peer-client-cert-auth",
        f"--peer-trusted-ca-file={pki / 'ca.crt'}",
        f"--peer-cert-file={pki / 'etcd.crt'}",
        f"--peer-key-file={pki / 'etcd.key'}",
        "--unsafe-no-fsync",
        "--log-level=warn",
    ]


def api_server(binaries: Binaries, layout: Layout, ports: Ports, settings: Settings) -> list[str]:
    """Command of kube-apiserver, with RBAC, token users and bound service-account tokens."""
    pki = layout.certificates
    return [
        str(binaries.program("kube-apiserver")),
        f"--etcd-servers=https://{HOST}:{ports.etcd}",
        f"--etcd-cafile={pki / 'ca.crt'}",
        f"--etcd-certfile={pki / 'api-server-as-client.crt'}",
        f"--etcd-keyfile={pki / 'api-server-as-client.key'}",
        f"--bind-address={settings.address}",
        f"--advertise-address={settings.address}",
        f"--secure-port={ports.api_server}",
        # The `kubernetes` Service cannot have an endpoint at a loopback address.
        *(["--endpoint-reconciler-type=none"] if settings.address == HOST else []),
        "--anonymous-auth=false",
        "--authorization-mode=Node,RBAC",
        f"--token-auth-file={layout.credentials / 'tokens.csv'}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--tls-cert-file={pki / 'api-server.crt'}",
        f"--tls-private-key-file={pki / 'api-server.key'}",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'api-server-as-client.crt'}",
        f"--kubelet-client-key={pki / 'api-server-as-client.key'}",
        "--kubelet-preferred-address-types=InternalIP",
        "--service-account-issuer=https://kubernetes.default.svc",
        f"--service-account-key-file={pki / 'service-accounts.pub'}",
        f"--service-account-signing-key-file={pki / 'service-accounts.key'}",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--allow-privileged=true",
        f"--default-not-ready-toleration-seconds={settings.eviction_seconds}",
        f"--default-unreachable-toleration-seconds={settings.eviction_seconds}",
        "--profiling=false",
        *(_audit(layout) if settings.audit else ()),
        *_gates(settings),
        *(["--runtime-config=scheduling.k8s.io/v1beta1=true"] if settings.pod_groups else []),
    ]


def _gates(settings: Settings) -> list[str]:
    return ["--feature-gates=GenericWorkload=true"] if settings.pod_groups else []


def audit_policy() -> str:
    """The audit policy: every request, once it is answered, without the objects."""
    return json.dumps(
        {
            "apiVersion": "audit.k8s.io/v1",
            "kind": "Policy",
            "omitStages": ["RequestReceived", "ResponseStarted"],
            "rules": [{"level": "Metadata"}],
        }
    )


def _audit(layout: Layout) -> list[str]:
    """Written before the answer is sent, so that who has the answer finds the line."""
    return [
        f"--audit-policy-file={layout.folder / 'audit.json'}",
        f"--audit-log-path={layout.audit_log}",
        "--audit-log-mode=blocking",
    ]


def controller_manager(binaries: Binaries, layout: Layout, settings: Settings) -> list[str]:
    """Command of kube-controller-manager, each controller with its own service account."""
    pki = layout.certificates
    disabled = (*DISABLED_CONTROLLERS, *(_OF_REAL_NODES if settings.address == HOST else ()))
    return [
        str(binaries.program("kube-controller-manager")),
        f"--kubeconfig={layout.kubeconfig('controller-manager')}",
        "--secure-port=0",
        "--leader-elect=false",
        "--use-service-account-credentials=true",
        f"--service-account-private-key-file={pki / 'service-accounts.key'}",
        f"--root-ca-file={pki / 'ca.crt'}",
        "--node-monitor-period=1s",
        f"--node-monitor-grace-period={settings.node_monitor_grace_seconds}s",
        "--node-eviction-rate=10",
        "--secondary-node-eviction-rate=10",
        "--unhealthy-zone-threshold=1.0",
        "--large-cluster-size-threshold=1",
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        "--controllers=*," + ",".join(f"-{name}" for name in disabled),
        *_gates(settings),
    ]


def scheduler_configuration(layout: Layout) -> str:
    """The configuration file of kube-scheduler: a pod that did not fit is tried again within two seconds."""
    return json.dumps(
        {
            "apiVersion": "kubescheduler.config.k8s.io/v1",
            "kind": "KubeSchedulerConfiguration",
            "leaderElection": {"leaderElect": False},
            "clientConnection": {"kubeconfig": str(layout.kubeconfig("scheduler")), "qps": 200, "burst": 400},
            "podInitialBackoffSeconds": 1,
            "podMaxBackoffSeconds": 2,
        }
    )


def scheduler(binaries: Binaries, layout: Layout, settings: Settings) -> list[str]:
    """Command of kube-scheduler."""
    return [
        str(binaries.program("kube-scheduler")),
        f"--config={layout.folder / 'scheduler.json'}",
        "--secure-port=0",
        *_gates(settings),
    ]
