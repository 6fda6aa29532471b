"""One leads; the fence falls before anybody else can."""

import pytest
from ballast_operator.errors import NotLeader, Unavailable
from ballast_operator.kube.leadership import Leadership
from ballast_operator.settings import LeaderSettings

from tests.operator.kube.test_queue import Clock
from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.world import World

SETTINGS = LeaderSettings(lease_seconds=15.0, renew_seconds=5.0, fence_seconds=10.0)


def replica(world: World, clock: Clock, name: str) -> Leadership:
    return Leadership(FakeCluster(world), namespace="n", identity=name, settings=SETTINGS, clock=clock)


async def test_the_second_replica_waits_until_the_lease_has_run_out_by_its_own_clock():
    """Fifteen seconds without a change, as the follower saw it; not a second earlier."""
    world, clock = World(), Clock()
    first, second = replica(world, clock, "first"), replica(world, clock, "second")
    assert await first._attempt()
    assert not await second._attempt()
    clock.now = 14.9
    assert not await second._attempt()
    clock.now = 15.1
    assert await second._attempt()
    assert second.leads


async def test_a_leader_that_cannot_renew_is_fenced_before_another_can_lead():
    """At ten seconds it stops writing; the other may lead at fifteen."""
    world, clock = World(), Clock()
    first = replica(world, clock, "first")
    assert await first._attempt()
    clock.now = 9.9
    first.check()
    clock.now = 10.1
    with pytest.raises(NotLeader, match="does not hold lease n/ballast-operator"):
        first.check()


async def test_an_old_leader_that_wakes_up_finds_itself_replaced():
    """After a pause it neither writes nor takes the lease back."""
    world, clock = World(), Clock()
    first, second = replica(world, clock, "first"), replica(world, clock, "second")
    await first._attempt()
    await second._attempt()
    clock.now = 20.0
    await second._attempt()
    assert second.leads
    assert not await first._attempt()
    assert not first.leads


async def test_a_released_lease_is_taken_at_once():
    """A graceful end hands over without a wait."""
    world, clock = World(), Clock()
    first, second = replica(world, clock, "first"), replica(world, clock, "second")
    await first._attempt()
    await first.release()
    assert not first.leads
    assert await second._attempt()


async def test_a_lease_is_given_back_though_the_answer_to_its_last_renewal_was_lost():
    """The end may come while a renewal is under way: the API server has then a newer version."""
    world, clock = World(), Clock()
    first, second = replica(world, clock, "first"), replica(world, clock, "second")
    await first._attempt()
    await first._take(await first._read())  # lands, its answer is not kept
    await first.release()
    assert await second._attempt()


async def test_a_lease_that_another_replica_holds_is_not_given_back():
    """Only the holder may empty it."""
    world, clock = World(), Clock()
    first, second = replica(world, clock, "first"), replica(world, clock, "second")
    await first._attempt()
    await second._attempt()
    clock.now = 20.0
    await second._attempt()
    await first.release()
    assert (await second._read())["spec"]["holderIdentity"] == "second"


async def test_an_unreachable_api_server_does_not_end_leadership_before_its_time():
    """One failed renewal is tolerated as long as the last good one is fresh."""
    world, clock = World(), Clock()
    first = replica(world, clock, "first")
    await first._attempt()

    async def unreachable(*_, **__):
        raise Unavailable("no answer")

    first._cluster.get = unreachable
    clock.now = 5.0
    assert await first._attempt()
    clock.now = 11.0
    assert not await first._attempt()
