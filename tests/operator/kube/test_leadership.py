"""One leads; the fence falls before anybody else can."""

import asyncio
import contextlib
import dataclasses

import pytest
from ballast_operator.errors import Fenced, NotLeader, Unavailable
from ballast_operator.kube import leadership
from ballast_operator.kube.kinds import LEASE
from ballast_operator.kube.leadership import LEASE_NAME, Leadership
from ballast_operator.settings import MOST_LEASE_SECONDS, LeaderSettings
from ballast_operator.tasks import LoopThread
from ballast_policies.scheduling.decision import Memory, SchedulingPolicy, decide

from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.world import World
from tests.policies.scheduling.clusters import cluster, gang
from tests.support.waiting import Clock

SETTINGS = LeaderSettings(lease_seconds=15.0, renew_seconds=5.0, fence_seconds=10.0)


def replica(world: World, clock: Clock, name: str, settings: LeaderSettings = SETTINGS) -> Leadership:
    return Leadership(FakeCluster(world), namespace="n", identity=name, settings=settings, clock=clock)


async def leader_and_follower() -> tuple[World, Clock, Leadership, Leadership]:
    """The first leads, which the second has seen."""
    world, clock = World(), Clock()
    first, second = replica(world, clock, "first"), replica(world, clock, "second")
    assert await first._attempt() and not await second._attempt()
    return world, clock, first, second


async def test_the_second_replica_waits_until_the_lease_has_run_out_by_its_own_clock():
    """Fifteen seconds without a change, as the follower saw it; not a second earlier."""
    _, clock, _, second = await leader_and_follower()
    clock.now = 14.9
    assert not await second._attempt()
    clock.now = 15.1
    assert await second._attempt()
    assert second.leads


async def test_the_lease_has_the_time_that_the_operator_counts_by():
    """Not that of its machine: `ballast doctor` compares it with the API server's."""
    world, asked = World(), {"namespace": "n", "identity": "first", "settings": SETTINGS}
    assert await Leadership(FakeCluster(world), **asked, epoch=lambda: 86_400.5)._attempt()
    spec = world.get(LEASE, "n", LEASE_NAME)["spec"]
    assert spec["renewTime"] == spec["acquireTime"] == "1970-01-02T00:00:00.500000Z"


async def test_a_leader_that_cannot_renew_is_fenced_before_another_can_lead():
    """At ten seconds it stops writing; the other may lead at fifteen."""
    world, clock = World(), Clock()
    first = replica(world, clock, "first")
    assert await first._attempt()
    clock.now = 9.9
    first.check()
    clock.now = 10.1
    with pytest.raises(Fenced, match="lease n/ballast-operator is not renewed"):
        first.check()


async def test_a_term_goes_on_after_a_lapse_in_which_nobody_has_led():
    """The renewal lands on the version of the last one, or after one of which the answer was lost."""
    world, clock = World(), Clock()
    first = replica(world, clock, "first")
    await first._attempt()
    clock.now = 60.0
    await first._renew()
    first.check()
    clock.now = 120.0
    await first._take(await first._read())  # lands, its answer is not kept
    await first._renew()
    first.check()


async def test_a_leader_whose_lease_lapses_goes_on_renewing_and_writes_nothing_meanwhile(monkeypatch):
    """A machine that stands still for longer than the fence costs a pause, not the term."""
    monkeypatch.setattr(leadership, "AGAIN_SECONDS", 0.0)
    world, clock = World(), Clock()
    first = replica(world, clock, "first", dataclasses.replace(SETTINGS, renew_seconds=0.001))
    await first._attempt()
    replace, seen = first._cluster.replace, []

    async def slow(*arguments):
        clock.now += 8.0
        with contextlib.suppress(Fenced):
            first.check()
            seen.append("may write")
        if clock.now < 30.0:
            raise Unavailable("no answer in time")
        clock.now = 30.0
        await replace(*arguments)
        served.set()
        await asyncio.Event().wait()

    served = asyncio.Event()
    first._cluster.replace = slow
    holding = asyncio.create_task(first.hold())
    await asyncio.wait(
        [holding, served_task := asyncio.create_task(served.wait())], return_when="FIRST_COMPLETED"
    )
    assert served_task.done() and not holding.done()
    assert seen == ["may write"]
    holding.cancel()


@pytest.mark.parametrize("then", ["release", "forget", "lead"])
async def test_a_term_is_over_after_a_lapse_in_which_another_has_led(then):
    """Also if it has given the Lease back since, or somebody has deleted it."""
    world, clock, first, second = await leader_and_follower()
    clock.now = 20.0
    assert await second._attempt()
    if then == "release":
        await second.release()
    if then == "forget":
        world.drop(LEASE, "n", LEASE_NAME)
    await first._renew()
    with pytest.raises(NotLeader, match="does not hold lease n/ballast-operator"):
        first.check()


async def test_whatever_somebody_has_put_into_the_lease_ends():
    """A number of terms that no API server counts on from, and a duration of 68 years."""
    world, clock = World(), Clock()
    first, second = replica(world, clock, "first"), replica(world, clock, "second")
    await first._attempt()
    lease = await first._read()
    edited = {"holderIdentity": "x", "leaseTransitions": 2**31 - 1, "leaseDurationSeconds": 2**31 - 1}
    await first._cluster.replace(LEASE, {**lease, "spec": {**lease["spec"], **edited}})
    assert not await second._attempt()
    clock.now += MOST_LEASE_SECONDS
    assert await second._attempt()
    spec = (await second._read())["spec"]
    assert (spec["holderIdentity"], spec["leaseTransitions"], spec["leaseDurationSeconds"]) == (
        "second",
        0,
        15,
    )


def answering(replica: Leadership, clock: Clock, seconds: float) -> None:
    """Each answer takes so long from now on."""
    fake = FakeCluster(replica._cluster.world)

    def late(request):
        async def answered(*arguments):
            clock.now += seconds
            return await request(*arguments)

        return answered

    for verb in ("get", "create", "replace"):
        setattr(replica._cluster, verb, late(getattr(fake, verb)))


async def test_a_leader_leads_on_where_each_answer_takes_longer_than_the_fence():
    """Its Lease says how long it lasts, the other replica waits for that; both are short again afterwards."""
    world, clock, settings = World(), Clock(), LeaderSettings()
    first, second = (replica(world, clock, name, settings) for name in ("first", "second"))
    await first._attempt()
    answering(first, clock, 5.0)
    await first._renew()
    for _ in range(5):
        clock.now += settings.renew_seconds
        await first._renew()
        first.check()
        assert not await second._attempt()
        assert first._cluster.request_seconds > 10
    clock.now += 19.9
    assert not first.leads and not await second._attempt()
    answering(first, clock, 0.0)
    await first._renew()
    await first._renew()
    assert not await second._attempt()
    clock.now += settings.lease_seconds
    assert await second._attempt()


async def test_the_fence_of_a_shorter_lease_counts_from_when_it_was_asked_for():
    """Its answer may be lost, while the other replica has seen it."""
    world, clock, settings = World(), Clock(), LeaderSettings()
    first = replica(world, clock, "first", settings)
    answering(first, clock, 5.0)
    await first._attempt()
    await first._renew()
    first.check()
    answering(first, clock, 0.0)
    await first._read()

    async def lost(*_):
        raise Unavailable("no answer")

    first._cluster.replace = lost
    await first._renew()
    clock.now += settings.fence_seconds - 0.1
    first.check()
    clock.now += 0.1
    with pytest.raises(Fenced):
        first.check()


async def test_an_old_leader_that_wakes_up_finds_itself_replaced():
    """After a pause it neither writes nor takes the lease back."""
    _, clock, first, second = await leader_and_follower()
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
    _, clock, first, second = await leader_and_follower()
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


@pytest.mark.slow
async def test_the_lease_is_renewed_again_and_again_while_one_decision_is_computed():
    """Its seconds of Python let the thread of renewals in: no decision is so long that the Lease lapses."""
    world = World()
    # Its clock stands, so that no renewal is late: after a late one it waits longer than a decision takes.
    leader = replica(world, Clock(), "first", dataclasses.replace(SETTINGS, renew_seconds=0.001))
    jobs = (gang(f"job-{number}", 1 + number % 3) for number in range(6000))
    state, policy = cluster(*jobs, gpus=4000), SchedulingPolicy(objective="fifo")

    def renewed() -> int:
        before = world.version
        decide(state, Memory(), policy, now=0.0)
        return world.version - before

    async with LoopThread("renewals") as side:
        assert await side.run(leader.attempt())
        holding = side.start(leader.hold())
        await asyncio.to_thread(renewed)  # what is imported and cached by the first is no part of it
        assert await asyncio.to_thread(renewed) > 3
        holding.cancel()
