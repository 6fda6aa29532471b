"""Among the keys that are due, those that GPUs wait for come first, and the others come, too."""

from ballast_operator.kube.queue import TURNS, KeyQueue, Lane

from tests.operator.kube.test_queue import Clock


async def test_a_launch_overtakes_thousands_that_only_wait():
    """Findings of production: a job that fits stood behind 4,500 statuses that say "you wait"."""
    queue: KeyQueue[str] = KeyQueue(Clock())
    for number in range(1000):
        queue.add(f"waits-{number}", lane=Lane.BACKGROUND)
    queue.add("launch", lane=Lane.URGENT)
    assert await queue.take() == "launch"
    assert await queue.take() == "waits-0"


async def test_a_key_that_waits_becomes_urgent():
    """A job whose turn has come does not stay where it was."""
    queue: KeyQueue[str] = KeyQueue(Clock())
    queue.add("a", lane=Lane.BACKGROUND)
    queue.add("b", lane=Lane.BACKGROUND)
    assert queue.due() == 2
    queue.add("b", lane=Lane.URGENT)
    assert await queue.take() == "b"
    assert await queue.take() == "a"
    assert len(queue) == 0


async def test_urgent_keys_without_end_starve_no_other():
    """One of sixteen is the least urgent."""
    queue: KeyQueue[str] = KeyQueue(Clock())
    queue.add("waits", lane=Lane.BACKGROUND)
    taken = []
    for number in range(TURNS):
        queue.add(f"urgent-{number}", lane=Lane.URGENT)
        queue.add(f"more-{number}", lane=Lane.URGENT)
        taken.append(await queue.take())
        queue.done(taken[-1])
    assert "waits" in taken


async def test_an_urgent_worker_leaves_the_rest_to_others():
    """Workers kept for urgent keys are free when one comes."""
    queue: KeyQueue[str] = KeyQueue(Clock())
    queue.add("waits", lane=Lane.BACKGROUND)
    queue.add("launch", lane=Lane.URGENT)
    assert await queue.take(Lane.URGENT) == "launch"
    assert queue.busy("launch")
    assert await queue.take() == "waits"


async def test_a_busy_key_that_became_due_is_not_lost():
    """It was passed over while in work, and is taken when the work is done."""
    queue: KeyQueue[str] = KeyQueue(Clock())
    queue.add("a", lane=Lane.URGENT)
    await queue.take()
    queue.add("a", lane=Lane.URGENT)
    queue.add("b", lane=Lane.BACKGROUND)
    assert await queue.take() == "b"
    queue.done("a")
    assert await queue.take() == "a"
