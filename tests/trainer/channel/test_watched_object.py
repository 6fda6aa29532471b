"""An object is followed by a watch: no request a read, and no state of the watch that hides a change."""

import contextlib
import http.server
import json
import queue
import threading
import urllib.parse

import pytest
from ballast_trainer.channel.api_server import ApiServer
from ballast_trainer.channel.base import ChannelError
from ballast_trainer.channel.kubernetes import CHECK_SECONDS, WatchedObject

from tests.support.waiting import WAIT_SECONDS, eventually

COLLECTION, NAME = "/api/v1/namespaces/team/configmaps", "a-plan"
END = None


class Server(http.server.ThreadingHTTPServer):
    """One object over HTTP, with watches that the test speaks through."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.item = None
        self.gets = 0
        self.refuse_watch = 0
        self.down = False
        self.watches = []

    def set(self, version, *, tell=True):
        """A new version of the object; ``tell``: to those who watch."""
        self.item = {"metadata": {"resourceVersion": str(version)}, "data": {"version": str(version)}}
        if tell:
            self.send({"type": "MODIFIED", "object": self.item})

    def send(self, event):
        """To all watches: one that was replaced may have reached the server last."""
        for _, events in self.watches:
            events.put(event)


class Handler(http.server.BaseHTTPRequestHandler):
    """Get and watch."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """The object, or a watch of it."""
        path, _, query = self.path.partition("?")
        if self.server.down:
            self._answer(503, {"message": "try later"})
        elif query and self.server.refuse_watch:
            self._answer(self.server.refuse_watch, {"message": "no"})
        elif query:
            self._watch(urllib.parse.parse_qs(query))
        else:
            self.server.gets += 1
            assert path == f"{COLLECTION}/{NAME}"
            self._answer(404 if self.server.item is None else 200, self.server.item)

    def _answer(self, status, value):
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _watch(self, query):
        events = queue.Queue()
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        self.server.watches.append((query, events))
        self.close_connection = True
        with contextlib.suppress(OSError):
            while (event := events.get(timeout=WAIT_SECONDS)) is not END:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args):
        """Silent."""


class Clock:
    """Seconds that pass when the test says so."""

    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def server():
    made = Server()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    made.set(1)
    yield made
    made.send(END)
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watched(server, clock):
    api = ApiServer(f"http://127.0.0.1:{server.server_port}", None, None, "secret")
    made = WatchedObject(api, COLLECTION, NAME, clock=clock)
    yield made
    made.close()
    api.close()


def version(watched):
    item = watched.newest()
    return item and item["data"]["version"]


def runs(watched, clock, server):
    """Read until reads cost no request: a watch runs."""

    def free():
        before = server.gets
        watched.newest()
        if server.gets == before:
            return True
        clock.now += 1.0
        return False

    eventually(free, "a watch that runs")


def test_a_change_is_seen_without_a_request(server, watched, clock):
    """Any number of reads, one watch of this object alone, from the version that was read."""
    assert version(watched) == "1"
    runs(watched, clock, server)
    before = server.gets
    for number in range(2, 6):
        server.set(number)
        eventually(lambda number=number: version(watched) == str(number), "the change")
    assert server.gets == before
    query, _ = server.watches[-1]
    assert query["fieldSelector"] == [f"metadata.name={NAME}"]
    assert query["resourceVersion"] == ["1"]


@pytest.mark.parametrize(
    "last",
    [END, {"type": "ERROR", "object": {"kind": "Status", "code": 410}}, {"type": "BOOKMARK"}, {"type": 3}],
    ids=["ended", "410", "unasked", "broken"],
)
def test_a_watch_that_is_over_is_replaced(server, watched, clock, last):
    """What changed in between is read; later changes come through the new watch."""
    runs(watched, clock, server)
    first = len(server.watches)
    server.set(2, tell=False)
    server.send(last)
    eventually(lambda: version(watched) == "2", "the change that no watch told of")
    runs(watched, clock, server)
    assert len(server.watches) > first
    server.set(3)
    eventually(lambda: version(watched) == "3", "the change after it")


def test_a_silent_watch_hides_nothing_for_long(server, watched, clock):
    """The connection is open, the server tells nothing: a check finds the change, and watches again."""
    runs(watched, clock, server)
    first = len(server.watches)
    server.set(2, tell=False)
    assert version(watched) == "1"
    clock.now += CHECK_SECONDS
    assert version(watched) == "2"
    eventually(lambda: len(server.watches) > first, "another watch")
    runs(watched, clock, server)
    server.set(3)
    eventually(lambda: version(watched) == "3", "the change after it")


@pytest.mark.parametrize("status", [403, 410, 500])
def test_where_a_watch_is_refused_every_read_is_a_request(server, watched, clock, status):
    """By a Role of an older operator, say; it asks for one less and less often."""
    server.refuse_watch = status
    for number in range(2, 8):
        server.set(number)
        assert version(watched) == str(number)
        clock.now += 0.5
    assert not server.watches
    server.refuse_watch = 0
    clock.now += 600.0
    runs(watched, clock, server)


def test_a_server_that_is_away_is_a_channel_error_and_comes_back(server, watched, clock):
    """As when an API server restarts: its watches end, requests fail for a while."""
    runs(watched, clock, server)
    server.down = True
    server.send(END)

    def away():
        try:
            watched.newest()
        except ChannelError:
            return True
        return False

    eventually(away, "reads to fail")
    server.set(2, tell=False)
    server.down = False
    assert version(watched) == "2"
    runs(watched, clock, server)


def test_an_object_that_is_deleted_and_made_again(server, watched, clock):
    """No object is no error: it is waited for."""
    runs(watched, clock, server)
    server.send({"type": "DELETED", "object": server.item})
    eventually(lambda: version(watched) is None, "the object to be gone")
    server.set(9, tell=False)
    server.send({"type": "ADDED", "object": server.item})
    eventually(lambda: version(watched) == "9", "the object to be back")


def test_a_closed_one_reads_by_requests(server, watched, clock):
    """Ranks other than the first have no further use for plans, and keep no connection open."""
    runs(watched, clock, server)
    watched.close()
    server.set(2, tell=False)
    assert version(watched) == "2"
    server.set(3, tell=False)
    assert version(watched) == "3"
