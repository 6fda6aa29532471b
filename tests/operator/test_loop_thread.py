"""Work on a loop of its own continues while the main loop is busy."""

import asyncio
import threading

import pytest
from ballast_operator.tasks import LoopThread

from tests.support.waiting import WAIT_SECONDS


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
