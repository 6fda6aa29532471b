"""An event loop in a thread of its own, for what must answer in time while the main loop is busy.

The leader's Lease is renewed there, and ``/healthz`` and ``/metrics`` are served there.
"""

import asyncio
import threading
from collections.abc import Coroutine
from typing import Any, Self, TypeVar

T = TypeVar("T")


class LoopThread:
    """The thread. Use as an async context manager; what still runs at its end is cancelled."""

    def __init__(self, name: str) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    async def __aenter__(self) -> Self:
        self._thread.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.run(_cancel_others())
        self._loop.call_soon_threadsafe(self._loop.stop)
        await asyncio.to_thread(self._thread.join)
        self._loop.close()

    def start(self, work: Coroutine[Any, Any, T]) -> "asyncio.Future[T]":
        """Run ``work`` there; cancelling the future that is returned cancels it."""
        return asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run ``work`` there, and wait for its result."""
        return await self.start(work)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()


async def _cancel_others() -> None:
    others = asyncio.all_tasks() - {asyncio.current_task()}
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
