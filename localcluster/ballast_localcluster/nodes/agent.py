"""The node agent: one process that serves the pods of one or more process nodes."""

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

from ballast_localcluster.components import HOST
from ballast_localcluster.errors import NodesFileError
from ballast_localcluster.nodes.api import Api, ApiError, Manifest
from ballast_localcluster.nodes.configuration import AgentConfiguration
from ballast_localcluster.nodes.containers.warm_start import WarmStart
from ballast_localcluster.nodes.events import Events
from ballast_localcluster.nodes.heartbeat import Heartbeat
from ballast_localcluster.nodes.log_server import LogServer
from ballast_localcluster.nodes.node import ProcessNode
from ballast_localcluster.nodes.pod import Host, Pod
from ballast_localcluster.nodes.pod_resources.addresses import PodAddresses
from ballast_localcluster.nodes.pod_resources.devices import Devices

log = logging.getLogger(__name__)

VERSION = "v1.34.4-ballast.process"
"""Reported as kubelet's version: the API it speaks, and that it is none."""

_PARENT_POLL_SECONDS = 1.0


class NodeAgent:
    """Runs what is bound to its nodes."""

    def __init__(self, configuration: AgentConfiguration) -> None:
        self._configuration = configuration
        self._pods: dict[str, Pod] = {}
        self._hosts: dict[str, Host] = {}
        self._elsewhere: dict[str, Manifest] = {}
        self._adopted: dict[str, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    async def run(self) -> None:
        """Serve until cancelled; then every process of every pod is killed."""
        configuration = self._configuration
        configuration.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        addresses = PodAddresses()
        warm_start = None
        if configuration.warm_start:
            name = configuration.folder.name
            log_file = configuration.logs.parent / f"{name}-warm-start.log"
            warm_start = WarmStart(configuration.folder / "warm-start", log_file)
        server = LogServer(self._find, configuration.certificates, HOST)
        await server.start()
        try:
            async with Api(configuration.kubeconfig) as api, asyncio.TaskGroup() as group:
                events = Events(api)

                def host_of(node: ProcessNode) -> tuple[Host, Heartbeat]:
                    host = Host(
                        api=api,
                        node=node,
                        devices=Devices(node.gpus),
                        addresses=addresses,
                        events=events,
                        folder=configuration.folder,
                        logs=configuration.logs,
                        address=HOST,
                        warm_start=warm_start,
                    )
                    return host, Heartbeat(api, node, host=HOST, port=server.port, version=VERSION)

                for node in configuration.nodes:
                    self._hosts[node.name], heartbeat = host_of(node)
                    await heartbeat.register()
                    group.create_task(heartbeat.keep_alive())
                if configuration.adopts:
                    group.create_task(self._follow_nodes(api, host_of))
                group.create_task(self._follow(api))
        finally:
            for serving in self._adopted.values():
                serving.cancel()
            for pod in self._pods.values():
                pod.power_cut()
            if warm_start is not None:
                await warm_start.close()
            await server.stop()
            addresses.close()

    async def _follow(self, api: Api) -> None:
        # Bound pods of all nodes in one watch; the others' are dropped here.
        async for there, item in api.follow("/api/v1/pods", {"fieldSelector": "spec.nodeName!="}):
            if there:
                self._seen(item)
            else:
                self._vanished(item["metadata"]["uid"])

    async def _follow_nodes(self, api: Api, host_of: Callable[[ProcessNode], tuple[Host, Heartbeat]]) -> None:
        """Serve Node objects that another program makes, from their appearance until they are gone."""
        selector = ",".join(f"{key}={value}" for key, value in self._configuration.adopts.items())
        async for there, item in api.follow("/api/v1/nodes", {"labelSelector": selector}):
            if there:
                self._adopt(item, host_of)
            else:
                self._release(item["metadata"]["name"])

    def _adopt(self, item: Manifest, host_of: Callable[[ProcessNode], tuple[Host, Heartbeat]]) -> None:
        name, uid = item["metadata"]["name"], item["metadata"]["uid"]
        if name in self._adopted:
            return
        try:
            self._hosts[name], heartbeat = host_of(ProcessNode.from_object(item))
        except NodesFileError as error:
            log.warning("%s; it is not served", error)
            return
        log.info("node %s has come", name)
        self._adopted[name] = asyncio.create_task(_serve(heartbeat, name, uid))
        for manifest in [pod for pod in self._elsewhere.values() if pod["spec"]["nodeName"] == name]:
            self._seen(manifest)

    def _release(self, name: str) -> None:
        """The Node is gone, and so is the machine, with all that ran on it."""
        if name not in self._adopted:
            return
        log.info("node %s is gone", name)
        self._adopted.pop(name).cancel()
        del self._hosts[name]
        for pod in self._pods.values():
            if pod.manifest["spec"]["nodeName"] == name:
                pod.power_cut()

    def _seen(self, manifest: Manifest) -> None:
        host, uid = self._hosts.get(manifest["spec"].get("nodeName", "")), manifest["metadata"]["uid"]
        if host is None:
            if self._configuration.adopts and uid not in self._pods:  # its node may be adopted yet
                self._elsewhere[uid] = manifest
            return
        self._elsewhere.pop(uid, None)
        metadata = manifest["metadata"]
        pod = self._pods.get(metadata["uid"])
        if pod is None:
            pod = self._pods[metadata["uid"]] = Pod(manifest, host)
            log.info("pod %s/%s is bound to %s", metadata["namespace"], metadata["name"], host.node.name)
            pod.begin()
        if "deletionTimestamp" in metadata:
            pod.delete(metadata.get("deletionGracePeriodSeconds", 0))

    def _vanished(self, uid: str) -> None:
        self._elsewhere.pop(uid, None)
        if pod := self._pods.pop(uid, None):
            log.info("pod %s/%s is gone", pod.metadata["namespace"], pod.metadata["name"])
            task = asyncio.create_task(pod.vanish())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    def _find(self, namespace: str, name: str) -> Pod | None:
        for pod in self._pods.values():
            if (pod.metadata["namespace"], pod.metadata["name"]) == (namespace, name):
                return pod
        return None


async def _serve(heartbeat: Heartbeat, name: str, uid: str) -> None:
    try:
        await heartbeat.adopt(uid)
    except ApiError as error:  # gone already
        log.info("node %s: %s", name, error)
        return
    await heartbeat.keep_alive()


async def serve(configuration: AgentConfiguration) -> None:
    """Run an agent until SIGTERM or SIGINT."""
    task = asyncio.ensure_future(NodeAgent(configuration).run())
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, task.cancel)
    watching = asyncio.create_task(_watch_parent(task))
    try:
        await task
    except asyncio.CancelledError:
        log.info("the agent ends, and its pods with it")
    finally:
        watching.cancel()


async def _watch_parent(task: asyncio.Task[None]) -> None:
    """End when the warden is gone; the kernel tells us on Linux, elsewhere looking has to do."""
    parent = os.getppid()
    while os.getppid() == parent:  # noqa: ASYNC110 - nothing tells of it but looking
        await asyncio.sleep(_PARENT_POLL_SECONDS)
    task.cancel()


def main() -> int:
    """``python -m ballast_localcluster.nodes.agent CONFIGURATION``."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    asyncio.run(serve(AgentConfiguration.read(Path(sys.argv[1]))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
