"""A Kubernetes cluster on this machine: start it, add process nodes, stop it, and nothing is left.

:class:`LocalCluster` is what tests, `ballast up` and `ballast demo` use.
"""

import contextlib
import dataclasses
import shutil
import socket
import sys
import tempfile
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Self

from ballast_localcluster import components
from ballast_localcluster.binaries import Binaries, find_binaries
from ballast_localcluster.components import HOST, Layout, Ports, Settings
from ballast_localcluster.credentials import (
    NODE_AGENT_BINDING,
    NODE_AGENT_ROLE,
    REAL_NODES_RIGHTS,
    write_credentials,
)
from ballast_localcluster.errors import LocalClusterError, StartError
from ballast_localcluster.nodes.configuration import AgentConfiguration
from ballast_localcluster.nodes.node import ProcessNode
from ballast_localcluster.rest import Rest, install_custom_resources, node_is_ready, node_offers_gpus
from ballast_localcluster.supervision.owner import WardenHandle, tail
from ballast_localcluster.supervision.processes import MARK_VARIABLE
from ballast_localcluster.waiting import Found, Limit, wait_until

if TYPE_CHECKING:
    from ballast_localcluster.kubelets.start import RealNodes


def free_ports() -> Ports:
    """Three different ports that are free now.

    Another process may take one before it is used; `LocalCluster.start` tries again then.

    Raises:
        StartError: this machine does not reach itself.
    """
    with contextlib.ExitStack() as stack:
        numbers = []
        for _ in range(3):
            holder = stack.enter_context(socket.socket())
            holder.bind((HOST, 0))
            numbers.append(holder.getsockname()[1])
        holder.listen()
        try:
            socket.create_connection(holder.getsockname()).close()
        except OSError as error:
            reason = f"{HOST} does not answer on this machine: {error}. To fix: ip link set lo up"
            raise StartError(reason) from error
    etcd, etcd_peers, api_server = numbers
    return Ports(etcd=etcd, etcd_peers=etcd_peers, api_server=api_server)


_PORT_ATTEMPTS = 3
_AGENT_GRACE_SECONDS = 5.0
_ENDS = (KeyboardInterrupt, SystemExit)
"""A program that is ended has not failed."""


class LocalCluster:
    """etcd, kube-apiserver, kube-controller-manager, kube-scheduler, and process nodes.

    A context manager: leaving it stops everything.  After an exception the logs are kept and their path
    is printed. The cluster also ends when this program ends, for any reason, unless it was released.

    Args:
        nodes: process nodes to begin with; they are Ready when ``start`` returns.
        crds: files of CustomResourceDefinitions to install before the controllers start, so that the garbage
            collector knows the kinds at once (it learns of later ones within half a minute).
        settings: of the control plane.
        folder: where everything is kept; None: a fresh folder under the temporary folder.
        keep_logs: keep the logs after a stop without a failure, too.
        warm_start: fork the nodes' trainer pods from one process that has torch imported.
        real_nodes: runs the nodes as kubelets and containers; None: as process nodes.
    """

    def __init__(
        self,
        *,
        nodes: Iterable[ProcessNode] = (),
        crds: Sequence[Path] = (),
        settings: Settings | None = None,
        folder: Path | None = None,
        keep_logs: bool = False,
        warm_start: bool = True,
        real_nodes: "RealNodes | None" = None,
    ) -> None:
        self._real_nodes = real_nodes
        self._first_nodes = tuple(nodes)
        self._crds = tuple(crds)
        self._settings = settings or Settings()
        self._wanted_folder = folder
        self._keep_logs = keep_logs
        self._warm_start = warm_start
        self._layout: Layout | None = None
        self._warden: WardenHandle | None = None
        self._rest: Rest | None = None
        self._binaries: Binaries | None = None
        self._agents: dict[str, tuple[str, ...]] = {}
        self._lost: set[str] = set()

    def start(self) -> Self:
        """Start the control plane and the first nodes, and wait until all of it is ready.

        Raises:
            BinariesError: the control plane is not built and cannot be.
            StartError: a component ended, or was not ready within its limit; its log is kept and named;
                or this machine cannot have real nodes.
        """
        if self._real_nodes:
            self._real_nodes.prepare(self._wanted_folder or Path(tempfile.gettempdir()))
        self._binaries = find_binaries()
        for attempt in range(_PORT_ATTEMPTS):
            try:
                self._start_once()
            except BaseException as error:
                port_taken = isinstance(error, StartError) and "address already in use" in str(error)
                again = port_taken and attempt + 1 < _PORT_ATTEMPTS
                self.stop(failed=not again and not isinstance(error, _ENDS))
                if again:
                    continue
                raise
            break
        return self

    def stop(self, *, failed: bool = False) -> None:
        """Stop everything: pods as by a power cut, then the control plane.  A second stop does nothing.

        ``failed``: keep the logs and print where they are.
        """
        warden, self._warden, self._rest = self._warden, None, None
        if warden is None:
            return
        keep = failed or self._keep_logs
        warden.stop(keep_logs=keep)
        if self._real_nodes and self._layout is not None:
            self._real_nodes.clear(self._layout)
        if failed and self._layout is not None:
            sys.stderr.write(f"localcluster: the logs are kept in {self._layout.logs}\n")

    def release(self) -> Path:
        """Keep the cluster running when this program ends (`ballast up`); returns its folder."""
        self._running()
        assert self._warden is not None
        assert self._layout is not None
        self._warden.release()
        self._warden = None
        return self._layout.folder

    def add_node(self, node: ProcessNode) -> None:
        """Join one process node, served by an agent of its own, and wait until it is Ready."""
        self.add_nodes([node])

    def add_nodes(self, nodes: Iterable[ProcessNode]) -> None:
        """Join process nodes of one agent; waits until Ready. Raises StartError: it ended, or is late."""
        nodes = tuple(nodes)
        if not nodes:
            return
        rest = self._running()[0]
        taken = {name for agent, names in self._agents.items() if agent not in self._lost for name in names}
        if double := taken & {node.name for node in nodes}:
            raise LocalClusterError(f"nodes {sorted(double)} are in the cluster already")
        if self._real_nodes:
            for node in nodes:
                self._start_kubelet(self._real_nodes, node)
        else:
            self._start_agent(nodes)
        self._await(
            f"nodes {', '.join(node.name for node in nodes)} to be Ready",
            lambda: all(node_is_ready(rest, node.name) for node in nodes),
            Limit.NODES_READY,
        )
        if self._real_nodes:
            for node in nodes:
                self._real_nodes.describe(rest, node)
            self._await(
                f"nodes {', '.join(node.name for node in nodes)} to offer their GPUs",
                lambda: all(node_offers_gpus(rest, node.name, node.gpus) for node in nodes),
                Limit.NODES_READY,
            )

    def adopt_nodes(self, labels: Mapping[str, str]) -> None:
        """Serve the nodes with these labels: Node objects that another program makes, while they exist."""
        self._start_agent((), adopts=labels)

    def _start_agent(self, nodes: tuple[ProcessNode, ...], adopts: Mapping[str, str] | None = None) -> None:
        _, layout, warden = self._running()
        agent = f"node-agent-{len(self._agents)}"
        configuration = AgentConfiguration(
            kubeconfig=layout.kubeconfig("node-agent"),
            certificates=layout.certificates,
            folder=layout.folder / "pods" / agent,
            logs=layout.logs / "pods",
            nodes=nodes,
            adopts=adopts or {},
            warm_start=self._warm_start,
        )
        path = layout.folder / f"{agent}.json"
        configuration.write(path)
        self._agents[agent] = tuple(node.name for node in nodes)
        warden.start(
            agent,
            [sys.executable, "-m", "ballast_localcluster.nodes.agent", str(path)],
            layout.logs / f"{agent}.log",
            grace=_AGENT_GRACE_SECONDS,
        )

    def _start_kubelet(self, real: "RealNodes", node: ProcessNode) -> None:
        rest, layout, warden = self._running()
        agent = f"node-{node.name}-{len(self._agents)}"
        command = real.node_command(layout, node, rest.server)
        self._agents[agent] = (node.name,)
        warden.start(agent, command, layout.logs / f"{agent}.log", grace=_AGENT_GRACE_SECONDS)

    def run(self, name: str, command: Sequence[str], *, grace_seconds: float) -> Path:
        """Run a program that ends with the cluster, by SIGTERM and ``grace_seconds`` later by SIGKILL.

        One that ends by itself is started again. Returns its log.
        """
        _, layout, warden = self._running()
        log = layout.logs / f"{name}.log"
        warden.start(name, list(command), log, grace=grace_seconds, restart=True)
        return log

    def lose_node(self, name: str) -> None:
        """Cut the power of a node: its agent and its pods die at once, and the API server is not told.

        Nodes that were added in the same call share an agent and are lost together.  Adding them again
        brings them back.

        Raises:
            LocalClusterError: no agent serves a node of that name.
        """
        _, _, warden = self._running()
        for agent, names in self._agents.items():
            if name in names and agent not in self._lost:
                warden.kill(agent)
                self._lost.add(agent)
                return
        raise LocalClusterError(f"no agent of this cluster serves a node {name!r}: {self._agents}")

    @property
    def kubeconfig(self) -> Path:
        """Kubeconfig of the cluster's administrator."""
        return self._running()[1].kubeconfig("admin")

    @property
    def kubectl(self) -> Path:
        """The kubectl that was built with the cluster."""
        assert self._binaries is not None
        return self._binaries.program("kubectl")

    @property
    def audit_log(self) -> Path:
        """The API server's log of requests, with ``Settings.audit``."""
        return self._running()[1].audit_log

    @property
    def folder(self) -> Path:
        """Folder of the cluster's files."""
        return self._running()[1].folder

    @property
    def mark(self) -> dict[str, str]:
        """Environment of a program that is killed when the cluster ends, whatever its parent dies of."""
        return {MARK_VARIABLE: str(self.folder)}

    @property
    def server(self) -> str:
        """URL of the API server."""
        return self._running()[0].server

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: types.TracebackType | None,
    ) -> None:
        self.stop(failed=kind is not None and not issubclass(kind, _ENDS))

    def _running(self) -> tuple[Rest, Layout, WardenHandle]:
        if self._rest is None or self._layout is None or self._warden is None:
            raise LocalClusterError("the cluster is not running. To fix: call start() first.")
        return self._rest, self._layout, self._warden

    def _start_once(self) -> None:
        assert self._binaries is not None
        binaries, settings = self._binaries, self._settings
        ports = free_ports()
        layout = self._layout = self._make_folder()
        self._agents, self._lost = {}, set()
        warden = self._warden = WardenHandle(layout.folder, layout.logs / "warden.log")

        def run(name: str, command: list[str], grace: float = 0.0) -> None:
            warden.start(name, command, layout.logs / f"{name}.log", grace=grace)

        real = self._real_nodes
        if real:
            run("network", real.network_command(layout), _AGENT_GRACE_SECONDS)
            network = self._await("the nodes' network", lambda: real.network(layout), Limit.NODES_READY)
            assert network is not None
            settings = dataclasses.replace(settings, address=network.gateway)
        # The certificates' module loads `cryptography`, which a program that only imports this one need not.
        from ballast_localcluster.certificates import write_certificates

        write_certificates(layout.certificates, components.certificates(settings.address))
        server = f"https://{settings.address}:{ports.api_server}"
        write_credentials(layout.credentials, server, layout.certificates / "ca.crt")
        (layout.folder / "scheduler.json").write_text(components.scheduler_configuration(layout))
        (layout.folder / "audit.json").write_text(components.audit_policy())
        rest = self._rest = Rest(layout.kubeconfig("admin"))

        run("etcd", components.etcd(binaries, layout, ports))
        run("kube-apiserver", components.api_server(binaries, layout, ports, settings))
        self._await("the API server", lambda: rest.answers("/readyz"), Limit.API_SERVER_READY)
        for manifest in (NODE_AGENT_ROLE, NODE_AGENT_BINDING, *(REAL_NODES_RIGHTS if real else ())):
            plural = manifest["kind"].lower() + "s"
            rest.apply(f"/apis/{manifest['apiVersion']}/{plural}/{manifest['metadata']['name']}", manifest)
        install_custom_resources(rest, self._crds)
        run("kube-controller-manager", components.controller_manager(binaries, layout, settings))
        run("kube-scheduler", components.scheduler(binaries, layout, settings))
        self._await(
            "the controllers to make the default service account and its certificate",
            lambda: (
                rest.answers("/api/v1/namespaces/default/serviceaccounts/default")
                and rest.answers("/api/v1/namespaces/default/configmaps/kube-root-ca.crt")
            ),
            Limit.CONTROLLERS_READY,
        )
        if real:
            run("coredns", real.names_command(layout))
            real.import_images(layout)
        self.add_nodes(self._first_nodes)

    def _make_folder(self) -> Layout:
        if self._wanted_folder is None:
            folder = Path(tempfile.mkdtemp(prefix="ballast-cluster-"))
        else:
            folder = self._wanted_folder.resolve()
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True, mode=0o700)
        layout = Layout(folder=folder)
        for inner in (layout.certificates, layout.credentials, layout.logs):
            inner.mkdir(mode=0o700)
        return layout

    def _await(self, what: str, look: Callable[[], Found], limit: Limit) -> Found:
        layout, warden = self._layout, self._warden
        assert layout is not None
        assert warden is not None

        def look_again() -> Found:
            warden.check(layout.logs, ignored=self._lost)
            return look()

        try:
            return wait_until(look_again, what, limit)
        except TimeoutError as error:
            logs = "\n".join(f"  {log.name}:\n{tail(log)}" for log in sorted(layout.logs.glob("*.log")))
            raise StartError(f"{error}. The ends of the logs:\n{logs}") from error
