"""The client for programs and notebooks without an event loop of their own: one in a thread does the work."""

import asyncio
import contextlib
import functools
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from typing import Any, Concatenate, ParamSpec, TypeVar

from ballast.client.aio import AsyncClient
from ballast.client.errors import BallastError

P = ParamSpec("P")
T = TypeVar("T")


def _answered(
    method: "Callable[Concatenate[AsyncClient, P], Coroutine[Any, Any, T]]",
) -> "Callable[Concatenate[Client, P], T]":
    """The method that waits for the answer of ``method``."""

    @functools.wraps(method)
    def wait(self: "Client", /, *args: P.args, **options: P.kwargs) -> T:
        return self._run(method(self._client, *args, **options))

    return wait


def _followed(
    method: "Callable[Concatenate[AsyncClient, P], AsyncGenerator[T, None]]",
) -> "Callable[Concatenate[Client, P], Generator[T, None, None]]":
    """The method whose values are those of ``method``, as they come."""

    @functools.wraps(method)
    def follow(self: "Client", /, *args: P.args, **options: P.kwargs) -> Generator[T, None, None]:
        return self._each(method(self._client, *args, **options))

    return follow


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
        except (KeyboardInterrupt, SystemExit):
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

    submit = _answered(AsyncClient.submit)
    get = _answered(AsyncClient.get)
    list = _answered(AsyncClient.list)
    watch = _followed(AsyncClient.watch)
    wait = _answered(AsyncClient.wait)
    logs = _followed(AsyncClient.logs)
    cost = _answered(AsyncClient.cost)
    suspend = _answered(AsyncClient.suspend)
    resume = _answered(AsyncClient.resume)
    delete = _answered(AsyncClient.delete)

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
