"""The asynchronous client."""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping
from contextlib import aclosing, suppress
from typing import Any

from ballast.client.connection import Connection, checked, read_json
from ballast.client.errors import (
    Forbidden,
    JobFailed,
    LoggedOut,
    NotConnected,
    NotFound,
    Refused,
    WaitedTooLong,
)
from ballast.client.job import API_VERSION, STATES, Cost, Job, Jobs, Object
from ballast.client.logs import Follower, LogLine, merged, pods_of

MANAGER = "ballast-client"
WATCH_SECONDS = 300
_MERGE = "application/merge-patch+json"
_LONGEST_PAUSE = 10.0


def _check_states(states: Collection[str]) -> None:
    for state in states:
        if state not in STATES:
            raise Refused(f"states: {state!r:.80} is none. To fix: give a list of {', '.join(STATES)}")


class AsyncClient:
    """Training jobs of a cluster. Use as an asynchronous context manager, or ``close`` it.

    Args:
        kubeconfig: a file; None: ``$KUBECONFIG``, else the pod's account, else ``~/.kube/config``.
        namespace: where jobs are, unless a method is told another.
        timeout: seconds for an answer of the API server.

    Every method raises :class:`~ballast.client.BallastError`.
    """

    def __init__(
        self, kubeconfig: str | None = None, *, namespace: str = "default", timeout: float = 10.0
    ) -> None:
        self.namespace = namespace
        self.connection = Connection(kubeconfig, timeout)
        self._outage = ""

    async def __aenter__(self) -> "AsyncClient":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self.connection.close()

    def _path(self, namespace: str | None, name: str | None = None) -> str:
        where = self.namespace if namespace is None else namespace
        root = f"/apis/{API_VERSION}"
        if where or name is not None:  # jobs of all namespaces are listed alone
            root += f"/namespaces/{checked(where, 'namespace')}"
        return f"{root}/trainingjobs" + ("" if name is None else f"/{checked(name, 'TrainingJob')}")

    async def submit(self, job: Object, *, namespace: str | None = None, dry_run: bool = False) -> Job:
        """Make a job.

        Args:
            job: its manifest, e.g. of :func:`~ballast.client.training_job`.
            namespace: where; default: the manifest's, else the client's.
            dry_run: the API server checks it and keeps nothing.

        Raises:
            AlreadyExists: the name is taken.
            Refused: a field is wrong; the text names it.
        """
        metadata = job.get("metadata") if isinstance(job, Mapping) else None
        if not isinstance(metadata, Mapping) or job.get("kind") != "TrainingJob":
            raise Refused("it is not a TrainingJob. To fix: kind: TrainingJob, and metadata with a name")
        if job.get("apiVersion") != API_VERSION:
            raise Refused(f"apiVersion: {job.get('apiVersion')!r:.80}. To fix: {API_VERSION}")
        where = namespace or metadata.get("namespace") or self.namespace
        checked(metadata.get("name") or "", "TrainingJob")
        checked(where, "namespace")
        body = {**job, "metadata": {**metadata, "namespace": where}}
        query = {"fieldManager": MANAGER, "fieldValidation": "Strict"}
        if dry_run:
            query["dryRun"] = "All"
        return Job(await self.connection.request("post", self._path(where), query=query, body=body))

    async def get(self, name: str, *, namespace: str | None = None) -> Job:
        """A job as it is now.

        Raises:
            NotFound: there is none, or not even its namespace.
        """
        return Job(await self._request_job("get", name, namespace))

    async def _request_job(self, verb: str, name: str, namespace: str | None, **more: Any) -> Any:
        path = self._path(namespace, name)
        try:
            return await self.connection.request(verb, path, **more)
        except NotFound:
            await self._require_namespace(namespace)
            raise

    async def _require_namespace(self, namespace: str | None) -> None:
        """Asked where nothing was found: the API server finds nothing in a namespace that does not exist.

        Raises:
            NotFound: it does not; not told to an account that may not ask.
        """
        where = self.namespace if namespace is None else namespace
        if where:
            with suppress(Forbidden):
                await self.connection.request("get", f"/api/v1/namespaces/{where}")

    async def list(
        self,
        *,
        namespace: str | None = None,
        states: Collection[str] = (),
        team: str | None = None,
        limit: int = 500,
    ) -> Jobs:
        """Jobs by namespace and name.

        Args:
            namespace: empty: of all; default: the client's.
            states: only these.
            team: only those with this ``spec.entity``.
            limit: at most so many; 0: all.

        Raises:
            NotFound: there is no such namespace.
            Refused: there is no such state.
        """
        _check_states(states)
        found: list[Job] = []
        empty = True
        most = limit + 1 if limit and not states and team is None else 0  # the last: are there more?
        async with aclosing(self.connection.items(self._path(namespace), most=most)) as items:
            async for item in items:
                empty = False
                job = Job({"apiVersion": API_VERSION, "kind": "TrainingJob", **item})
                if (not states or job.state in states) and team in (None, job.team):
                    found.append(job)
                if limit and len(found) > limit:
                    break
        if empty:
            await self._require_namespace(namespace)
        found.sort(key=lambda job: (job.namespace, job.name))
        return Jobs(tuple(found[: limit or None]), more=bool(limit) and len(found) > limit)

    async def watch(self, name: str, *, namespace: str | None = None) -> AsyncGenerator[Job, None]:
        """A job as it is now, and at each change, until it has ended; outages are waited out.

        Raises:
            NotConnected: the API server has not answered even once.
            LoggedOut: the credentials have expired.
            NotFound: there is none, or it was deleted.
        """
        pause, again, version = 0.0, 0.0, ""
        while True:
            begun = time.monotonic()
            try:
                job = await self.get(name, namespace=namespace)
                pause, self._outage = 0.0, ""
                if not job.version:
                    raise Refused(
                        f"TrainingJob {name}: what was answered is none. To fix: check the kubeconfig"
                    )
                if job.version != version:
                    version = job.version
                    yield job
                if job.finished:
                    return
                async with aclosing(self._changes(name, namespace, version)) as changes:
                    async for job in changes:
                        version = job.version
                        yield job
                        if job.finished:
                            return
                # A proxy, or an API server that forgets soon, may end every watch at once.
                brief = time.monotonic() - begun < _LONGEST_PAUSE
                again = min(_LONGEST_PAUSE, 2 * again + 0.5) if brief else 0.0
                await asyncio.sleep(again)
            except NotConnected as error:
                answered = version or self.connection.date
                if not answered or (isinstance(error, LoggedOut) and pause >= _LONGEST_PAUSE):
                    raise
                self._outage = f"; {error}"
                pause = min(_LONGEST_PAUSE, 2 * pause + 0.5)
                await asyncio.sleep(pause)

    async def _changes(self, name: str, namespace: str | None, version: str) -> AsyncGenerator[Job, None]:
        """Changes until the API server ends the watch, or says that it has to begin anew."""
        query = {
            "watch": "true",
            "fieldSelector": f"metadata.name={name}",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_SECONDS),
        }
        silence = 1.1 * WATCH_SECONDS
        path = self._path(namespace)
        async with aclosing(self.connection.lines(path, query, silence=silence)) as lines:
            async for line in lines:
                event = read_json(line, path)
                event = event if isinstance(event, Mapping) else {}
                if event.get("type") == "DELETED":
                    raise NotFound(f"TrainingJob {name} was deleted")
                job = Job(event.get("object") or {})
                if event.get("type") == "ERROR" or not job.version:
                    return
                yield job

    async def wait(
        self,
        name: str,
        *,
        namespace: str | None = None,
        states: Collection[str] = ("Succeeded",),
        timeout: float | None = None,  # noqa: ASYNC109 - the name that everybody looks for
        each: Callable[[Job], object] = lambda job: None,
    ) -> Job:
        """Wait until a job is in one of ``states``.

        Args:
            name: of the job.
            namespace: its own; default: the client's.
            states: what is waited for.
            timeout: seconds; None: as long as it takes.
            each: called at each change.

        Raises:
            JobFailed: it has ended in another state.
            WaitedTooLong: not within ``timeout``.
            Refused: there is no such state, or ``timeout`` is no number of seconds.
        """
        _check_states(states)
        if timeout is not None and not timeout >= 0:
            raise Refused(f"timeout: {timeout} is not a number of seconds. To fix: 0 or more, or None")
        last: Job | None = None

        async def until() -> Job:
            nonlocal last
            async with aclosing(self.watch(name, namespace=namespace)) as changes:
                async for last in changes:
                    each(last)
                    if last.state in states:
                        return last
            assert last is not None
            raise JobFailed(f"{last}: {last.why}")

        try:
            return await asyncio.wait_for(until(), timeout)
        except asyncio.TimeoutError as error:  # noqa: UP041 - two classes in Python 3.10
            text = f"{last or name} after {timeout:g} s, not {' or '.join(states)}{self._outage}"
            raise WaitedTooLong(text) from error

    async def logs(
        self,
        name: str,
        *,
        namespace: str | None = None,
        rank: int | None = None,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
    ) -> AsyncGenerator[LogLine, None]:
        """Lines of all ranks, by time; where a node does not know the time of a line, by step.

        Args:
            name: of the job.
            namespace: its own; default: the client's.
            rank: only of this one: the number in its pod's name.
            follow: go on as they come, over later launches, until the job has ended.
            previous: of the launch before the newest, as far as its pods are still there.
            tail: of each pod the last lines only.

        Raises:
            NotFound: there is no such job, or no pod of it.
        """
        where = self.namespace if namespace is None else namespace
        job = await self.get(name, namespace=where)
        if follow:

            async def ended() -> bool:
                try:
                    return (await self.get(name, namespace=where)).finished
                except NotFound:
                    return True

            follower = Follower(self.connection, where, name, rank)
            async with aclosing(follower.lines(ended, tail)) as lines:
                async for line in lines:
                    yield line
            return
        pods = await pods_of(self.connection, where, name, rank)
        newest = max((pod.launch for pod in pods), default=0)
        if previous:
            newest = max(newest, int((job.raw.get("status") or {}).get("launches") or 0))
            pods = [pod for pod in pods if pod.launch < newest]
            newest = max((pod.launch for pod in pods), default=0)
        pods = [pod for pod in pods if pod.launch == newest and pod.started]
        if not pods:
            raise NotFound(
                f"{job}: no pod {'of an earlier launch ' if previous else ''}"
                f"{'' if rank is None else f'with number {rank} '}has a log: {job.why or 'none has started'}"
            )
        async with aclosing(merged(self.connection, pods, tail)) as lines:
            async for line in lines:
                yield line

    async def cost(self, name: str, *, namespace: str | None = None) -> Cost:
        """Cost of a job."""
        return (await self.get(name, namespace=namespace)).cost

    async def suspend(self, name: str, *, namespace: str | None = None) -> Job:
        """Ask a job to save, stop and hold no GPUs; it has done so in state Suspended."""
        return await self._set_suspend(name, namespace, True)

    async def resume(self, name: str, *, namespace: str | None = None) -> Job:
        """Take :meth:`suspend` back."""
        return await self._set_suspend(name, namespace, False)

    async def _set_suspend(self, name: str, namespace: str | None, value: bool) -> Job:
        job = await self.get(name, namespace=namespace)
        if job.finished:
            raise Refused(f"{job}: it has ended. To fix: submit it again under another name")
        return Job(
            await self._request_job(
                "patch",
                name,
                namespace,
                query={"fieldManager": MANAGER},
                body={"spec": {"suspend": value}},
                patch=_MERGE,
            )
        )

    async def delete(self, name: str, *, namespace: str | None = None) -> None:
        """Delete a job with its pods; its checkpoints stay.

        Raises:
            NotFound: there is none.
        """
        body: dict[str, Any] = {"propagationPolicy": "Background"}
        await self._request_job("delete", name, namespace, body=body)
