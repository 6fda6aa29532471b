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


async def a_leader(settings: LeaderSettings = SETTINGS) -> tuple[World, Clock, Leadership]:
    world, clock = World(), Clock()
    first = replica(world, clock, "first", settings)
    assert await first.attempt()
    return world, clock, first


async def leader_and_follower() -> tuple[World, Clock, Leadership, Leadership]:
    """The first leads, which the second has seen."""
    world, clock, first = await a_leader()
    second = replica(world, clock, "second")
    assert not await second.attempt()
    return world, clock, first, second


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> tuple[list[float], list[Clock]]:
    """(how long replicas have paused, the clocks that pass meanwhile)."""
    found, clocks, sleep = [], [], asyncio.sleep

    async def pause(seconds: float) -> None:
        found.append(seconds)
        for clock in clocks:
            clock.now += seconds
        await sleep(0)

    monkeypatch.setattr(leadership.asyncio, "sleep", pause)
    return found, clocks


async def test_the_second_replica_waits_until_the_lease_has_run_out_by_its_own_clock(pauses):
    """Fifteen seconds without a change, as the follower saw it; then at once."""
    world, clock, _ = await a_leader()
    second = replica(world, clock, "second", dataclasses.replace(SETTINGS, renew_seconds=4.0))
    pauses[1].append(clock)
    await second.acquire()
    assert second.leads
    assert pauses[0] == [2.0] * 7 + [1.0]


async def test_the_lease_has_the_time_that_the_operator_counts_by():
    """Not that of its machine: `ballast doctor` compares it with the API server's."""
    world, asked = World(), {"namespace": "n", "identity": "first", "settings": SETTINGS}
    assert await Leadership(FakeCluster(world), **asked, epoch=lambda: 86_400.5).attempt()
    spec = world.get(LEASE, "n", LEASE_NAME)["spec"]
    assert spec["renewTime"] == spec["acquireTime"] == "1970-01-02T00:00:00.500000Z"


async def test_a_leader_that_cannot_renew_is_fenced_before_another_can_lead():
    """At ten seconds it stops writing; the other may lead at fifteen."""
    _, clock, first = await a_leader()
    clock.now = 9.9
    first.check()
    clock.now = 10.1
    with pytest.raises(Fenced, match="lease n/ballast-operator is not renewed"):
        first.check()


async def test_a_term_goes_on_after_a_lapse_in_which_nobody_has_led():
    """The renewal lands on the version of the last one, or after one of which the answer was lost."""
    _, clock, first = await a_leader()
    clock.now = 60.0
    await first._renew()
    first.check()
    clock.now = 120.0
    await first._take(await first._read())  # lands, its answer is not kept
    await first._renew()
    first.check()


async def test_a_leader_whose_lease_lapses_goes_on_renewing_and_writes_nothing_meanwhile(pauses):
    """A machine that stands still for longer than the fence costs a pause, not the term.

    After two renewals that failed, the third is tried at once.
    """
    _, clock, first = await a_leader()
    pauses[1].append(clock)
    replace, seen, served = first._cluster.replace, [], asyncio.Event()

    async def away(*arguments):
        with contextlib.suppress(Fenced):
            first.check()
            seen.append(clock.now)
        if clock.now < 10.1:
            raise Unavailable("no answer")
        await replace(*arguments)
        served.set()
        await asyncio.Event().wait()

    first._cluster.replace = away
    holding = asyncio.create_task(first.hold())
    await asyncio.wait([holding, task := asyncio.create_task(served.wait())], return_when="FIRST_COMPLETED")
    assert task.done() and not holding.done()
    assert seen == [5.0]
    assert pauses[0] == [5.0, 5.0, leadership.AGAIN_SECONDS]
    holding.cancel()


@pytest.mark.parametrize("then", ["release", "forget", "lead"])
async def test_a_term_is_over_after_a_lapse_in_which_another_has_led(then, pauses):
    """Also if it has given the Lease back since, or somebody has deleted it; nothing is taken back."""
    world, clock, first, second = await leader_and_follower()
    clock.now = 20.0
    assert await second.attempt()
    if then == "release":
        await second.release()
    if then == "forget":
        world.drop(LEASE, "n", LEASE_NAME)
    with pytest.raises(NotLeader, match="does not hold lease n/ballast-operator"):
        await first.hold()
    assert not first.leads and second.leads == (then != "release")
    assert first.replaced == (then == "lead")


async def test_whatever_somebody_has_put_into_the_lease_ends():
    """A number of terms that no API server counts on from, and a duration of 68 years."""
    world, clock, first = await a_leader()
    second, lease = replica(world, clock, "second"), await first._read()
    edited = {"holderIdentity": "x", "leaseTransitions": 2**31 - 1, "leaseDurationSeconds": 2**31 - 1}
    await first._cluster.replace(LEASE, {**lease, "spec": {**lease["spec"], **edited}})
    assert not await second.attempt()
    clock.now += MOST_LEASE_SECONDS
    assert await second.attempt()
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
    await first.attempt()
    answering(first, clock, 5.0)
    await first._renew()
    for _ in range(5):
        clock.now += settings.renew_seconds
        await first._renew()
        first.check()
        assert not await second.attempt()
        assert first._cluster.request_seconds > 10
    clock.now += 19.9
    assert not first.leads and not await second.attempt()
    answering(first, clock, 0.0)
    await first._renew()
    await first._renew()
    assert not await second.attempt()
    clock.now += settings.lease_seconds
    assert await second.attempt()


async def test_the_fence_of_a_shorter_lease_counts_from_when_it_was_asked_for():
    """Its answer may be lost, while the other replica has seen it."""
    settings = LeaderSettings()
    _, clock, first = await a_leader(settings)
    answering(first, clock, 5.0)
    await first.attempt()
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


async def test_a_released_lease_is_taken_at_once():
    """A graceful end hands over without a wait."""
    _, _, first, second = await leader_and_follower()
    await first.release()
    assert not first.leads
    assert await second.attempt()


async def test_a_lease_is_given_back_though_the_answer_to_its_last_renewal_was_lost():
    """The end may come while a renewal is under way: the API server has then a newer version."""
    _, _, first, second = await leader_and_follower()
    await first._take(await first._read())  # lands, its answer is not kept
    await first.release()
    assert await second.attempt()


async def test_a_lease_that_another_replica_holds_is_not_given_back():
    """Only the holder may empty it."""
    _, clock, first, second = await leader_and_follower()
    clock.now = 20.0
    await second.attempt()
    await first.release()
    assert (await second._read())["spec"]["holderIdentity"] == "second"


async def test_an_unreachable_api_server_does_not_end_leadership_before_its_time():
    """One failed renewal is tolerated as long as the last good one is fresh."""
    _, clock, first = await a_leader()

    async def unreachable(*_, **__):
        raise Unavailable("no answer")

    first._cluster.get = unreachable
    clock.now = 5.0
    assert await first.attempt()
    clock.now = 11.0
    assert not await first.attempt()


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
