"""The client for programs and notebooks without an event loop of their own: one in a thread does the work."""

import asyncio
import contextlib
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Generator
from typing import Any, TypeVar

from ballast.client.aio import AsyncClient
from ballast.client.errors import BallastError
from ballast.client.job import Cost, Job, Jobs, Object
from ballast.client.logs import LogLine

T = TypeVar("T")


class Client:
    """Training jobs of a cluster: each method is the one of :class:`~ballast.client.AsyncClient`.

    Use as a context manager, or leave it to the end of the program. Works inside a notebook's event loop.
    """

    def __init__(
        self, kubeconfig: str | None = None, *, namespace: str = "default", timeout: float = 10.0
    ) -> None:
        self._client = AsyncClient(kubeconfig, namespace=namespace, timeout=timeout)
        self._loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._loop.run_forever, name="ballast-client", daemon=True)
        thread.start()
        self._close = weakref.finalize(self, _end, self._client, self._loop, thread)

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        if not self._close.alive:
            work.close()
            raise BallastError("the client is closed. To fix: make a new one")
        future = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except KeyboardInterrupt:
            future.cancel()
            raise

    def _each(self, values: AsyncGenerator[T, None]) -> Generator[T, None, None]:
        async def following() -> tuple[T, ...]:
            async for value in values:
                return (value,)
            return ()

        async def end() -> None:
            await values.aclose()

        try:
            while found := self._run(following()):
                yield found[0]
        finally:
            if self._close.alive:
                self._run(end())

    def submit(self, job: Object, *, namespace: str | None = None, dry_run: bool = False) -> Job:
        """Make a job."""
        return self._run(self._client.submit(job, namespace=namespace, dry_run=dry_run))

    def get(self, name: str, *, namespace: str | None = None) -> Job:
        """A job as it is now."""
        return self._run(self._client.get(name, namespace=namespace))

    def list(
        self,
        *,
        namespace: str | None = None,
        states: Collection[str] = (),
        team: str | None = None,
        limit: int = 500,
    ) -> Jobs:
        """Jobs by namespace and name; a notebook shows them as a table."""
        return self._run(self._client.list(namespace=namespace, states=states, team=team, limit=limit))

    def watch(self, name: str, *, namespace: str | None = None) -> Generator[Job, None, None]:
        """A job as it is now, and at each change, until it has ended."""
        return self._each(self._client.watch(name, namespace=namespace))

    def wait(
        self,
        name: str,
        *,
        namespace: str | None = None,
        states: Collection[str] = ("Succeeded",),
        timeout: float | None = None,
        each: Callable[[Job], object] = lambda job: None,
    ) -> Job:
        """Wait until a job is in one of ``states``."""
        waiting = self._client.wait(name, namespace=namespace, states=states, timeout=timeout, each=each)
        return self._run(waiting)

    def logs(
        self,
        name: str,
        *,
        namespace: str | None = None,
        rank: int | None = None,
        follow: bool = False,
        previous: bool = False,
        tail: int | None = None,
    ) -> Generator[LogLine, None, None]:
        """Lines of all ranks, by time or step."""
        return self._each(
            self._client.logs(
                name, namespace=namespace, rank=rank, follow=follow, previous=previous, tail=tail
            )
        )

    def cost(self, name: str, *, namespace: str | None = None) -> Cost:
        """What a job has cost."""
        return self._run(self._client.cost(name, namespace=namespace))

    def suspend(self, name: str, *, namespace: str | None = None) -> Job:
        """Have a job save, stop and hold no GPUs."""
        return self._run(self._client.suspend(name, namespace=namespace))

    def resume(self, name: str, *, namespace: str | None = None) -> Job:
        """Take :meth:`suspend` back."""
        return self._run(self._client.resume(name, namespace=namespace))

    def delete(self, name: str, *, namespace: str | None = None) -> None:
        """Delete a job with its pods; its checkpoints stay."""
        self._run(self._client.delete(name, namespace=namespace))

    def show(
        self,
        *,
        namespace: str | None = None,
        every: float = 2.0,
        display: Callable[..., Any] | None = None,
    ) -> None:
        """A table of the jobs in a notebook, live until all have ended, or until it is interrupted.

        Args:
            namespace: empty: of all; default: the client's.
            every: seconds between two looks.
            display: default: IPython's.
        """
        if display is None:
            from IPython.display import display as of_ipython

            display = of_ipython
        jobs = self.list(namespace=namespace)
        table = display(jobs, display_id=True)
        with contextlib.suppress(KeyboardInterrupt):
            while not all(job.finished for job in jobs):
                self._run(asyncio.sleep(every))
                jobs = self.list(namespace=namespace)
                table.update(jobs)


def _end(client: AsyncClient, loop: asyncio.AbstractEventLoop, thread: threading.Thread) -> None:
    async def end() -> None:
        others = asyncio.all_tasks() - {asyncio.current_task()}
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        await client.close()
        await loop.shutdown_asyncgens()

    asyncio.run_coroutine_threadsafe(end(), loop).result()
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()
