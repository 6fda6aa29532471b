"""Background work that fails is started again; a loop of its own goes on while the main loop is busy."""

import asyncio
import threading

import pytest
from ballast_operator.errors import NotLeader
from ballast_operator.metrics import Metrics
from ballast_operator.tasks import LoopThread, keep_running

from tests.support.waiting import WAIT_SECONDS


class Stop(BaseException):
    """Ends a test."""


async def test_a_task_that_fails_is_started_again_with_longer_pauses():
    """Each error is counted; the pauses double up to a minute; a normal end is an end."""
    metrics, pauses, ends = Metrics(), [], [*[ValueError, RecursionError, MemoryError] * 4, None]

    async def work() -> None:
        error = ends.pop(0)
        if error is not None:
            raise error("boom")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)

    await keep_running("gauges", work, metrics=metrics, sleep=sleep, clock=lambda: 0.0)
    assert pauses == [1, 2, 4, 8, 16, 32, 60, 60, 60, 60, 60, 60]
    assert metrics.task_restarts.labels("gauges")._value.get() == 12


async def test_pauses_are_short_again_after_a_task_has_run_well():
    """An error once a day is no reason to wait for a minute."""
    moments, pauses = iter([0.0, 1.0, 2.0, 100.0, 100.0]), []

    async def work() -> None:
        raise ValueError("boom")

    async def sleep(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            raise Stop

    with pytest.raises(Stop):
        await keep_running("watch", work, metrics=Metrics(), sleep=sleep, clock=lambda: next(moments))
    assert pauses == [1, 1]


async def test_the_loss_of_the_leadership_ends_it():
    """Another replica leads: nothing may be tried again."""

    async def work() -> None:
        raise NotLeader("lost")

    with pytest.raises(NotLeader):
        await keep_running("allocator", work, metrics=Metrics())


async def test_its_work_continues_while_the_main_loop_stands_still():
    """The Lease is renewed whatever a decision takes."""
    turned = threading.Event()

    async def turn() -> None:
        await asyncio.sleep(0)
        turned.set()

    async with LoopThread("test") as side:
        side.start(turn())
        # The main loop does not turn here; only the other one can set this.
        assert turned.wait(WAIT_SECONDS)


async def test_results_and_errors_come_back():
    """As if awaited here."""

    async def double(value: int) -> int:
        return 2 * value

    async def fail() -> None:
        raise LookupError("nothing there")

    async with LoopThread("test") as side:
        assert await side.run(double(21)) == 42
        with pytest.raises(LookupError, match="nothing there"):
            await side.run(fail())


async def test_cancelling_here_cancels_there_and_so_does_the_end():
    """Nothing of it outlives its context."""
    ended = []

    async def wait(name: str, begun: asyncio.Event | None = None) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            ended.append(name)

    async def begun() -> None:
        """Whatever was started before has begun."""

    async with LoopThread("test") as side:
        future = side.start(wait("cancelled"))
        side.start(wait("left"))
        await side.run(begun())
        future.cancel()
        await side.run(begun())
    assert sorted(ended) == ["cancelled", "left"]
