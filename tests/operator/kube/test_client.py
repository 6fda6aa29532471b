"""The client: where a kubeconfig leads it, and what it makes of any answer, torn or nested."""

import asyncio
import concurrent.futures
import contextlib
import email.utils
import json
import os
import time
import types
import weakref
from pathlib import Path

import pytest
import yaml
from aiohttp import web
from ballast.client.connection import configuration as read_configuration
from ballast_operator.cli.main import main
from ballast_operator.errors import (
    Conflict,
    Expired,
    NotAllowed,
    NotFound,
    OperatorError,
    ServerInternalError,
    Unavailable,
    Unreachable,
)
from ballast_operator.kube import client as kube_client
from ballast_operator.kube.client import (
    IN_ONE_PIECE_SECONDS,
    METADATA,
    MOST_LEVELS,
    Cluster,
    connect,
    read_json,
    truncate_depth,
)
from ballast_operator.kube.kinds import JOB, LEASE
from ballast_operator.local_operator import api_client
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from kubernetes import config
from kubernetes.aio import client
from kubernetes.aio.config import ConfigException

from tests.support.servers import a_kubeconfig, served
from tests.support.waiting import WAIT_SECONDS

JSON, HTML = "application/json", "text/html"


@pytest.fixture
async def answering():
    """A cluster whose API server answers what the test says."""
    said = {}

    async def answer(request):
        return web.Response(status=said["status"], text=said["text"], content_type=said["type"])

    async with served(answer) as address:
        api = client.ApiClient(client.Configuration(host=address))
        async with Cluster(api, request_seconds=20.0) as cluster:

            def make(status, text, kind=JSON):
                said.update(status=status, text=text, type=kind)
                return cluster

            yield make


_FAILED = '{"message": "Internal error occurred: failed calling webhook \\"a\\": connection refused"}'
_DENIED = '{"message": "admission webhook \\"a\\" denied the request: not on Mondays"}'


@pytest.mark.parametrize(
    ("status", "text", "kind", "reading", "writing"),
    [
        (404, '{"message": "no such"}', JSON, NotFound, NotFound),
        (409, '{"message": "changed"}', JSON, Unavailable, Conflict),
        (410, '{"message": "too old"}', JSON, Expired, Expired),
        (403, '{"message": "exceeded quota"}', JSON, NotAllowed, NotAllowed),
        (429, "", JSON, Unavailable, Unavailable),
        (500, "[]", JSON, Unavailable, Unavailable),
        (500, _FAILED, JSON, ServerInternalError, ServerInternalError),
        (500, _DENIED, JSON, NotAllowed, NotAllowed),
        (502, "<html>Bad Gateway</html>", HTML, Unavailable, Unavailable),
        (503, "{torn", JSON, Unavailable, Unavailable),
        (504, "[" * 3000, JSON, Unavailable, Unavailable),
        (200, "<html>Sign in</html>", HTML, Unavailable, Unavailable),
        (200, '{"metadata": {', JSON, Unavailable, Unavailable),
    ],
)
async def test_an_answer_that_is_an_error_or_none(answering, status, text, kind, reading, writing):
    """Also one of a load balancer in between, and one that was cut off."""
    cluster = answering(status, text, kind)
    with pytest.raises(reading):
        await cluster.get(LEASE, "ns", "a")
    with pytest.raises(reading):
        await cluster.list(LEASE, namespace="ns")
    with pytest.raises(writing):
        await cluster.create(LEASE, {"metadata": {"namespace": "ns", "name": "a"}})


@pytest.mark.parametrize("text", ["{}", "[]", "1", "null", '{"metadata": 1}', '{"metadata": {}}'])
async def test_an_answer_to_a_write_that_is_no_object_is_none(answering, text):
    """It is tried again, and no mistake of the operator."""
    cluster, body = answering(200, text), {"metadata": {"namespace": "ns", "name": "a"}, "status": {"a": 1}}
    dropped = []
    cluster.on_dropped = lambda *told: dropped.append(told)
    for write in (cluster.create, cluster.apply, cluster.replace, cluster.write_status):
        with pytest.raises(Unavailable, match="no object"):
            await write(LEASE, body)
    with pytest.raises(Unavailable, match="no object"):
        await cluster.delete(LEASE, "ns", "a", uid="u")
    assert not dropped


@pytest.mark.parametrize(
    ("status", "text", "counted"),
    [
        (400, "bad", 1),
        (422, "invalid", 1),
        (403, "cannot patch resource", 0),
        (403, "exceeded quota", 0),
        (409, "changed", 0),
        (500, "", 0),
    ],
)
async def test_a_write_is_counted_that_would_never_succeed(answering, status, text, counted):
    """Not one that a person, a quota or time may let pass, and not what is only asked."""
    cluster = answering(status, f'{{"message": "{text}"}}')
    refused = []
    cluster.on_refused = refused.append
    body = {"metadata": {"namespace": "ns", "name": "a"}, "status": {}}
    for request in (cluster.write_status(LEASE, body), cluster.try_create(LEASE, body)):
        with pytest.raises(OperatorError):
            await request
    assert refused == [LEASE] * counted


async def test_each_answer_says_when_it_was_given(answering):
    """By the API server's clock, beside when it was asked for by this machine's."""
    cluster, said = answering(200, "{}"), []
    cluster.on_date = lambda date, asked: said.append((email.utils.parsedate_to_datetime(date), asked))
    before = time.time()
    await cluster.ask(LEASE, {})
    ((date, asked),) = said
    assert before <= asked and int(before) <= date.timestamp() <= time.time()


async def test_what_an_older_definition_drops_of_a_status_is_told(answering):
    """Without an error: the API server keeps the fields that it knows, at any depth."""
    kept = (
        '{"metadata": {"resourceVersion": "1"}, '
        '"status": {"state": "Running", "conditions": [{"type": "Ready"}], "of": {"b": 1}, "added": 1}}'
    )
    cluster, told = answering(200, kept), []
    cluster.on_dropped = lambda kind, fields: told.append((kind, fields))
    conditions = [{"type": "Ready", "reason": "Runs"}]
    status = {"state": "Running", "step": None, "conditions": conditions, "plan": {"id": "a"}}
    status["of"] = {"nvidia.com/gpu": 2, "b": 1}
    body = {"metadata": {"namespace": "n", "name": "a"}, "status": status}
    await cluster.write_status(JOB, body)
    assert told == [(JOB, ["status.conditions[].reason", "status.of.nvidia.com/gpu", "status.plan"])]
    without = cluster.dropped.without(JOB, status)
    plan = status.pop("plan")
    del conditions[0]["reason"], status["of"]["nvidia.com/gpu"]
    assert without == status
    await cluster.write_status(JOB, body)  # says nothing of the fields that are dropped
    assert len(told) == 1
    status["plan"] = plan
    answering(200, kept.replace('"added": 1', '"plan": {"id": "a"}'))
    for _ in range(2):
        await cluster.write_status(JOB, body)
    assert told[1:] == [(JOB, [])]


async def test_where_a_page_does_not_come_in_time_smaller_ones_are_asked_for(monkeypatch):
    """So that an operator starts at a slow API server, too. A refused connection is not asked again."""
    asked, fails = [], TimeoutError

    async def request(self, verb, kind, path, *, query, accept, times):
        first, limit = int(query.get("continue") or 0), int(query["limit"])
        asked.append(limit)
        if limit > 100:
            raise Unreachable(f"{verb} {path}") from fails()
        items = [{"metadata": {"name": f"job-{number}"}} for number in range(first, min(first + limit, 400))]
        more = str(first + limit) if first + limit < 400 else ""
        return {"metadata": {"resourceVersion": "1", "continue": more}, "items": items}

    monkeypatch.setattr(Cluster, "_request", request)
    async with Cluster(client.ApiClient(client.Configuration()), request_seconds=1.0) as cluster:
        items, _ = await cluster.list(JOB)
        assert len({item["metadata"]["name"] for item in items}) == len(items) == 400
        assert asked[:2] == [500, 125] and set(asked[2:]) == {31}
        del asked[:]
        await cluster.list(JOB)  # the next begins with pages that came, twice as large
        assert set(asked) == {62}
        fails = ConnectionRefusedError
        del asked[:]
        monkeypatch.setattr(cluster, "_page_sizes", {})
        for _ in range(2):  # nor does it say anything of the size of pages
            with pytest.raises(Unreachable):
                await cluster.list(JOB)
        assert asked == [500, 500]


async def test_a_list_whose_rest_has_expired_is_read_in_one_piece(monkeypatch):
    """A slow API server is asked for the last page after etcd has compacted what the first is of."""
    asked, in_time = [], True

    async def request(self, verb, kind, path, *, query, accept, times):
        asked.append((query.get("limit"), times))
        if "continue" in query:
            raise Expired("the provided continue parameter is too old")
        if "limit" not in query and not in_time:
            raise Unreachable(f"{verb} {path}") from TimeoutError()
        more = {"continue": "rest"} if "limit" in query else {}
        items = [{"metadata": {"name": name}} for name in ("a", "b")][: 1 if more else 2]
        return {"metadata": {"resourceVersion": "7", **more}, "items": items}

    monkeypatch.setattr(Cluster, "_request", request)
    async with Cluster(client.ApiClient(client.Configuration()), request_seconds=1.0) as cluster:
        with pytest.raises(Expired):
            await cluster.list(JOB)
        for _ in range(2):
            items, version = await cluster.list(JOB)
            assert [item["metadata"]["name"] for item in items] == ["a", "b"] and version == 7
        later = time.monotonic() + IN_ONE_PIECE_SECONDS
        with monkeypatch.context() as clock, pytest.raises(Expired):  # not for ever: it is much to hold
            clock.setattr(time, "monotonic", lambda: later)
            await cluster.list(JOB)
        in_time = False
        with pytest.raises(Unreachable):
            await cluster.list(JOB)
        with pytest.raises(Expired):
            await cluster.list(JOB)
    assert [limit for limit, _ in asked] == ["500", "500", None, None, "500", "500", None, "25", "25"]
    assert all((limit is None) == (times > 1) for limit, times in asked)


@pytest.mark.parametrize("asked_for", ["", METADATA])
async def test_of_a_page_that_was_read_only_the_pruned_objects_are_kept(monkeypatch, asked_for):
    """What the API server notes of who wrote which field is half of a job: of 5,000, 100 MiB as values."""
    notes = []

    async def request(self, verb, kind, path, *, query, accept, times):
        page = int(query.get("continue") or 0)
        assert accept == asked_for
        assert not any(note() is not None for note in notes[:-3])  # of the pages before the last
        managed = [Notes() for _ in range(3)]
        notes.extend(map(weakref.ref, managed))
        items = [
            {"metadata": {"name": f"job-{page}-{number}", "managedFields": fields}}
            for number, fields in enumerate(managed)
        ]
        return {"metadata": {"resourceVersion": "1", "continue": "123"[page : page + 1]}, "items": items}

    class Notes(list):
        pass

    monkeypatch.setattr(Cluster, "_request", request)
    async with Cluster(client.ApiClient(client.Configuration()), request_seconds=1.0) as cluster:
        items, _ = await cluster.list(JOB, accept=asked_for)
    assert len(items) == len(notes) == 12 and all(set(item["metadata"]) == {"name"} for item in items)


class NoThreads(concurrent.futures.ThreadPoolExecutor):
    """Refuses all work."""

    def submit(self, *_, **__):
        raise AssertionError("a request waits for a thread")


def kubeconfig(folder, address, user=None, **cluster):
    return a_kubeconfig(folder / "kubeconfig", address, user or {"token": "secret"}, **cluster)


@pytest.fixture
async def server():
    """(address, URLs that were asked for) of an API server, or of a proxy before it."""
    asked = []

    async def answer(request):
        asked.append(request.raw_path)
        return web.json_response({"metadata": {"name": "x"}})

    async with served(answer) as address:
        yield address, asked


@pytest.fixture(autouse=True)
def no_proxies(monkeypatch):
    for name in ("http_proxy", "https_proxy", "all_proxy", "no_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)


async def test_a_request_waits_for_no_thread(tmp_path, server):
    """Decisions are computed in threads: what waits for another one waits for them, too."""
    address, asked = server
    async with await connect(kubeconfig(tmp_path, address)) as cluster:
        asyncio.get_running_loop().set_default_executor(NoThreads())
        await cluster.get(LEASE, "ns", "x")
    assert len(asked) == 1


@pytest.mark.parametrize("of_kubeconfig", [False, True])
async def test_a_proxy_before_the_api_server(tmp_path, server, monkeypatch, of_kubeconfig):
    """The one that the kubeconfig names, else that of the environment."""
    address, asked = server
    of_environment = address.removeprefix("http://")  # curl's way to write it, too
    monkeypatch.setenv("http_proxy", "http://nowhere.invalid:1" if of_kubeconfig else of_environment)
    named = {"proxy-url": address} if of_kubeconfig else {}
    async with await connect(kubeconfig(tmp_path, "http://api.invalid:80", **named)) as cluster:
        await cluster.get(LEASE, "ns", "x")
    (url,) = asked
    assert url.startswith("http://api.invalid")


@pytest.mark.parametrize(
    ("host", "without"),
    [("0.0.0.0", "0.0.0.0"), ("0.0.0.0", "::/0, .svc, 0.1.2.3/8"), ("127.0.0.1", ""), ("localhost", "")],
    ids=["address", "networks", "this machine", "by name"],
)
async def test_an_address_that_needs_no_proxy(tmp_path, server, monkeypatch, host, without):
    """``NO_PROXY`` is heard, and the machine itself needs none, as Kubernetes' own programs do."""
    address, asked = server
    monkeypatch.setenv("http_proxy", "http://nowhere.invalid:1")
    monkeypatch.setenv("no_proxy", without)
    file = kubeconfig(tmp_path, address.replace("127.0.0.1", host))
    async with await connect(file) as cluster:
        await cluster.get(LEASE, "ns", "x")
    assert len(asked) == 1
    assert host == "0.0.0.0" or api_client(Path(file)).configuration.proxy is None


MERGES = "a: &n0 {a: 1}\n" + "".join(f"b{i}: &n{i + 1} {{<<: [*n{i}, *n{i}]}}\n" for i in range(60))


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b"[" * 3000, "maximum recursion depth"),
        (b"- a", "it has no clusters"),
        (b"contexts: 3", "it has no clusters"),
        (b"\xff\xfe\xff", "can't decode"),
        (b" " * (2**23 + 1), "more than 8 MiB"),
        (MERGES.encode(), "more than 10000 keys"),
    ],
    ids=["deep", "list", "number", "bytes", "large", "merges"],
)
async def test_what_is_no_kubeconfig_is_refused_in_words(tmp_path, text, reason):
    """By commands, and by the demo, which uses another client."""
    (tmp_path / "file").write_bytes(text)
    with pytest.raises(ConfigException, match=f"file is not a kubeconfig: .*{reason}"):
        await connect(str(tmp_path / "file"))
    with pytest.raises(config.ConfigException, match=f"file is not a kubeconfig: .*{reason}"):
        api_client(tmp_path / "file")


def test_a_user_without_a_home_is_asked_for_a_kubeconfig(monkeypatch):
    """A container's, whom no list of users has."""
    for variable in ("HOME", "KUBECONFIG", "XDG_STATE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)
    done = CliRunner().invoke(main, ["jobs"])
    assert done.exit_code == 1 and "Error: there is no kubeconfig: ~/.kube/config" in done.stderr


async def test_a_kubeconfig_may_come_from_a_pipe(tmp_path, server):
    """As of a shell's ``<(...)``: it is read once."""
    address, asked = server
    read, write = os.pipe()
    os.write(write, Path(kubeconfig(tmp_path, address)).read_bytes())  # noqa: ASYNC240
    os.close(write)
    async with await connect(f"/dev/fd/{read}") as cluster:
        await cluster.get(LEASE, "ns", "x")
    os.close(read)
    assert len(asked) == 1


async def test_of_several_files_the_first_current_context_is_used(tmp_path, server, monkeypatch):
    """As kubectl does; the client's loader has the last. They are those that the environment names now."""
    address, asked = server
    (tmp_path / "other").write_text("current-context: b")
    files = [str(tmp_path / "none"), kubeconfig(tmp_path, address), str(tmp_path / "other")]
    monkeypatch.setenv("KUBECONFIG", os.pathsep.join(files))
    async with await connect() as cluster:
        await cluster.get(LEASE, "ns", "x")
    assert len(asked) == 1


class Guarded:
    """An API server that knows one token at a time."""

    def __init__(self):
        self.token, self.asked = "first", 0

    async def answer(self, request):
        self.asked += 1
        if "Authorization" not in request.headers:  # as most API servers answer system:anonymous
            return web.json_response({"message": "forbidden"}, status=403)
        if request.headers["Authorization"] != f"Bearer {self.token}":
            return web.json_response({"message": "Unauthorized"}, status=401)
        return web.json_response({"metadata": {"name": "x"}})

    def serving(self):
        """Its address, as a context manager."""
        return served(self.answer)


async def answered_in_the_end(cluster):
    async with asyncio.timeout(WAIT_SECONDS):
        while True:
            with contextlib.suppress(Unavailable):
                return await cluster.get(LEASE, "ns", "x")
            await asyncio.sleep(0.05)


@pytest.mark.parametrize("kind", ["token", "tokenFile", "exec"])
async def test_a_token_that_ran_out_is_read_again(tmp_path, caplog, kind):
    """Wherever it comes from: a cloud's plugin makes one for minutes, and nobody restarts an operator.

    Where there is none for a while, nobody in particular would be forbidden everything from then on.
    """
    server, token = Guarded(), tmp_path / "token"

    def put(text):
        token.write_text(text)
        made = {"apiVersion": "client.authentication.k8s.io/v1", "kind": "ExecCredential"}
        made["status"] = {"token": text}
        (tmp_path / "made.json").write_text(json.dumps(made if text else {}))
        users = {
            "token": {"token": text},
            "tokenFile": {"tokenFile": str(token)},
            "exec": {
                "exec": {
                    "apiVersion": "client.authentication.k8s.io/v1",
                    "command": "cat",
                    "args": [str(tmp_path / "made.json")],
                    "interactiveMode": "Never",
                }
            },
        }
        return kubeconfig(tmp_path, address, users[kind])

    async with server.serving() as address, await connect(put("first")) as cluster:
        await cluster.get(LEASE, "ns", "x")
        server.token = "second"
        put("")
        async with asyncio.timeout(WAIT_SECONDS):
            while "has no credentials now" not in caplog.text:
                with pytest.raises(Unavailable, match="401"):
                    await cluster.get(LEASE, "ns", "x")
        put("second")
        assert await answered_in_the_end(cluster) == {"metadata": {"name": "x"}}


async def test_another_current_context_is_for_who_connects_later(tmp_path):
    """`kubectl config use-context` hands nobody's jobs, and no token, to another cluster."""
    server, other = Guarded(), Guarded()
    async with (
        server.serving() as address,
        other.serving() as elsewhere,
        await connect(path := kubeconfig(tmp_path, address, {"token": "first"})) as cluster,
    ):
        await cluster.get(LEASE, "ns", "x")
        server.token = "second"
        file = Path(kubeconfig(tmp_path, address, {"token": "second"}))
        content = yaml.safe_load(file.read_text())  # noqa: ASYNC240
        content["current-context"] = "b"
        content["contexts"].append({"name": "b", "context": {"cluster": "b", "user": "b"}})
        content["clusters"].append({"name": "b", "cluster": {"server": elsewhere}})
        content["users"].append({"name": "b", "user": {"token": "other"}})
        file.write_text(yaml.safe_dump(content))  # noqa: ASYNC240
        await answered_in_the_end(cluster)
        assert other.asked == 0
        async with await connect(path) as later:
            with pytest.raises(Unavailable):
                await later.get(LEASE, "ns", "x")
        assert other.asked == 1


async def test_credentials_are_read_seldom_where_that_does_not_help(tmp_path, monkeypatch):
    """Though other requests are answered, as by an API server that is slow."""
    server, clock, read = Guarded(), [0.0], []
    stub = types.SimpleNamespace(monotonic=lambda: clock[0], time=time.time)
    monkeypatch.setattr(kube_client, "time", stub)
    async with server.serving() as address:
        path = kubeconfig(tmp_path, address, {"token": "first"})

        async def read_again(before):
            read.append(clock[0])
            return before

        api = client.ApiClient(await read_configuration(path))
        async with Cluster(api, request_seconds=10.0, read_again=read_again) as cluster:
            for _ in range(120):
                clock[0] += 0.5
                for server.token in ("second", "first"):
                    with contextlib.suppress(Unavailable):
                        await cluster.get(LEASE, "ns", "x")
    assert read[0] == 0.5 and len(read) <= 7, read


async def test_an_api_server_that_has_moved_is_found_by_the_changed_kubeconfig(tmp_path):
    server = Guarded()
    async with contextlib.AsyncExitStack() as left:
        async with server.serving() as address:
            path = kubeconfig(tmp_path, address, {"token": "first"})
            cluster = await left.enter_async_context(await connect(path))
            await cluster.get(LEASE, "ns", "x")
        with pytest.raises(Unreachable):
            await cluster.get(LEASE, "ns", "x")
        address = await left.enter_async_context(server.serving())
        kubeconfig(tmp_path, address, {"token": "first"})
        assert await answered_in_the_end(cluster) == {"metadata": {"name": "x"}}


@pytest.mark.parametrize(
    ("meanwhile", "told"), [("gone", "cannot be read"), ("its plugin hangs", "plugin has not ended")]
)
async def test_a_kubeconfig_that_cannot_be_used_meanwhile_is_told_of(
    tmp_path, caplog, monkeypatch, meanwhile, told
):
    """And used once it can be."""
    monkeypatch.setattr(kube_client, "LONGEST_PAUSE_SECONDS", 0.2)
    server = Guarded()
    async with (
        server.serving() as address,
        await connect(path := kubeconfig(tmp_path, address, {"token": "first"})) as cluster,
    ):
        server.token = "second"
        if meanwhile == "gone":
            Path(path).unlink()  # noqa: ASYNC240
        else:
            waits = {"apiVersion": "client.authentication.k8s.io/v1", "command": "sleep", "args": ["1000"]}
            kubeconfig(tmp_path, address, {"exec": waits})
        async with asyncio.timeout(WAIT_SECONDS):
            while told not in caplog.text:
                with pytest.raises(Unavailable):
                    await cluster.get(LEASE, "ns", "x")
        kubeconfig(tmp_path, address, {"token": "second"})
        await answered_in_the_end(cluster)


DEEP = 9_000
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
)


def nested(levels, inside="1"):
    """JSON text, objects and lists in turns, with brackets in a key and in a value."""
    half = levels // 2
    return '{"]{\\"":[' * half + inside + "]}" * half


def depth(value):
    levels = 0
    while isinstance(value, dict | list):
        value, levels = next(iter(value.values() if isinstance(value, dict) else value)), levels + 1
    return levels


@pytest.mark.slow
@given(VALUES)
def test_a_value_of_usual_depth_is_as_it_was(value):
    assert read_json(json.dumps(value).encode()) == value


@pytest.mark.parametrize("levels", [MOST_LEVELS, MOST_LEVELS + 2, DEEP])
def test_a_deep_value_is_cut_and_its_neighbours_are_whole(levels):
    """Before Python 3.14 `json.loads` gives up on the whole text."""
    text = f'{{"items": [{{"name": "a"}}, {nested(levels)}, {{"name": "b"}}]}}'
    first, deep, last = read_json(text.encode())["items"]
    assert (first, last) == ({"name": "a"}, {"name": "b"})
    assert depth(deep) == MOST_LEVELS - 2


def test_what_is_no_json_stays_so():
    """A torn answer is an error as before."""
    with pytest.raises(ValueError, match="Expecting"):
        read_json(nested(DEEP)[: DEEP // 2].encode())
    assert truncate_depth("]" * 300) == "]" * 300
