"""What a follower knows, and that it only reads."""

import asyncio
import dataclasses
import functools
import itertools
import types

import pytest
from ballast_operator.errors import NotLeader
from ballast_operator.kube import informers as informers_module
from ballast_operator.kube.caches import WATCHED
from ballast_operator.kube.informers import LEAST_GROWTH, MOST_READ_SINGLY, Informers
from ballast_operator.kube.kinds import JOB, LEASE, NODE, key_of
from ballast_operator.metrics import Metrics
from ballast_operator.observation import decoded as decoded_jobs
from ballast_operator.observation.decoded import DecodedJobs
from ballast_operator.observation.observer import Observer
from ballast_operator.settings import ApiSettings
from ballast_operator.views import clock as clocks
from ballast_operator.waits import Waits
from ballast_policies.contract.messages import JOB_LABEL

from tests.operator.loops.simulated.fake_cluster import FakeCluster
from tests.operator.loops.simulated.simulation import NAMESPACE, job
from tests.operator.loops.simulated.world import World
from tests.support.waiting import Clock


@pytest.fixture(autouse=True)
def collector(monkeypatch):
    """What is asked of the collector; it would walk through all objects of the test process for each list."""
    asked = []
    calls = {name: functools.partial(asked.append, name) for name in ("collect", "freeze")}
    monkeypatch.setattr(informers_module, "gc", types.SimpleNamespace(**calls))
    return asked


class ReadOnly(FakeCluster):
    """A connection whose fence is down, and that counts lists."""

    def __init__(self, world):
        super().__init__(world)
        self.lists = 0
        self.read = []

    async def get(self, kind, namespace, name):
        self.read.append(name)
        return await super().get(kind, namespace, name)

    async def list(self, kind, **arguments):
        self.lists += 1
        return await super().list(kind, **arguments)

    def __getattribute__(self, name):
        if name in ("apply", "write_status", "create", "replace", "delete"):
            raise NotLeader(name)
        return super().__getattribute__(name)


class Stalled(Informers):
    """Its watches bring nothing, as those of an API server that is slow to tell."""

    async def _watch(self):
        await asyncio.Event().wait()


def informers(cluster):
    return Stalled(cluster, namespace="", settings=ApiSettings(), metrics=Metrics(), waits=Waits())


async def turn(until):
    """Let the loop turn until the condition holds; no time passes."""
    for _ in range(10_000):
        if until():
            return
        await asyncio.sleep(0)
    raise AssertionError("the condition was not reached")


async def test_a_follower_knows_the_cluster_before_it_leads_and_writes_nothing():
    """Its caches are filled and its jobs decoded; every write would raise."""
    world = World()
    world.put(JOB, job("one"))
    known = informers(ReadOnly(world))
    decoded = DecodedJobs(known.caches)
    decoding = asyncio.create_task(decoded.run())
    known.start()
    await turn(lambda: decoded._specs)
    (spec, problem) = decoded.spec((NAMESPACE, "one"), known.caches[JOB].get((NAMESPACE, "one")))
    assert spec is not None and not problem
    decoding.cancel()
    await known.stop()


async def test_a_new_leader_knows_what_was_written_before_its_election_whatever_its_watches_say():
    """A launch that the last leader wrote as it died is there before anything is decided."""
    world = World()
    world.put(JOB, job("one"))
    world.put(NODE, {"metadata": {"name": "gone"}})
    known = informers(ReadOnly(world))
    known.start()
    await turn(lambda: known.caches[NODE].get(("", "gone")))
    world.patch(JOB, NAMESPACE, "one", {"status": {"launches": 1}})
    world.drop(NODE, "", "gone")
    assert not (known.caches[JOB].get((NAMESPACE, "one")) or {}).get("status")
    await known.refresh()
    assert known.caches[JOB].get((NAMESPACE, "one"))["status"]["launches"] == 1
    assert known.caches[NODE].get(("", "gone")) is None
    await known.stop()


async def test_a_replica_that_leads_at_once_lists_once():
    """What is listed after the election needs no second list."""
    cluster = ReadOnly(World())
    known = informers(cluster)
    for times in (1, 2):
        await known.refresh()
        assert cluster.lists == times * len(WATCHED)
    await known.stop()


async def test_a_second_list_of_many_jobs_reads_those_that_have_changed_and_no_others():
    """A takeover costs metadata, not ten thousand specs and statuses; what was deleted is gone."""
    world = World()
    for number in range(MOST_READ_SINGLY + 5):
        world.put(JOB, job(f"job-{number}"))
    cluster = ReadOnly(world)
    known = informers(cluster)
    known.start()
    await turn(lambda: known.caches[JOB].get((NAMESPACE, "job-104")))
    world.patch(JOB, NAMESPACE, "job-7", {"status": {"launches": 1}})
    world.drop(JOB, NAMESPACE, "job-8")
    world.put(JOB, job("late"))
    await known.refresh()
    assert cluster.read == ["job-7", "late"]
    assert known.caches[JOB].get((NAMESPACE, "job-7"))["status"] == {"launches": 1}
    assert known.caches[JOB].get((NAMESPACE, "job-8")) is None
    assert known.caches[JOB].get((NAMESPACE, "late"))["spec"]["totalSteps"] == 100
    for number in range(MOST_READ_SINGLY + 5):
        world.patch(JOB, NAMESPACE, f"job-{number}", {"status": {"launches": 2}})
    await known.refresh()
    assert len(cluster.read) == 2, "of very many, a whole list is read"
    assert known.caches[JOB].get((NAMESPACE, "job-9"))["status"] == {"launches": 2}
    await known.stop()


async def test_objects_that_arrive_later_are_kept_from_the_collector_too(monkeypatch, collector):
    """Once there are many more; otherwise each full collection would walk through all of them."""
    monkeypatch.setattr("ballast_operator.kube.informers.FREEZE_SECONDS", 0.0)
    world = World()
    known = informers(FakeCluster(world))
    await known.refresh()
    at_first = known._frozen
    for number in range(LEAST_GROWTH + 10):
        item = {"metadata": {"name": f"n{number}", "uid": f"u{number}", "resourceVersion": str(number + 1)}}
        known.caches.watched(NODE, "ADDED", item)
    await turn(lambda: known._frozen > at_first)
    assert known._frozen == LEAST_GROWTH + 10
    # What has become garbage since is collected before the rest is kept; what was kept is not walked through.
    assert collector == ["collect", "freeze", "collect", "freeze"]
    await known.stop()


async def test_an_observer_that_begins_with_filled_caches_sees_what_a_fresh_one_would():
    """Jobs, the GPUs that they hold, and Leases, which count as renewed now."""
    world, clock, key = World(), Clock(), (NAMESPACE, "one")
    held = {"launch": 1, "gpuType": "fast", "pool": "fast", "gpus": 1, "since": "2026-01-01T00:00:00Z"}
    held |= {"pods": ["one-1-0"], "nodes": ["n0"]}
    world.put(JOB, {**job("one"), "status": {"launches": 1, "allocation": held}})
    owner = {"kind": JOB.kind, "name": "one", "controller": True}
    owner |= {"uid": world.get(JOB, *key)["metadata"]["uid"]}
    named = {"namespace": NAMESPACE, "name": "one", "labels": {JOB_LABEL: "one"}, "ownerReferences": [owner]}
    world.put(LEASE, {"metadata": named, "spec": {"renewTime": "2026-01-01T00:00:00.000000Z"}})
    known = informers(FakeCluster(world))
    before = Observer(known.caches, clock=clocks.Clock(seconds=clock))
    await known.refresh()
    clock.now = 50.0
    after = Observer(known.caches, clock=clocks.Clock(seconds=clock))
    clock.now = 60.0
    seen, fresh = before.job(key), after.job(key)
    assert (seen.lease.quiet_seconds, fresh.lease.quiet_seconds) == (60.0, 10.0)
    assert dataclasses.replace(seen, lease=None) == dataclasses.replace(fresh, lease=None)
    taken = after.gpu_holders.allocations_on(["n0"])
    assert taken == before.gpu_holders.allocations_on(["n0"]) and taken.keys() == {key}
    await known.stop()


async def test_jobs_with_equal_specs_share_one_value_and_a_bad_name_is_refused_all_the_same():
    """A thousand runs of one experiment are decoded once; a change of one leaves the others."""
    world = World()
    for name in ("one", "two"):
        world.put(JOB, job(name))
    known = informers(FakeCluster(world))
    decoded = DecodedJobs(known.caches)
    await known.refresh()
    one, two = (known.caches[JOB].get((NAMESPACE, name)) for name in ("one", "two"))
    assert decoded.spec((NAMESPACE, "one"), one)[0] is decoded.spec((NAMESPACE, "two"), two)[0]
    changed = {**one, "metadata": {**one["metadata"], "generation": 2}}
    changed["spec"] = {**one["spec"], "totalSteps": 7}
    assert decoded.spec((NAMESPACE, "one"), changed)[0].config.total_steps == 7
    assert decoded.spec((NAMESPACE, "two"), two)[0].config.total_steps == 100
    bad = {**one, "metadata": {**one["metadata"], "name": "Bad_Name"}}
    spec, problem = decoded.spec((NAMESPACE, "Bad_Name"), bad)
    assert spec is None and "metadata.name" in problem
    await known.stop()


async def test_what_is_decoded_ahead_leaves_the_loop_to_others_and_is_not_decoded_again(monkeypatch):
    """A new leader of thousands of jobs renews its Lease meanwhile, and then asks for all of them at once."""
    world, turns = World(), itertools.count()
    for number in range(5):
        world.put(JOB, job(f"j{number}", totalSteps=number + 1))
    known = informers(FakeCluster(world))
    decoded = DecodedJobs(known.caches)
    await known.refresh()
    seconds = itertools.count(step=0.75 * decoded_jobs.SLICE_SECONDS)
    clock = types.SimpleNamespace(monotonic=lambda: next(seconds))
    monkeypatch.setattr(decoded_jobs, "time", clock)

    async def others() -> None:
        while True:
            next(turns)
            await asyncio.sleep(0)

    beside = asyncio.create_task(others())
    await decoded.catch_up()
    beside.cancel()
    assert next(turns) >= 5
    monkeypatch.setattr(decoded_jobs, "read_spec", None)
    found = [decoded.spec(key_of(item), item)[0] for item in known.caches[JOB]]
    assert sorted(spec.config.total_steps for spec in found) == [1, 2, 3, 4, 5]
    await known.stop()


@pytest.mark.parametrize("broken", [{"spec": {"totalSteps": "many"}}, {"status": {"launches": "many"}}])
async def test_a_job_that_cannot_be_read_does_not_end_the_decoding_of_others(broken):
    """The caller that asks for it is told; the next one is decoded."""
    world = World()
    world.put(JOB, {**job("broken"), **broken})
    world.put(JOB, job("one"))
    known = informers(FakeCluster(world))
    decoded = DecodedJobs(known.caches)
    decoding = asyncio.create_task(decoded.run())
    await known.refresh()
    await turn(lambda: (NAMESPACE, "one") in decoded._statuses)
    assert not decoding.done()
    decoding.cancel()
    await known.stop()
