"""Emulated GPUs of a node, and the containers that hold them."""

import asyncio
import dataclasses
from typing import Any

from ballast_localcluster.nodes.node import GPU_RESOURCE


class NotEnoughDevicesError(Exception):
    """A pod asks for more GPUs than the node has free (it came around kube-scheduler)."""


@dataclasses.dataclass(slots=True)
class Devices:
    """The GPUs of one node, by index.

    Attributes:
        held: pod UID -> container name -> indices.
        leaving: pods whose containers have ended; what they hold comes free as soon as no process is left.
    """

    count: int
    held: dict[str, dict[str, tuple[int, ...]]] = dataclasses.field(default_factory=dict)
    leaving: set[str] = dataclasses.field(default_factory=set)
    _freed: asyncio.Event = dataclasses.field(default_factory=asyncio.Event)

    async def take_when_free(self, pod: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Assign GPUs as :meth:`take` does, after those that are leaving if need be.

        kube-scheduler gives a GPU away as soon as the API server knows that its pod has ended.

        Raises:
            NotEnoughDevicesError: too few are free, and no pod that holds any is ending.
        """
        while True:
            try:
                return self.take(pod)
            except NotEnoughDevicesError:
                if not self.leaving & self.held.keys():
                    raise
            self._freed.clear()
            await self._freed.wait()

    def take(self, pod: dict[str, Any]) -> dict[str, tuple[int, ...]]:
        """Assign all GPUs that the pod's containers ask for, or none. Raises NotEnoughDevicesError."""
        uid = pod["metadata"]["uid"]
        taken = {index for other in self.held.values() for indices in other.values() for index in indices}
        free = [index for index in range(self.count) if index not in taken]
        wanted = {c["name"]: _gpus(c) for c in pod["spec"]["containers"]}
        total = sum(wanted.values())
        if total > len(free):
            raise NotEnoughDevicesError(
                f"the pod asks for {total} {GPU_RESOURCE}; the node has {len(free)} of {self.count} free"
            )
        given: dict[str, tuple[int, ...]] = {}
        for name, number in wanted.items():
            given[name], free = tuple(free[:number]), free[number:]
        self.held[uid] = given
        return given

    def ends(self, uid: str) -> None:
        """The pod's containers have ended, and others may be told so."""
        if uid in self.held:
            self.leaving.add(uid)

    def give_back(self, uid: str) -> None:
        """The pod's processes are gone."""
        self.held.pop(uid, None)
        self.leaving.discard(uid)
        self._freed.set()


def _gpus(container: dict[str, Any]) -> int:
    return int(container.get("resources", {}).get("limits", {}).get(GPU_RESOURCE, 0))
