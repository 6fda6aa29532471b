"""Channels carry the contract's bytes; what Kubernetes holds is followed by a watch that hides no change."""

import contextlib
import http.server
import json
import queue
import threading
import urllib.parse

import pytest
from ballast_client.api_server import ApiServer, ChannelError, NotInPodError
from ballast_policies.contract.messages import Ack, Proposal, Report
from ballast_policies.contract.plan import Directive
from ballast_trainer.channel.base import DirectoryChannel, Messages, OperatorChannel, StandaloneChannel
from ballast_trainer.channel.kubernetes import CHECK_SECONDS, WatchedObject, WatchingKubernetes

from tests.support.waiting import WAIT_SECONDS, Clock, eventually
from tests.trainer.channel.messages import ACK, PLAN, PROPOSAL, REPORT

COLLECTION, NAME = "/api/v1/namespaces/team/configmaps", "a-plan"
LEASE = "/apis/coordination.k8s.io/v1/namespaces/team/leases/a"
CONFIG_MAP = f"{COLLECTION}/{NAME}"
END = None


class FakeApiServer(http.server.ThreadingHTTPServer):
    """Objects over HTTP, and watches that the test speaks through; keeps what it was asked."""

    daemon_threads = True

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.objects, self.requests, self.watches = {}, [], []
        self.refuse_watch, self.down, self.keeps = 0, False, True
        self.most, self.too_much = 1 << 18, 422

    def set(self, version, *, tell=True):
        """A new version of the ConfigMap; ``tell``: to those who watch."""
        item = {"metadata": {"resourceVersion": str(version)}, "data": {"version": str(version)}}
        self.objects[CONFIG_MAP] = item
        if tell:
            self.send({"type": "MODIFIED", "object": item})

    def send(self, event):
        """To all watches: one that was replaced may have reached the server last."""
        for _, events in self.watches:
            events.put(event)

    def gets(self):
        """Requests that are no watch."""
        return sum("?" not in path for _, path, _ in self.requests)


class FakeHandler(http.server.BaseHTTPRequestHandler):
    """Get, watch and merge-patch."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """An object or 404, or a watch."""
        query = urllib.parse.parse_qs(self.path.partition("?")[2])
        if not query:
            self._answer(lambda: self.server.objects.get(self.path))
        elif self.server.down or self.server.refuse_watch:
            self._answer(lambda: {}, self.server.refuse_watch)
        else:
            self._watch(query)

    def do_PATCH(self):
        """Merge annotations and spec."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        written = sum(map(len, body["metadata"]["annotations"].values()))

        def patch():
            found = self.server.objects.get(self.path)
            if found is not None:
                for part in ("metadata", "spec"):
                    merge(found.setdefault(part, {}), body.get(part, {}))
            return found

        self._answer(patch) if written <= self.server.most else self._answer(dict, self.server.too_much)

    def _answer(self, action, status=0):
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        value = {"message": "try later"} if self.server.down else action()
        data = json.dumps(value).encode()
        self.send_response(503 if self.server.down else status or (404 if value is None else 200))
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)
        self.close_connection = not self.server.keeps

    def _watch(self, query):
        events = queue.Queue()
        # Before the answer: who has read it is told of each change from then on.
        self.server.watches.append((query, events))
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.wfile.flush()
        self.close_connection = True
        with contextlib.suppress(OSError):
            while (event := events.get(timeout=WAIT_SECONDS)) is not END:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(f"{len(line):x}\r\n".encode() + line + b"\r\n")
            self.wfile.write(b"0\r\n\r\n")

    def log_message(self, *args):
        """Silent."""


def merge(target, patch):
    for key, value in patch.items():
        if isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


@pytest.fixture
def server():
    made = FakeApiServer()
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield made
    made.send(END)
    made.shutdown()
    thread.join()
    made.server_close()


@pytest.fixture
def kubeconfig(server, tmp_path):
    path, token = tmp_path / "kubeconfig", tmp_path / "token"
    token.write_text("secret")
    config = {
        "clusters": [{"name": "local", "cluster": {"server": f"http://127.0.0.1:{server.server_port}"}}],
        "users": [{"name": "trainer", "user": {"tokenFile": str(token)}}],
    }
    path.write_text(json.dumps(config))
    return {"KUBECONFIG": str(path)}


@pytest.fixture
def kubernetes_channel(server, kubeconfig):
    server.refuse_watch = 404
    api = ApiServer.from_environment(kubeconfig)
    channel = OperatorChannel(WatchingKubernetes(api, namespace="team", job="a", pod="a-1-0"))
    yield channel
    channel.close()
    api.close()


def test_plan_and_configuration_come_from_the_config_map(server, kubernetes_channel):
    """Nothing there yet means wait; then the contract's bytes, asked for with the pod's own token."""
    assert kubernetes_channel.read_plan() is None
    assert kubernetes_channel.read_config() is None
    server.objects[CONFIG_MAP] = {"data": {"plan.json": PLAN.to_json(), "config.json": '{"totalSteps": 3}'}}
    assert kubernetes_channel.read_plan() == PLAN
    assert kubernetes_channel.read_config() == {"totalSteps": 3}
    assert {headers["Authorization"] for _, _, headers in server.requests} == {"Bearer secret"}


def test_messages_become_annotations_of_the_lease(server, kubernetes_channel):
    """Report, proposal, acknowledgement, finished step; holder and renewal time; the rest untouched."""
    server.objects[LEASE] = {
        "metadata": {"annotations": {"mine": "stays"}},
        "spec": {"leaseDurationSeconds": 15},
    }
    kubernetes_channel.write(Messages(report=REPORT, proposal=PROPOSAL, ack=ACK, finished_step=9))
    lease = server.objects[LEASE]
    annotations = lease["metadata"]["annotations"]
    assert Report.from_json(annotations["ballast.dev/report"]) == REPORT
    assert Proposal.from_json(annotations["ballast.dev/proposal"]) == PROPOSAL
    assert Ack.from_json(annotations["ballast.dev/ack"]) == ACK
    assert annotations["ballast.dev/finished-step"] == "9"
    assert annotations["mine"] == "stays"
    assert lease["spec"]["holderIdentity"] == "a-1-0"
    assert lease["spec"]["renewTime"].endswith("Z")
    assert lease["spec"]["leaseDurationSeconds"] == 15
    kubernetes_channel.write(Messages(closing=True))
    assert lease["spec"].get("holderIdentity") is None


@pytest.mark.parametrize("missing", ["lease", "server"])
def test_what_cannot_be_reached_is_a_channel_error(server, kubernetes_channel, missing):
    """The caller tries again; it never sees an HTTP library's own exception."""
    if missing == "server":
        server.down = True
    with pytest.raises(ChannelError):
        kubernetes_channel.write(Messages(report=REPORT))


@pytest.mark.parametrize("status", [403, 413, 422])
def test_a_report_of_more_layers_than_a_lease_takes_is_written_without_them(
    server, kubernetes_channel, caplog, status
):
    """Else the Lease would not be renewed, and a job of a thousand layers would count as hung."""
    server.objects[LEASE], server.most, server.too_much = {}, 10, status
    long = REPORT.replace(layer_seconds=(0.1,) * 300, layer_bytes=(4096,) * 300)
    for messages in (Messages(ack=ACK), Messages(report=long)):
        with pytest.raises(ChannelError, match=str(status)):
            kubernetes_channel.write(messages)
    assert not caplog.records
    server.most = 2000
    for step in (7, 8):
        kubernetes_channel.write(Messages(report=long.replace(step=step), ack=ACK))
        annotations = server.objects[LEASE]["metadata"]["annotations"]
        assert Report.from_json(annotations["ballast.dev/report"]) == REPORT.replace(step=step)
        assert Ack.from_json(annotations["ballast.dev/ack"]) == ACK
    assert caplog.text.count("the operator is told nothing of single layers") == 1


def test_a_connection_that_was_ended_meanwhile_is_opened_again(server, kubernetes_channel):
    """A script's last message is sent once."""
    server.keeps, server.objects[LEASE] = False, {}
    for step in range(3):
        kubernetes_channel.write(Messages(finished_step=step))
    assert server.objects[LEASE]["metadata"]["annotations"] == {"ballast.dev/finished-step": "2"}


def test_the_kubernetes_channel_outside_of_a_cluster_is_refused_with_a_fix():
    """No service account, no kubeconfig, or one that is not a pod's."""
    with pytest.raises(NotInPodError, match="ballast-train run"):
        ApiServer.from_environment({})
    with pytest.raises(
        NotInPodError, match=r"ca\.crt: No such file or directory.*automountServiceAccountToken"
    ):
        ApiServer.from_environment({"KUBERNETES_SERVICE_HOST": "10.0.0.1"})
    with pytest.raises(NotInPodError, match=r"KUBECONFIG: .*unset it in spec\.template"):
        ApiServer.from_environment({"KUBECONFIG": "/dev/null"})


def test_the_directory_channel_carries_the_same_messages(tmp_path):
    """Files in place of objects, replaced whole."""
    channel = DirectoryChannel(tmp_path)
    assert channel.read_plan() is None
    channel.publish(PLAN)
    assert channel.read_plan() == PLAN
    channel.write(Messages(report=REPORT, proposal=PROPOSAL, ack=ACK, finished_step=9))
    assert Report.from_json((tmp_path / "report.json").read_text()) == REPORT
    assert Proposal.from_json((tmp_path / "proposal.json").read_text()) == PROPOSAL
    assert Ack.from_json((tmp_path / "ack.json").read_text()) == ACK
    assert (tmp_path / "finished-step").read_text() == "9"
    (tmp_path / "plan.json").write_text('{"job": "a"}')
    with pytest.raises(ChannelError, match=r"plan\.json: Plan\.epoch: missing"):
        channel.read_plan()


def test_without_an_operator_a_proposal_is_granted_once():
    """The next epoch keeps the proposed pods; a stale proposal changes nothing."""
    channel = StandaloneChannel(PLAN)
    channel.write(Messages(proposal=PROPOSAL))
    granted = channel.read_plan()
    assert granted.epoch == 2
    assert granted.directive is Directive.SHRINK
    assert [rank.pod for rank in granted.ranks] == ["a-1-0"]
    assert granted.stages == PROPOSAL.stages
    channel.write(Messages(proposal=PROPOSAL))
    assert channel.read_plan() == granted


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def watched(server, clock, kubeconfig):
    server.set(1)
    api = ApiServer.from_environment(kubeconfig)
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
        before = server.gets()
        watched.newest()
        if server.gets() == before:
            return True
        clock.now += 1.0
        return False

    eventually(free, "a watch that runs")


def test_a_change_is_seen_without_a_request(server, watched, clock):
    """Any number of reads, one watch of this object alone, from the version that was read."""
    assert version(watched) == "1"
    runs(watched, clock, server)
    before = server.gets()
    for number in range(2, 6):
        server.set(number)
        eventually(lambda number=number: version(watched) == str(number), "the change")
    assert server.gets() == before
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
    runs(watched, clock, server)
    server.send({"type": "DELETED", "object": server.objects[CONFIG_MAP]})
    eventually(lambda: version(watched) is None, "the object to be gone")
    server.set(9, tell=False)
    server.send({"type": "ADDED", "object": server.objects[CONFIG_MAP]})
    eventually(lambda: version(watched) == "9", "the object to be back")


def test_a_closed_one_begins_again_with_the_next_read(server, watched, clock):
    """Ranks other than the first keep no connection open, until one of them becomes the first."""
    runs(watched, clock, server)
    watched.close()
    assert not watched.live
    server.set(2, tell=False)
    assert version(watched) == "2"
    runs(watched, clock, server)
