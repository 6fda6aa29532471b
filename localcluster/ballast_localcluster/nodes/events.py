"""Events about pods, for `kubectl describe` and `kubectl get events`."""

import asyncio
import itertools
import logging
import time

import aiohttp

from ballast_localcluster.nodes.api import Api, ApiError, Manifest
from ballast_localcluster.nodes.containers.states import now

log = logging.getLogger(__name__)

COMPONENT = "ballast-node-agent"


class Events:
    """Posts events in the background; one that is lost is lost."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._tasks: set[asyncio.Task[None]] = set()
        self._numbers = itertools.count()

    def post(self, pod: Manifest, kind: str, reason: str, message: str) -> None:
        """Post one event about a pod; ``kind`` is Normal or Warning."""
        metadata = pod["metadata"]
        moment = now()
        event = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{metadata['name']}.{time.time_ns():x}.{next(self._numbers)}",
                "namespace": metadata["namespace"],
            },
            "involvedObject": {
                "apiVersion": "v1",
                "kind": "Pod",
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
            },
            "type": kind,
            "reason": reason,
            "message": message[:1024],
            "source": {"component": COMPONENT, "host": pod["spec"].get("nodeName", "")},
            "reportingComponent": COMPONENT,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        task = asyncio.create_task(self._send(metadata["namespace"], event))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _send(self, namespace: str, event: Manifest) -> None:
        try:
            await self._api.call("POST", f"/api/v1/namespaces/{namespace}/events", event)
        except (ApiError, aiohttp.ClientError, TimeoutError) as error:  # its namespace may be going
            log.debug("event %s: %s", event["reason"], error)
