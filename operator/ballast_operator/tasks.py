"""Background work of the operator: an error in it is logged, counted, and followed by another try.

Only the loss of the leadership ends the process.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from ballast_operator.errors import NotLeader
from ballast_operator.metrics import Metrics

FIRST_PAUSE_SECONDS = 1.0
"""Before the first new try; doubles with each error that follows soon."""

LONGEST_PAUSE_SECONDS = 60.0
"""Between two tries."""

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

    Args:
        name: for the log and the label of ``ballast_task_restarts``.
        work: what to do; a fresh awaitable each time.
        metrics: where restarts are counted.
        sleep: how to pause, seconds.
        clock: seconds; the loop's own where it is None.

    Raises:
        NotLeader: another replica leads.
    """
    now = clock if clock is not None else asyncio.get_running_loop().time
    pause = FIRST_PAUSE_SECONDS
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
            metrics.task_restarts.labels(name).inc()
        await sleep(pause)
        pause = min(2 * pause, LONGEST_PAUSE_SECONDS)
