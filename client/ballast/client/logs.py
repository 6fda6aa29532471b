"""Logs of a job's pods as one: lines by their time, or by the step that they tell of."""

import asyncio
import contextlib
import dataclasses
import re
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any

from ballast.client.connection import Connection
from ballast.client.errors import LoggedOut, NotConnected, NotFound, Refused

JOB_LABEL, LAUNCH_LABEL, RANK_LABEL = "ballast.dev/job", "ballast.dev/launch", "ballast.dev/rank"
POD_IP_ENV = "BALLAST_POD_IP"
"""A variable that the operator gives the trainer's container."""

_TIME = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)(?:\.(\d{1,9}))?(Z|[+-]\d\d:\d\d) ?")
_STEP = re.compile(r"\bstep\"?[ =:]\s*(\d{1,15})\b", re.IGNORECASE)
_TOGETHER_SECONDS = 0.2
"""Lines of several pods that come within it are sorted."""
_LOOK_SECONDS = 1.0
"""Seconds between looks for new pods."""
_MOST_WAITING = 10_000
"""Lines that are read ahead while nobody takes them."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LogLine:
    """A line of a pod's trainer.

    Attributes:
        pod: its name.
        launch: of the job, from 1.
        rank: the number in the pod's name; with one GPU a pod, its rank.
        time: when it was written, RFC 3339; empty where the node does not know.
        step: of this line, or of the last one before it that names one; 0: none yet.
        text: without the line's end.
    """

    pod: str
    launch: int
    rank: int
    time: str
    step: int
    text: str

    @property
    def order(self) -> tuple[int, str, int, int]:
        """Lines are sorted by it: of launches one after the other, by time, or by step without times."""
        return self.launch, self.time, self.step, self.rank


@dataclasses.dataclass(slots=True)
class Pod:
    """A pod of a job, and how far its log has been read."""

    namespace: str
    name: str
    uid: str
    launch: int
    rank: int
    container: str
    started: bool
    timed: bool = True
    time: str = ""
    step: int = 0
    read_any: bool = False

    @classmethod
    def of(cls, item: Mapping[str, Any]) -> "Pod":
        """Pod from the API server's object."""
        metadata, status = item["metadata"], item.get("status") or {}
        labels, container = metadata.get("labels") or {}, _trainers(item["spec"]["containers"])
        # Another container of the pod may run before it.
        waits = any(
            one.get("name") == container and "waiting" in (one.get("state") or {})
            for one in status.get("containerStatuses") or ()
        )
        return cls(
            namespace=metadata["namespace"],
            name=metadata["name"],
            uid=metadata["uid"],
            launch=_whole(labels.get(LAUNCH_LABEL)),
            rank=_whole(labels.get(RANK_LABEL)),
            container=container,
            started=status.get("phase") in ("Running", "Succeeded", "Failed") and not waits,
        )

    async def read(
        self, connection: Connection, *, follow: bool, tail: int | None
    ) -> AsyncGenerator[LogLine, None]:
        """Its lines, from the last one on that was read. With ``follow``, until its container has ended.

        Raises:
            NotConnected: the connection was lost.
        """
        while True:
            after = self.time
            query = {"container": self.container, "timestamps": "true" if self.timed else "false"}
            if follow:
                query["follow"] = "true"
            if after:
                query["sinceTime"] = after
            elif tail is not None:
                query["tailLines"] = str(tail)
            path = f"/api/v1/namespaces/{self.namespace}/pods/{self.name}/log"
            try:
                async with contextlib.aclosing(connection.lines(path, query)) as lines:
                    async for data in lines:
                        line = self._line(data)
                        if not after or line.time > after:
                            yield line
                return
            except Refused as error:
                if not self.timed or "time" not in str(error):
                    raise
                self.timed = False  # the nodes of a local cluster do not keep the times of lines

    def _line(self, data: bytes) -> LogLine:
        self.read_any = True
        if self.timed and (found := _TIME.match(data)):
            fraction = (found[2] or b"").ljust(9, b"0")
            # What is read once more, of the last one's second, does not lead back.
            self.time = max(self.time, f"{found[1].decode()}.{fraction.decode()}{found[3].decode()}")
            data = data[found.end() :]
        text = data.decode(errors="replace").rstrip("\r")
        if step := _STEP.search(text):
            self.step = max(self.step, int(step[1]))
        return LogLine(
            pod=self.name, launch=self.launch, rank=self.rank, time=self.time, step=self.step, text=text
        )


def _trainers(containers: Sequence[Mapping[str, Any]]) -> str:
    """Its trainer's: the first, unless a webhook has put one of its own before it."""
    for container in containers:
        if any(variable.get("name") == POD_IP_ENV for variable in container.get("env") or ()):
            return str(container["name"])
    return str(containers[0]["name"])


def _whole(label: Any) -> int:
    return int(label) if isinstance(label, str) and label.isdecimal() and len(label) < 10 else 0


async def pods_of(connection: Connection, namespace: str, job: str, rank: int | None) -> list[Pod]:
    """The pods that there are, of all launches."""
    query = {"labelSelector": f"{JOB_LABEL}={job}" + ("" if rank is None else f",{RANK_LABEL}={rank}")}
    found = await connection.request("get", f"/api/v1/namespaces/{namespace}/pods", query=query)
    return sorted((Pod.of(item) for item in found["items"]), key=lambda pod: (pod.launch, pod.rank))


async def merged(connection: Connection, pods: list[Pod], tail: int | None) -> AsyncGenerator[LogLine, None]:
    """Lines of the pods until now, in order; a pod that has just gone has nothing more to say."""
    heads: list[tuple[LogLine, AsyncGenerator[LogLine, None]]] = []
    for pod in pods:
        await _advance(heads, pod.read(connection, follow=False, tail=tail))
    while heads:
        first = min(heads, key=lambda head: head[0].order)
        heads.remove(first)
        yield first[0]
        await _advance(heads, first[1])


async def _advance(
    heads: list[tuple[LogLine, AsyncGenerator[LogLine, None]]], stream: AsyncGenerator[LogLine, None]
) -> None:
    with contextlib.suppress(StopAsyncIteration, NotFound):
        heads.append((await anext(stream), stream))


class Follower:
    """The logs of a job as they are written, over all of its launches, until it has ended."""

    def __init__(self, connection: Connection, namespace: str, job: str, rank: int | None) -> None:
        self._connection, self._where = connection, (namespace, job, rank)
        self._lines: asyncio.Queue[LogLine] = asyncio.Queue(_MOST_WAITING)
        self._pods: dict[str, Pod] = {}
        self._readers: dict[str, asyncio.Task[None]] = {}

    async def lines(self, ended: Any, tail: int | None) -> AsyncGenerator[LogLine, None]:
        """The lines.

        Args:
            ended: an asynchronous function: whether the job writes no more.
            tail: of each pod that is there already, the last lines only.
        """
        try:
            while True:
                try:
                    last = await ended()
                    self._start(await pods_of(self._connection, *self._where), tail)
                    tail = None
                except LoggedOut:
                    raise
                except NotConnected:  # an outage: what the pods write meanwhile is read afterwards
                    last = False
                reading = self._reading(last=last)
                for line in await self._come(wait=reading or not last):
                    yield line
                if last and not reading:
                    return
        finally:
            for task in self._readers.values():
                task.cancel()
            await asyncio.gather(*self._readers.values(), return_exceptions=True)

    def _start(self, pods: list[Pod], tail: int | None) -> None:
        for found in pods:
            pod = self._pods.setdefault(found.uid, found)
            if found.started and found.uid not in self._readers:
                self._readers[found.uid] = asyncio.create_task(self._read(pod, tail))

    def _reading(self, *, last: bool) -> bool:
        """True if there is a pod that may write more; one whose connection was lost is read on."""
        reading = False
        for uid, task in list(self._readers.items()):
            if not task.done():
                reading = True
            elif not isinstance(task.exception(), NotConnected):
                task.result()
            # Where nodes keep no times of lines, it is not known which ones have been read.
            elif not last and (self._pods[uid].timed or not self._pods[uid].read_any):
                del self._readers[uid]
        return reading

    async def _read(self, pod: Pod, tail: int | None) -> None:
        with contextlib.suppress(NotFound):
            async for line in pod.read(self._connection, follow=True, tail=tail):
                await self._lines.put(line)

    async def _come(self, *, wait: bool) -> list[LogLine]:
        """Lines that have come within a look's time, in order."""
        lines = []
        if wait:
            try:
                lines.append(await asyncio.wait_for(self._lines.get(), _LOOK_SECONDS))
            except asyncio.TimeoutError:  # noqa: UP041 - two classes in Python 3.10
                return []
            await asyncio.sleep(_TOGETHER_SECONDS)
        while not self._lines.empty():
            lines.append(self._lines.get_nowait())
        return sorted(lines, key=lambda line: line.order)
