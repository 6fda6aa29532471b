"""Both channels carry the contract's bytes."""

import http.server
import json
import threading

import pytest
from ballast_policies.contract import Ack, Directive, Proposal, Report
from ballast_trainer.channel.api_server import ApiServer
from ballast_trainer.channel.base import ChannelError, DirectoryChannel, Messages, StandaloneChannel
from ballast_trainer.channel.kubernetes import KubernetesChannel
from ballast_trainer.errors import ConfigurationError

from tests.trainer.channel.messages import ACK, PLAN, PROPOSAL, REPORT


class FakeApiServer(http.server.ThreadingHTTPServer):
    """One ConfigMap and one Lease over HTTP; keeps what it was asked."""

    def __init__(self):
        super().__init__(("127.0.0.1", 0), FakeHandler)
        self.objects = {}
        self.requests = []
        self.failures = 0


class FakeHandler(http.server.BaseHTTPRequestHandler):
    """Get and merge-patch."""

    protocol_version = "HTTP/1.1"

    def do_GET(self):
        """An object, or 404."""
        self._answer(lambda: self.server.objects.get(self.path))

    def do_PATCH(self):
        """Merge annotations and spec."""
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))

        def patch():
            found = self.server.objects.get(self.path)
            if found is not None:
                for part in ("metadata", "spec"):
                    merge(found.setdefault(part, {}), body.get(part, {}))
            return found

        self._answer(patch)

    def _answer(self, action):
        self.server.requests.append((self.command, self.path, dict(self.headers)))
        if self.server.failures:
            self.server.failures -= 1
            status, value = 503, {"message": "try later"}
        else:
            value = action()
            status = 404 if value is None else 200
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args):
        """Silent."""


def merge(target, patch):
    for key, value in patch.items():
        if isinstance(value, dict):
            merge(target.setdefault(key, {}), value)
        else:
            target[key] = value


@pytest.fixture
def api():
    server = FakeApiServer()
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


LEASE = "/apis/coordination.k8s.io/v1/namespaces/team/leases/a"
CONFIG_MAP = "/api/v1/namespaces/team/configmaps/a-plan"


@pytest.fixture
def kubeconfig(api, tmp_path):
    path = tmp_path / "kubeconfig"
    config = {
        "current-context": "pod",
        "contexts": [{"name": "pod", "context": {"cluster": "local", "user": "trainer"}}],
        "clusters": [{"name": "local", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}],
        "users": [{"name": "trainer", "user": {"token": "secret"}}],
    }
    path.write_text(json.dumps(config))
    return {"KUBECONFIG": str(path)}


@pytest.fixture
def kubernetes_channel(kubeconfig):
    server = ApiServer.from_environment(kubeconfig)
    channel = KubernetesChannel(server, namespace="team", job="a", pod="a-1-0")
    yield channel
    channel.close()
    server.close()


def test_plan_and_configuration_come_from_the_config_map(api, kubernetes_channel):
    """Nothing there yet means wait; then the contract's bytes, asked for with the pod's own token."""
    assert kubernetes_channel.read_plan() is None
    assert kubernetes_channel.read_config() is None
    api.objects[CONFIG_MAP] = {"data": {"plan.json": PLAN.to_json(), "config.json": '{"totalSteps": 3}'}}
    assert kubernetes_channel.read_plan() == PLAN
    assert kubernetes_channel.read_config() == {"totalSteps": 3}
    assert {headers["Authorization"] for _, _, headers in api.requests} == {"Bearer secret"}


def test_messages_become_annotations_of_the_lease(api, kubernetes_channel):
    """Report, proposal, acknowledgement, finished step; holder and renewal time; the rest untouched."""
    api.objects[LEASE] = {
        "metadata": {"annotations": {"mine": "stays"}},
        "spec": {"leaseDurationSeconds": 15},
    }
    kubernetes_channel.write(Messages(report=REPORT, proposal=PROPOSAL, ack=ACK, finished_step=9))
    lease = api.objects[LEASE]
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
def test_what_cannot_be_reached_is_a_channel_error(api, kubernetes_channel, missing):
    """The caller tries again; it never sees an HTTP library's own exception."""
    if missing == "server":
        api.failures = 1
    with pytest.raises(ChannelError):
        kubernetes_channel.write(Messages(report=REPORT))


def test_a_broken_plan_names_its_field(api, kubernetes_channel):
    """The other side's mistake is said in its words."""
    api.objects[CONFIG_MAP] = {"data": {"plan.json": '{"job": "a"}'}}
    with pytest.raises(ChannelError, match=r"Plan\.epoch: missing"):
        kubernetes_channel.read_plan()


def test_the_kubernetes_channel_outside_of_a_cluster_is_refused_with_a_fix():
    """No service account, no kubeconfig."""
    with pytest.raises(ConfigurationError, match="ballast-train run"):
        ApiServer.from_environment({})


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
    (tmp_path / "plan.json").write_text("{")
    with pytest.raises(ChannelError, match="not JSON"):
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
