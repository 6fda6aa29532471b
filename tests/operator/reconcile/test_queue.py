"""The queue of keys: once each, one worker each, later if asked, those that GPUs wait for first."""

import asyncio

import pytest
from ballast_operator.reconcile.changes import TURNS, KeyQueue, Lane

from tests.support.waiting import WAIT_SECONDS, Clock


@pytest.fixture
def queue() -> KeyQueue:
    return KeyQueue(Clock())


async def test_a_key_added_twice_is_taken_once(queue):
    """Level-triggered: what matters is that someone looks, not how often it was said."""
    queue.add("a")
    queue.add("a")
    assert await queue.take() == "a"
    assert queue.due() == 1, "that which is in work"


async def test_a_key_added_while_in_work_is_taken_again_only_afterwards(queue):
    """No two passes over one job at a time, and no change unseen."""
    queue.add("a")
    await queue.take()
    queue.add("a")
    queue.add("b")
    assert await queue.take() == "b"
    queue.done("a")
    assert await queue.take() == "a"


async def test_the_earlier_of_two_times_counts():
    """A plan to look in an hour does not delay a change now."""
    clock = Clock()
    queue = KeyQueue(clock)
    queue.add("a", 3600.0)
    queue.add("b", 10.0)
    queue.add("a", 5.0)
    clock.now = 6.0
    assert await queue.take() == "a"
    clock.now = 11.0
    assert await queue.take() == "b"
    clock.now = 3600.0
    assert queue.due() == 2, "those which are in work"


async def test_workers_share_the_keys_and_never_meet_on_one():
    """Many adds from everywhere: each key ends with a pass that began after its last add."""
    loop = asyncio.get_running_loop()
    queue = KeyQueue(loop.time)
    busy: set[int] = set()
    passes: dict[int, int] = {}

    async def work(key: int) -> None:
        assert key not in busy
        busy.add(key)
        await asyncio.sleep(0)
        passes[key] = passes.get(key, 0) + 1
        busy.discard(key)

    workers = [asyncio.create_task(queue.work(work)) for _ in range(4)]
    for turn in range(50):
        for key in range(5):
            queue.add(key)
        await asyncio.sleep(0) if turn % 3 else None
    async with asyncio.timeout(WAIT_SECONDS):
        while queue.due():  # noqa: ASYNC110 - lets the workers run, one turn at a time
            await asyncio.sleep(0)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)
    assert set(passes) == set(range(5))


async def test_a_worker_that_is_cancelled_as_a_key_comes_ends(queue):
    """An operator that is told to end does so, however busy it is."""

    async def never(key: str) -> None:
        raise AssertionError(f"{key} was worked on")

    queue.add("later", 1000.0)
    worker = asyncio.create_task(queue.work(never))
    for _ in range(3):
        await asyncio.sleep(0)
    queue.add("a")
    worker.cancel()
    done, _ = await asyncio.wait([worker], timeout=WAIT_SECONDS)
    assert done and worker.cancelled()


async def test_passes_that_wait_for_nothing_let_others_have_their_turn(queue):
    """A launch that waits for an answer is not held up by thousands of passes that write nothing."""
    done: list[int] = []
    most_between_turns = 0

    async def look(key: int) -> None:
        done.append(key)

    for key in range(1000):
        queue.add(key)
    workers = [asyncio.create_task(queue.work(look)) for _ in range(4)]
    while len(done) < 1000:
        before = len(done)
        await asyncio.sleep(0)
        most_between_turns = max(most_between_turns, len(done) - before)
    for worker in workers:
        worker.cancel()
    assert most_between_turns <= len(workers)


async def test_who_only_tells_people_leaves_urgent_keys_to_others(queue):
    """However many launches there are, why others wait is written beside them."""
    queue.add("launch", lane=Lane.URGENT)
    queue.add("waits", lane=Lane.BACKGROUND)
    assert await queue.take(most=Lane.BACKGROUND) == "waits"
    telling = asyncio.create_task(queue.take(most=Lane.BACKGROUND))
    for _ in range(3):
        await asyncio.sleep(0)
    assert not telling.done()
    assert await queue.take() == "launch"
    queue.add("waits too", lane=Lane.BACKGROUND)
    assert await asyncio.wait_for(telling, WAIT_SECONDS) == "waits too"


async def test_others_take_what_tells_people_while_gpus_wait(queue):
    """However many launches there are, why others wait is written, too."""
    queue.add(-1, lane=Lane.BACKGROUND)
    for number in range(2 * TURNS):
        queue.add(number, lane=Lane.URGENT)
    assert -1 in [await queue.take() for _ in range(TURNS)]


async def test_a_launch_overtakes_thousands_that_only_wait(queue):
    """Findings of production: a job that fits stood behind 4,500 statuses that say "you wait"."""
    for number in range(1000):
        queue.add(f"waits-{number}", lane=Lane.BACKGROUND)
    queue.add("launch", lane=Lane.URGENT)
    assert await queue.take() == "launch"
    assert await queue.take() == "waits-0"


async def test_a_key_that_waits_becomes_urgent(queue):
    """A job whose turn has come does not stay where it was."""
    queue.add("a", lane=Lane.BACKGROUND)
    queue.add("b", lane=Lane.BACKGROUND)
    assert queue.due() == 2
    queue.add("b", lane=Lane.URGENT)
    assert await queue.take() == "b"
    assert await queue.take() == "a"
    assert queue.due() == 2, "those which are in work"


async def test_urgent_keys_without_end_starve_no_other(queue):
    """One of sixteen is the least urgent."""
    queue.add("waits", lane=Lane.BACKGROUND)
    taken = []
    for number in range(TURNS):
        queue.add(f"urgent-{number}", lane=Lane.URGENT)
        queue.add(f"more-{number}", lane=Lane.URGENT)
        taken.append(await queue.take())
        queue.done(taken[-1])
    assert "waits" in taken


async def test_an_urgent_worker_leaves_the_rest_to_others(queue):
    """Workers kept for urgent keys are free when one comes."""
    queue.add("waits", lane=Lane.BACKGROUND)
    queue.add("launch", lane=Lane.URGENT)
    assert await queue.take(Lane.URGENT) == "launch"
    assert queue.busy("launch")
    assert await queue.take() == "waits"


async def test_a_busy_key_that_became_due_is_not_lost(queue):
    """It was passed over while in work, and is taken when the work is done."""
    queue.add("a", lane=Lane.URGENT)
    await queue.take()
    queue.add("a", lane=Lane.URGENT)
    queue.add("b", lane=Lane.BACKGROUND)
    assert await queue.take() == "b"
    queue.done("a")
    assert await queue.take() == "a"
