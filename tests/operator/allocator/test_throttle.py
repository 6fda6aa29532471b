"""When a decision is made: the clock stands still, so that only what asks makes a difference."""

import asyncio
import types

import pytest
from ballast_operator.allocator.allocator import LONGEST_REST_SECONDS, Cooldown, DecisionThrottle
from ballast_policies.rounds.values import Node, Placement

from tests.operator.steps.contexts import an_idle_view
from tests.operator.views.builders import a_config, a_spec
from tests.support.waiting import Clock

HOUR = 3600.0


def a_pace(clock, *, free=0, took=HOUR):
    """After a decision that took long and has left ``free`` of eight fast GPUs."""
    throttle = DecisionThrottle(0.0, clock=clock)
    node = Node(name="n", gpu_type="fast", pool="fast", gpus=8)
    taken = Placement(gpu_type="fast", pool="fast", nodes=("n",) * (8 - free))
    snapshot = types.SimpleNamespace(capacity=types.SimpleNamespace(nodes=(node,)))
    throttle.decided(took, snapshot, types.SimpleNamespace(placements={"one": taken}))
    return throttle


async def turns():
    for _ in range(10):
        await asyncio.sleep(0)


async def decides(throttle) -> bool:
    """Whether it is time now."""
    waiting = asyncio.create_task(throttle.wait(None))
    await turns()
    done = waiting.done()
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    return done


async def test_nothing_is_decided_before_something_asks_for_it():
    """Not even after a long time."""
    clock = Clock()
    throttle = a_pace(clock)
    clock.now = HOUR
    assert not await decides(throttle)
    throttle.request()
    assert await decides(throttle)
    assert not await decides(throttle)  # what asked has its decision


@pytest.mark.parametrize(
    ("rest", "took", "pause"),
    [
        (Cooldown.NONE, HOUR, 0.0),
        (Cooldown.USUAL, 0.4, 0.2),
        (Cooldown.LONG, 0.4, 0.4),  # half of the time is for decisions
        (Cooldown.USUAL, HOUR, LONGEST_REST_SECONDS),
        (Cooldown.LONG, HOUR, LONGEST_REST_SECONDS),
    ],
)
async def test_a_decision_follows_another_at_once_only_where_gpus_may_wait_for_it(rest, took, pause):
    """The rest is bounded."""
    clock = Clock()
    throttle = a_pace(clock, took=took)
    throttle.request(rest)
    clock.now = 0.99 * pause
    assert await decides(throttle) is (pause == 0.0)
    clock.now = 1.01 * pause
    assert await decides(throttle) is (pause > 0.0)


async def test_what_is_urgent_is_not_held_up_by_what_asked_before_it():
    """The wait under way is shortened."""
    throttle = a_pace(Clock())
    throttle.request(Cooldown.LONG)
    waiting = asyncio.create_task(throttle.wait(None))
    await turns()
    assert not waiting.done()
    throttle.request(Cooldown.NONE)
    await waiting


@pytest.mark.parametrize(
    ("free", "spec", "at_once"),
    [
        (4, {"config": a_config(pipeline={"minStages": 4, "maxStages": 8})}, True),
        (3, {"config": a_config(pipeline={"minStages": 4, "maxStages": 8})}, False),
        (8, {"gpu_types": ("slow",)}, False),
    ],
    ids=["room for its least size", "too little room", "another GPU type"],
)
async def test_a_new_job_is_decided_on_at_once_where_it_may_fit(free, spec, at_once):
    """Thousands that can only be told why they wait share fewer decisions."""
    throttle = a_pace(Clock(), free=free)
    throttle.arrived(an_idle_view(spec=a_spec(**spec)))
    assert await decides(throttle) is at_once
