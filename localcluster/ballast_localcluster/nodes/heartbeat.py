"""A node's registration, its lease and its status."""

import asyncio
import datetime
import logging

from ballast_localcluster.nodes.api import Api, ApiError, Manifest
from ballast_localcluster.nodes.containers.states import now
from ballast_localcluster.nodes.node import ProcessNode

log = logging.getLogger(__name__)

RENEW_SECONDS = 3.0
LEASE_SECONDS = 40
STATUS_SECONDS = 10.0
_LEASES = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"


class Heartbeat:
    """Registers a node and keeps it alive; ``port``: of the log server, ``version``: the kubelet's."""

    def __init__(self, api: Api, node: ProcessNode, *, host: str, port: int, version: str) -> None:
        self._api = api
        self._node = node
        self._host = host
        self._port = port
        self._version = version

    async def register(self) -> None:
        """Create the Node and its lease, or take over an earlier agent's; the node is Ready then."""
        manifest = self._node.manifest()
        try:
            made = await self._api.call_until_reached("POST", "/api/v1/nodes", manifest)
        except ApiError as error:
            if error.status != 409:
                raise
            patch = {"metadata": {key: manifest["metadata"][key] for key in ("labels", "annotations")}}
            made = await self._api.patch(f"/api/v1/nodes/{self._node.name}", patch)
        await self._begin(made["metadata"]["uid"])

    async def adopt(self, uid: str) -> None:
        """Take over a Node that another program made: only its lease, its status and one mark are ours.

        Raises:
            ApiError: it is gone.
        """
        marks = self._node.manifest()["metadata"]["annotations"]
        metadata = {"uid": uid, "annotations": marks}
        await self._api.patch(f"/api/v1/nodes/{self._node.name}", {"metadata": metadata})
        await self._begin(uid)

    async def keep_alive(self) -> None:
        """Renew the lease and, more seldom, the status, until cancelled."""
        loop = asyncio.get_running_loop()
        status_at = loop.time() + STATUS_SECONDS
        while True:
            await asyncio.sleep(RENEW_SECONDS)
            try:
                await self._renew()
                if loop.time() >= status_at:
                    await self._post_status()
                    status_at = loop.time() + STATUS_SECONDS
            except ApiError as error:
                # The Node may be deleted (a reclaimed spot machine): like kubelet, the agent does not
                # register it again, and the pod collector removes its pods.
                log.warning("node %s: %s", self._node.name, error)

    async def _begin(self, uid: str) -> None:
        """Have a lease of the Node with this UID, and post its status."""
        owner = {"apiVersion": "v1", "kind": "Node", "name": self._node.name, "uid": uid}
        await self._create_lease(owner)
        await self._post_status()

    async def _create_lease(self, owner: Manifest) -> None:
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": self._node.name, "ownerReferences": [owner]},
            "spec": {
                "holderIdentity": self._node.name,
                "leaseDurationSeconds": LEASE_SECONDS,
                "renewTime": _micro_time(),
            },
        }
        while True:
            try:
                await self._api.call_until_reached("POST", _LEASES, lease)
                return
            except ApiError as error:
                if error.status != 409:
                    raise
            # Of an earlier Node of this name: the garbage collector leaves it alone once it is this one's.
            try:
                await self._renew(owner)
                return
            except ApiError as error:
                if error.status != 404:  # collected in between
                    raise

    async def _renew(self, owner: Manifest | None = None) -> None:
        patch: Manifest = {"spec": {"renewTime": _micro_time(), "holderIdentity": self._node.name}}
        if owner is not None:
            patch["metadata"] = {"ownerReferences": [owner]}
        await self._api.patch(f"{_LEASES}/{self._node.name}", patch)

    async def _post_status(self) -> None:
        path = f"/api/v1/nodes/{self._node.name}/status"
        await self._api.patch(path, {"status": self._status()}, "strategic-merge")

    def _status(self) -> Manifest:
        moment = now()
        conditions = [
            ("Ready", "True", "NodeAgentReady", "the node agent is running"),
            ("MemoryPressure", "False", "NotMeasured", "process nodes do not measure it"),
            ("DiskPressure", "False", "NotMeasured", "process nodes do not measure it"),
            ("PIDPressure", "False", "NotMeasured", "process nodes do not measure it"),
        ]
        return {
            "capacity": self._node.capacity(),
            "allocatable": self._node.capacity(),
            "addresses": [
                {"type": "InternalIP", "address": self._host},
                {"type": "Hostname", "address": self._node.name},
            ],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._port}},
            "conditions": [
                {
                    "type": kind,
                    "status": status,
                    "reason": reason,
                    "message": message,
                    "lastHeartbeatTime": moment,
                    "lastTransitionTime": moment,
                }
                for kind, status, reason, message in conditions
            ],
            "nodeInfo": {
                "kubeletVersion": self._version,
                "kubeProxyVersion": "",
                "containerRuntimeVersion": "process://1",
                "osImage": "this machine",
                "operatingSystem": "linux",
                "architecture": self._node.manifest()["metadata"]["labels"]["kubernetes.io/arch"],
                "kernelVersion": "",
                "machineID": "",
                "systemUUID": "",
                "bootID": "",
            },
        }


def _micro_time() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
