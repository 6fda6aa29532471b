"""Background work that fails is started again; only the loss of the leadership ends it."""

import pytest
from ballast_operator.errors import NotLeader
from ballast_operator.metrics import Metrics
from ballast_operator.tasks import keep_running


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
