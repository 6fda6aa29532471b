"""Background work of the operator: an error in it is logged, counted, and followed by another try.

Only the loss of the leadership ends the process.
"""

import asyncio
import logging
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Self, TypeVar

from ballast_operator.errors import NotLeader
from ballast_operator.metrics import Metrics

T = TypeVar("T")


class LoopThread:
    """An event loop in a thread of its own, for what must answer in time while the main loop is busy.

    Use as an async context manager; what still runs at its end is cancelled.
    """

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


FIRST_PAUSE_SECONDS = 1.0
"""Pause before the first new try; doubled with each error that follows soon."""

LONGEST_PAUSE_SECONDS = 60.0
"""Longest pause between two tries."""

logger = logging.getLogger(__name__)


async def keep_running(
    name: str,
    work: Callable[[], Awaitable[None]],
    *,
    metrics: Metrics,
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    clock: Callable[[], float] | None = None,
) -> None:
    """Await ``work()``, and once more after each error, until it returns or is cancelled.

    ``work`` gives a fresh awaitable each time; ``name``: for the log and the label of
    ``ballast_task_restarts``. ``sleep``, ``clock``: in seconds; the loop's own clock where it is None.

    Raises:
        NotLeader: another replica leads.
    """
    now = clock if clock is not None else asyncio.get_running_loop().time
    pause = FIRST_PAUSE_SECONDS
    restarts = metrics.task_restarts.labels(name)
    while True:
        began = now()
        try:
            return await work()
        except NotLeader:
            raise
        except Exception:
            if now() - began > LONGEST_PAUSE_SECONDS:
                pause = FIRST_PAUSE_SECONDS
            logger.exception("%s failed; it is started again in %g s", name, pause)
            restarts.inc()
        await sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
