"""Watches that bring anything but events: the operator goes on, the others are served, and it converges."""

import asyncio
import json
import time
import types

import pytest
from aiohttp import web
from ballast_operator.app import fence_of_term, stale_streams
from ballast_operator.errors import LeaseLapsed
from ballast_operator.kube import caches, informers, reflector
from ballast_operator.kube.caches import WATCHED, Caches
from ballast_operator.kube.informers import Informers
from ballast_operator.kube.kinds import JOB, LEASE, NODE, POD, POLICY
from ballast_operator.kube.reflector import Reflector
from ballast_operator.metrics import Metrics
from ballast_operator.settings import ApiSettings
from ballast_operator.waits import Waits

from tests.operator.kube.enemy_server import GONE, EnemyServer
from tests.support.examples import first_daily
from tests.support.waiting import WAIT_SECONDS

pytestmark = pytest.mark.slow

NEVER = 86_400.0
"""Seconds between two lists: what is known has to come from the watches."""


@pytest.fixture
async def server(monkeypatch):
    monkeypatch.setattr(informers, "FIRST_RESYNC_SECONDS", NEVER)
    monkeypatch.setattr(reflector, "FIRST_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(caches, "DOUBT_SECONDS", 0.05)
    async with EnemyServer() as server:
        for kind in WATCHED:
            server.put(kind, "first")
        yield server


@pytest.fixture
async def known(server):
    """What the operator's informers know, by watches alone."""
    async with Running(server) as known:
        yield known


class Running:
    def __init__(self, server, *, resync=NEVER):
        self.metrics = Metrics()
        settings = ApiSettings(resync_seconds=resync, request_seconds=20.0)
        self.informers = Informers(
            server.cluster, namespace="", settings=settings, metrics=self.metrics, waits=Waits()
        )

    async def __aenter__(self):
        await self.informers.refresh()
        return self.informers

    async def __aexit__(self, *_):
        await self.informers.stop()


async def until(look):
    """Let the loop turn until the condition holds."""
    async with asyncio.timeout(WAIT_SECONDS):
        while not look():  # noqa: ASYNC110 - looks at the server and at the caches
            await asyncio.sleep(0.005)


def versions(known, kind):
    return {item["metadata"]["name"]: item["metadata"]["resourceVersion"] for item in known.caches[kind]}


def agrees(known, server, kind):
    return versions(known, kind) == server.names(kind)


def restarts(known):
    return known.metrics.task_restarts.labels("watch")._value.get()


def pod(version, **more):
    metadata = {"name": "x", "namespace": "ns", "uid": "x", "resourceVersion": version, **more}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata}


def sends(data):
    async def act(stream):
        await stream.send(data)

    return act


def tells(event, item):
    async def act(stream):
        await stream.event(event, item)
        await asyncio.sleep(WAIT_SECONDS)

    return act


def refuses(status, text="", **headers):
    async def act(stream):
        await stream.refuse(status, text, headers)

    return act


async def resets_in_a_line(stream):
    await stream.send(b'{"type": "ADDED", "object": {"metadata": {"na')
    await stream.reset()


async def resets_at_once(stream):
    await stream.reset()


async def never_ends_a_line(stream):
    with_spaces = b" " * 2**20
    while True:
        await stream.send(with_spaces)


ACTS = {
    "a page": sends(b"<html>Bad gateway</html>\n"),
    "no text": sends(b"\xff\xfe\x00\n" * 3),
    "half a line, then the end": sends(b'{"type": "ADDED", "object": {"kind": "Po'),
    "half a line, then a reset": resets_in_a_line,
    "a reset": resets_at_once,
    "the end at once": sends(b""),
    "null": sends(b"null\n"),
    "a list": sends(b"[1, 2]\n"),
    "no object": sends(b'{"type": "ADDED"}\n'),
    "no type": sends(json.dumps({"object": pod("7")}).encode() + b"\n"),
    "nesting": sends(b"[" * 100_000 + b"\n"),
    "nesting that ends": sends(b'{"type":"ADDED","object":' + b"[" * 5000 + b"]" * 5000 + b"}\n"),
    "a line without end": never_ends_a_line,
    "410": tells("ERROR", GONE),
    "ERROR 500": tells("ERROR", {**GONE, "code": 500}),
    "ERROR 429": tells("ERROR", {**GONE, "code": 429}),
    "ERROR without a code": tells("ERROR", {"kind": "Status", "metadata": {}}),
    "ERROR that is a text": tells("ERROR", "etcdserver: request timed out"),
    "ERROR of nothing": tells("ERROR", None),
    "another type": tells("RENAMED", pod("7")),
    "a type that is a list": tells(["ADDED"], pod("7")),
    "no metadata": tells("ADDED", {"kind": "Pod"}),
    "metadata that are a list": tells("MODIFIED", {"kind": "Pod", "metadata": []}),
    "no name": tells("ADDED", {**pod("7"), "metadata": {"resourceVersion": "7"}}),
    "a name that is a list": tells("ADDED", pod("107", name=["x"])),
    "labels that are a list": tells("ADDED", pod("107", labels=["x"])),
    "a version that is a word": tells("ADDED", pod("new")),
    "a version that is no text": tells("ADDED", pod(1e300)),
    "no version": tells("DELETED", pod(None)),
    "a negative version": tells("ADDED", pod("-7")),
    "a version in other digits": tells("ADDED", pod("١٠٩")),
    "a version of 5,000 digits": tells("ADDED", pod("9" * 5000)),
    "a job": tells("ADDED", {**pod("109"), "kind": "TrainingJob"}),
    "a bookmark that is a word": tells("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "x"}}),
    "a bookmark of nothing": tells("BOOKMARK", {"kind": "Pod"}),
    **{
        f"{code}": refuses(code) for code in (400, 401, 403, 404, 408, 409, 410, 422, 429, 500, 502, 503, 504)
    },
    "429 until tomorrow": refuses(429, "{}", **{"Retry-After": "86400"}),
    "429 until a date": refuses(429, "{}", **{"Retry-After": "Wed, 21 Oct 2099 07:28:00 GMT"}),
    "503 with a torn body": refuses(503, '{"kind": "Status", "mess'),
    "403 that is no text": refuses(403, "[" * 3000),
    "200 and a page": refuses(200, "<html>Sign in</html>"),
    "204": refuses(204),
}


@pytest.mark.parametrize("act", first_daily(ACTS.values(), 20), ids=ACTS.keys())
async def test_what_a_watch_brings_instead_of_events_costs_no_event_and_no_other_watch(server, act):
    """What changes meanwhile is known, without a list of everything; the watches of other kinds stay open."""
    server.acts[POD].extend([act] * 3)
    async with Running(server) as known:
        await until(lambda: not server.acts[POD])
        server.put(POD, "second")
        server.delete(POD, "first")
        server.put(JOB, "second")
        await until(lambda: agrees(known, server, POD) and agrees(known, server, JOB))
        await until(lambda: all(server.watches[kind] for kind in WATCHED))
        assert restarts(known) == 0
        assert [server.watches[kind] for kind in WATCHED if kind is not POD] == [1] * (len(WATCHED) - 1)
        assert not stale_streams(known.caches, stale_seconds=0, now=time.monotonic())


def line(event, item):
    return json.dumps({"type": event, "object": item}).encode() + b"\n"


@pytest.mark.parametrize("size", [7, 301, 2**20])
async def test_events_are_taken_in_order_however_they_are_torn(server, size):
    """Also one that is nested far more deeply than a decoder goes, and the ones after it."""
    deep = line("ADDED", pod("903", name="deep", uid="deep", annotations={}))
    deep = deep.replace(b'"annotations": {}', b'"annotations": ' + b'{"a":' * 9_000 + b"1" + b"}" * 9_000)
    events = [("ADDED", "a", "901"), ("ADDED", "b", "902"), ("MODIFIED", "a", "904"), ("DELETED", "b", "905")]
    lines = [line(event, pod(version, name=name, uid=name)) for event, name, version in events]
    text = b"".join([*lines[:2], deep, *lines[2:]])

    async def in_pieces(stream):
        for start in range(0, len(text), size):
            await stream.send(text[start : start + size])
        await asyncio.sleep(WAIT_SECONDS)

    server.acts[POD].extend([ACTS["the end at once"], in_pieces])
    async with Running(server) as known:
        await until(lambda: versions(known, POD) == {**server.names(POD), "a": "904", "deep": "903"})
        assert restarts(known) == 0


async def test_a_watch_goes_on_from_the_last_bookmark(server):
    """Nothing is listed again, and no event is told twice."""
    since = []

    async def marks(stream):
        since.append(stream.since)
        await stream.event("BOOKMARK", {"kind": "Pod", "metadata": {"resourceVersion": "950"}})

    async def ends(stream):
        since.append(stream.since)

    server.acts[POD].extend([marks, ends])
    async with Running(server):
        await until(lambda: len(since) == 2)
        assert since == [server.version, 950]
        assert server.lists[POD] == 1


async def test_an_object_that_the_caches_cannot_take_hides_no_other(server, known):
    """What fails on one of them has heard of the next."""
    heard = []

    def listener(kind, old, new):
        heard.append(new["metadata"]["name"])
        if heard[-1] == "bad":
            raise RuntimeError("not understood")

    await until(lambda: server.watches[POD])
    known.caches.store_listeners.append(listener)
    server.put(POD, "bad")
    server.put(POD, "good")
    await until(lambda: heard == ["bad", "good"])
    assert restarts(known) == 0


async def test_events_out_of_order_and_twice_leave_the_newest(server, known):
    """An old event undoes nothing."""
    await until(lambda: server.watches[POD])
    old = server.put(POD, "first", status={"phase": "Pending"})
    new = server.put(POD, "first", status={"phase": "Running"})
    for item in (old, new, old, old):
        server.version += 1
        server.tell(POD, "MODIFIED", item)
    server.put(POD, "last")
    await until(lambda: known.caches[POD].get(("ns", "last")))
    assert known.caches[POD].get(("ns", "first"))["status"]["phase"] == "Running"


async def test_an_object_that_leaves_a_selector_and_comes_back_is_known_again(server, known):
    """A label of a Lease was removed by hand, and set again: the watch says DELETED and ADDED."""
    await until(lambda: server.watches[LEASE])
    lease = server.items(LEASE)[0]
    server.version += 1
    left = {**lease, "metadata": {**lease["metadata"], "resourceVersion": str(server.version)}}
    server.tell(LEASE, "DELETED", left)
    await until(lambda: known.caches[LEASE].get(("ns", "first")) is None)
    server.put(LEASE, "first")
    await until(lambda: agrees(known, server, LEASE))


async def test_what_a_watch_has_said_wrongly_is_put_right_by_the_next_lists(server, monkeypatch):
    """Gone though it is there; there though it is gone; far newer than anything can be."""
    monkeypatch.setattr(informers, "FIRST_RESYNC_SECONDS", 0.05)
    async with Running(server, resync=0.05) as known:
        await until(lambda: server.watches[POD] and server.watches[NODE])
        wrong = server.items(POD)[0]
        server.tell(POD, "ADDED", {**pod(str(server.version + 1)), "status": {"phase": "Running"}})
        server.version += 1
        server.tell(POD, "DELETED", wrong)
        server.version += 1
        node = server.items(NODE)[0]
        server.tell(
            NODE, "MODIFIED", {**node, "metadata": {**node["metadata"], "resourceVersion": str(10**17)}}
        )
        await until(lambda: known.caches.last_event.get(NODE))
        server.put(NODE, "first", spec={"unschedulable": True})
        server.put(NODE, "second")
        await until(lambda: agrees(known, server, POD) and agrees(known, server, NODE))


@pytest.mark.parametrize("notices", ["a watch", "a list"])
async def test_a_storage_that_is_set_back_to_a_backup_is_watched_from_the_first_list_on(server, notices):
    """Watches that go on from its future hear nothing."""
    is_back = asyncio.Event()

    async def until_it_is_back(stream):
        await is_back.wait()
        await stream.event("ERROR", GONE)

    if notices == "a watch":
        server.acts[POD].append(until_it_is_back)
    async with Running(server) as known:
        await until(lambda: all(server.watches[kind] for kind in WATCHED))
        restore = server.backup()
        server.put(JOB, "first", spec={"suspend": True})
        server.put(JOB, "second")
        server.put(LEASE, "first", spec={"holderIdentity": "a"})
        await until(lambda: agrees(known, server, JOB) and agrees(known, server, LEASE))
        known.caches.watched(POD, "DELETED", pod(str(server.version), name="first", uid=uid_of(server, POD)))
        restore()
        is_back.set()
        if notices == "a list":
            while await informers.resync(known.caches, server.cluster, "", Waits()):  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        await until(lambda: all(agrees(known, server, kind) for kind in (JOB, LEASE, POD)))
        server.put(LEASE, "first", spec={"holderIdentity": "b"})
        await until(lambda: agrees(known, server, LEASE))


async def test_nothing_of_the_time_after_a_backup_is_written_over_what_it_restored(server):
    """Not even by the first who hears of a restored object; a replica that leads from then on writes."""
    leadership = types.SimpleNamespace(check=lambda: None)
    refused = []

    async with Running(server) as known:
        await until(lambda: all(server.watches[kind] for kind in WATCHED))
        check = fence_of_term(leadership, known.caches)
        restore = server.backup()
        server.put(JOB, "first", spec={"suspend": True})
        server.put(JOB, "second")
        await until(lambda: agrees(known, server, JOB))
        check()
        restore()

        def hears(*_):
            with pytest.raises(LeaseLapsed, match="storage was set back"):
                check()
            refused.append(True)

        known.caches.store_listeners.append(hears)
        while await informers.resync(known.caches, server.cluster, "", Waits()):  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        await until(lambda: agrees(known, server, JOB))
        assert refused
        fence_of_term(leadership, known.caches)()


async def test_lists_of_a_replica_that_lags_behind_set_nothing_back(server, monkeypatch):
    """Behind a load balancer: among lists of another that does not, and while watches bring newer ones."""
    now = 0.0
    monkeypatch.setattr(caches, "DOUBT_SECONDS", 10.0)
    monkeypatch.setattr(caches, "time", types.SimpleNamespace(monotonic=lambda: now))
    empty = {"kind": "List", "metadata": {"resourceVersion": "0"}, "items": []}
    async with Running(server) as known:
        await until(lambda: all(server.watches[kind] for kind in WATCHED))
        behind = [server.list_of(JOB) for _ in range(6)]
        server.put(JOB, "second")
        server.delete(JOB, "first")
        for caught_up in (True,) * 3 + (False,) * 3:
            if not caught_up:
                server.put(JOB, "second")
            await until(lambda: agrees(known, server, JOB))
            for answer in [behind.pop(), web.json_response(empty)][: 1 + caught_up]:
                server.list_acts[JOB].append(answer)
                failed = await informers.resync(known.caches, server.cluster, "", Waits())
                assert "older than what is known" in failed[JOB]
                now += 6.0
            assert not caught_up or not await informers.resync(known.caches, server.cluster, "", Waits())
        assert agrees(known, server, JOB) and not known.caches.set_back.is_set()
        assert [server.watches[kind] for kind in WATCHED] == [1] * len(WATCHED)


def uid_of(server, kind):
    return server.items(kind)[0]["metadata"]["uid"]


async def test_definitions_that_are_deleted_and_come_back_are_watched_again(server):
    """The kind is not served for a while: others are watched all the time, it is once it is there again.

    What its old definition has dropped of a status is written again at once: the new one may keep it.
    """
    async with Running(server) as known:
        status, dropped = {"allocation": 1}, server.cluster.dropped
        for kind in (JOB, POLICY):
            await until(lambda kind=kind: server.watches[kind])
            server.put(kind, "told")
            await until(lambda kind=kind: agrees(known, server, kind))
            dropped.learn(kind, status, {})
            assert dropped.without(kind, status) == {}
        server.missing.add(JOB)
        for _ in range(3):
            server.version += 1
            server.tell(JOB, "ERROR", {**GONE, "code": 410})
        server.put(POD, "second")
        await until(lambda: agrees(known, server, POD))
        server.missing.discard(JOB)
        server.put(JOB, "second")
        await until(lambda: agrees(known, server, JOB) and dropped.without(JOB, status) == status)
        assert server.watches[POD] == 1 and dropped.without(POLICY, status) == {}


async def test_a_watch_that_ends_at_once_is_asked_for_less_and_less_often(server):
    """An API server that accepts watches and drops them is not flooded."""
    pauses = []

    async def noted(seconds):
        pauses.append(seconds)

    server.acts[POD].extend([ACTS["the end at once"]] * 8)
    caches = Caches()
    running = asyncio.create_task(Reflector(caches, server.cluster, POD, "", sleep=noted).run())
    await until(lambda: not server.acts[POD])
    server.put(POD, "second")
    await until(lambda: caches[POD].get(("ns", "second")))
    running.cancel()
    assert pauses[:8] == [reflector.FIRST_PAUSE_SECONDS * 2**number for number in range(8)]


@pytest.mark.parametrize(
    "answer",
    [
        {"status": 404},
        {"status": 429, "headers": {"Retry-After": "86400"}},
        {"status": 500, "text": "[" * 3000},
        {"text": "<html>Sign in</html>"},
        {"text": "null"},
        {"text": '{"items": []}'},
        {"text": '{"items": {}, "metadata": {"resourceVersion": "200"}}'},
        {"text": '{"items": [], "metadata": {"resourceVersion": "latest"}}'},
        {"text": '{"items": [7, null, {}, {"metadata": []}], "metadata": {"resourceVersion": "100"}}'},
    ],
    ids=str,
)
async def test_what_is_answered_as_the_list_before_a_watch_costs_no_event_and_no_other_watch(server, answer):
    """It is asked for again; of a list with what is no object, the others are taken."""
    answers_wait = asyncio.Event()

    async def expires(stream):
        await answers_wait.wait()
        await ACTS["410"](stream)

    server.acts[POD].append(expires)
    async with Running(server) as known:
        server.list_acts[POD].extend(web.Response(**answer) for _ in range(3))
        answers_wait.set()
        await until(
            lambda: not server.list_acts[POD] or (not answer.get("status") and server.watches[POD] > 1)
        )
        server.put(POD, "second")
        server.delete(POD, "first")
        await until(lambda: agrees(known, server, POD))
        await until(lambda: all(server.watches[kind] for kind in WATCHED))
        assert restarts(known) == 0
        assert [server.watches[kind] for kind in WATCHED if kind is not POD] == [1] * (len(WATCHED) - 1)
