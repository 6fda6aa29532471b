"""What a real API server refuses, and objects of others in the way: named on the job, and waited for."""

import base64
import contextlib
import http.server
import json
import ssl
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from ballast_localcluster.certificates import Identity, write_certificates
from ballast_policies.contract.messages import JOB_LABEL
from kubernetes import client

from tests.operator.live.conftest import JOBS, Stage
from tests.support.waiting import eventually

pytestmark = [pytest.mark.api, pytest.mark.slow]

DONE = {"total": 5}


def refused(stage: Stage, name: str, because: str, words: str) -> None:
    """Wait until the job is not admitted for this reason, in these words, and holds no GPUs.

    By one look at its status: it is tried again and again, and has been given GPUs in between.
    """

    def look() -> bool:
        status = stage.status(name)
        said = [c for c in status.get("conditions") or [] if c["type"] == "Admitted"]
        assert [c["reason"] for c in said] == [because] and words in said[0]["message"], status
        assert "allocation" not in status, status
        return True

    eventually(look, f"{name} to be refused")


def refusal_of_a_pod(stage: Stage) -> str:
    """Why no pod can be made; empty: it can. The API server learns of quotas by a watch."""
    body = {"metadata": {"name": "tried"}, "spec": {"containers": [{"name": "c", "image": "none"}]}}
    try:
        stage.core.create_namespaced_pod(stage.namespace, body, dry_run="All")
    except client.ApiException as error:
        return str(error.body)
    return ""


def test_what_keeps_pods_from_being_made_is_named_and_ends_with_its_cause(stage: Stage) -> None:
    """A quota, a service account of somebody else, and a template that no schema of ours finds wrong."""
    quota = client.V1ResourceQuota(
        metadata=client.V1ObjectMeta(name="none"), spec=client.V1ResourceQuotaSpec(hard={"pods": "0"})
    )
    stage.core.create_namespaced_resource_quota(stage.namespace, quota)
    eventually(lambda: "exceeded quota" in refusal_of_a_pod(stage), "the quota to be in force")
    account = stage.core.create_namespaced_service_account(
        stage.namespace, client.V1ServiceAccount(metadata=client.V1ObjectMeta(name="taken-trainer"))
    )
    with stage.operator():
        stage.add_job("waits", script=DONE, backoffLimit=0)
        refused(stage, "waits", "NotAllowed", "exceeded quota: none")
        assert stage.status("waits").get("launches", 0) == 0
        stage.core.delete_namespaced_resource_quota("none", stage.namespace)
        wrong = {"spec": {"containers": [{"name": "trainer", "image": "x", "imagePullPolicy": "Sometimes"}]}}
        stage.add_job("wrong", script=DONE, template=wrong)
        refused(stage, "wrong", "Misconfigured", "imagePullPolicy")
        stage.add_job("taken", script=DONE)
        refused(stage, "taken", "NameTaken", "ServiceAccount taken-trainer is not the job's")
        untouched = stage.core.read_namespaced_service_account("taken-trainer", stage.namespace)
        assert untouched.metadata.resource_version == account.metadata.resource_version
        stage.core.delete_namespaced_service_account("taken-trainer", stage.namespace)
        stage.wait_for("waits", "Succeeded")
        stage.wait_for("taken", "Succeeded")
        assert stage.status("wrong").get("launches", 0) == 0


def test_a_gang_for_which_a_quota_has_no_room_names_it_and_goes_on_once_it_has(stage: Stage) -> None:
    """One launch finds it, since the quota has room for the first pod."""
    quota = {"metadata": {"name": "few"}, "spec": {"hard": {"requests.nvidia.com/gpu": "1"}}}
    stage.core.create_namespaced_resource_quota(stage.namespace, quota)
    eventually(
        lambda: stage.core.read_namespaced_resource_quota("few", stage.namespace).status.used, "its count"
    )
    with stage.operator():
        stage.add_job("one", script=DONE, backoffLimit=0)
        words = "exceeded quota: few, requested: requests.nvidia.com/gpu=2, used: requests.nvidia.com/gpu=0"
        refused(stage, "one", "NotAllowed", words)
        refused(stage, "one", "NotAllowed", ". To fix: raise that ResourceQuota, or ask for less")
        assert stage.status("one")["launches"] == 1
        quota["spec"]["hard"] = {"requests.nvidia.com/gpu": "2"}
        stage.core.replace_namespaced_resource_quota("few", stage.namespace, quota)
        stage.wait_for("one", "Succeeded")
        assert stage.status("one")["launches"] == 2


def test_a_status_that_a_person_has_edited_is_the_operators_again(stage: Stage, tmp_path: Path) -> None:
    """A field of the allocation that the person's tool owns from then on does not outlive the allocation."""
    finish = tmp_path / "finish"
    edits = {"nodes": ["gone", "gone"], "launch": 7}
    with stage.operator():
        for field, value in edits.items():
            stage.add_job(field, script={"total": 5, "finishFile": str(finish)})
            stage.wait_for(field, "Running")
            stage.custom.patch_namespaced_custom_object_status(
                namespace=stage.namespace,
                name=field,
                body={"status": {"allocation": {field: value}}},
                field_manager="kubectl-edit",
                **JOBS,
            )
        finish.touch()
        for field in edits:
            stage.wait_for(field, "Succeeded")
            eventually(lambda field=field: "allocation" not in stage.status(field), "it to have none")


SIDECAR = {"name": "agent", "image": "not-read", "command": ["sleep", "infinity"]}


def test_gpus_that_a_limit_range_adds_are_named_and_not_taken_uncounted(stage: Stage) -> None:
    """No pod is made; a template that says 0 is launched."""
    gpu = "nvidia.com/gpu"
    limits = {"spec": {"limits": [{"type": "Container", "default": {gpu: "2"}}]}}
    stage.core.create_namespaced_limit_range(stage.namespace, {"metadata": {"name": "gpus"}, **limits})

    def defaults() -> bool:
        body = {"metadata": {"name": "tried"}, "spec": {"containers": [SIDECAR]}}
        made = stage.core.create_namespaced_pod(stage.namespace, body, dry_run="All")
        return gpu in (made.spec.containers[0].resources.limits or {})

    eventually(defaults, "the LimitRange to be in force")
    with stage.operator():
        stage.add_job("counted", stages=1, script=DONE)
        template = stage.job("counted")["spec"]["template"]
        trainer = template["spec"]["containers"][0]
        stage.wait_for("counted", "Succeeded")
        uncounted = {"spec": {**template["spec"], "containers": [trainer, SIDECAR]}}
        stage.add_job("uncounted", stages=1, script=DONE, backoffLimit=0, template=uncounted)
        words = f"gives the pod 3 {gpu} instead of 1: container agent 2. To fix:"
        refused(stage, "uncounted", "NotAllowed", words)
        assert stage.status("uncounted").get("launches", 0) == 0
        none = {**SIDECAR, "command": ["true"], "resources": {"limits": {gpu: "0"}}}
        stage.patch("uncounted", {"template": {"spec": {**template["spec"], "containers": [trainer, none]}}})
        stage.wait_for("uncounted", "Succeeded")


Review = Mapping[str, Any]


def review(asked: Review, *, patch: Sequence[Any] = (), denied: str = "") -> bytes:
    """The answer to ``asked``: with these changes of the object, or why it is denied."""
    answer: dict[str, Any] = {"uid": asked["request"]["uid"], "allowed": not denied}
    if denied:
        answer["status"] = {"message": denied}
    if patch:
        answer |= {"patchType": "JSONPatch", "patch": base64.b64encode(json.dumps(patch).encode()).decode()}
    return json.dumps(
        {"apiVersion": "admission.k8s.io/v1", "kind": "AdmissionReview", "response": answer}
    ).encode()


@contextlib.contextmanager
def webhook(
    stage: Stage, folder: Path, answer: Callable[[Review], bytes], *, mutates: bool = False, seconds: int = 10
) -> Iterator[None]:
    """Asked about each pod of the namespace; the API server waits so many seconds for its answer."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked.set()
            body = answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            with contextlib.suppress(OSError):  # the API server has given up
                self.send_response(200)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

        def log_message(self, *_: Any) -> None: ...

    asked = threading.Event()
    write_certificates(folder, (Identity(file="hook", common_name="hook", hosts=("127.0.0.1",)),))
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(folder / "hook.crt", folder / "hook.key")
    server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
    name = f"hook.{stage.namespace}.example"
    reached = {
        "url": f"https://127.0.0.1:{server.server_port}/",
        "caBundle": base64.b64encode((folder / "ca.crt").read_bytes()).decode(),
    }
    rule = {"apiGroups": [""], "apiVersions": ["v1"], "operations": ["CREATE"], "resources": ["pods"]}
    hook = {
        "name": name,
        "clientConfig": reached,
        "rules": [rule],
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": stage.namespace}},
        "sideEffects": "None",
        "timeoutSeconds": seconds,
        "admissionReviewVersions": ["v1"],
    }
    registry, kind = (
        client.AdmissionregistrationV1Api(stage.core.api_client),
        "mutating" if mutates else "validating",
    )
    getattr(registry, f"create_{kind}_webhook_configuration")(
        {"metadata": {"name": name}, "webhooks": [hook]}
    )

    def is_asked() -> bool:
        with contextlib.suppress(Exception):
            refusal_of_a_pod(stage)
        return asked.is_set()

    try:
        eventually(is_asked, "the webhook to be asked")
        yield
    finally:
        getattr(registry, f"delete_{kind}_webhook_configuration")(name)
        server.shutdown()
        server.server_close()


SIDECAR_AND_MORE = [
    {"op": "add", "path": "/spec/containers/0", "value": {**SIDECAR, "name": "mesh"}},
    {"op": "add", "path": "/metadata/labels/mesh.example~1injected", "value": "true"},
    {"op": "add", "path": "/metadata/annotations", "value": {"mesh.example/version": "1"}},
    {
        "op": "add",
        "path": "/spec/containers/1/env/0",
        "value": {"name": "HTTP_PROXY", "value": "http://mesh"},
    },
    {"op": "add", "path": "/spec/tolerations/0", "value": {"key": "mesh", "operator": "Exists"}},
]


def of_jobs(patch: Sequence[Any]) -> Callable[[Review], bytes]:
    """It changes the pods of jobs alone."""
    return lambda asked: review(
        asked,
        patch=patch if JOB_LABEL in (asked["request"]["object"]["metadata"].get("labels") or {}) else (),
    )


def test_a_job_whose_pods_a_webhook_changes_runs(stage: Stage, tmp_path: Path) -> None:
    """A side car before the trainer that never ends, a label, an annotation, a variable, a toleration."""
    with stage.operator(), webhook(stage, tmp_path, of_jobs(SIDECAR_AND_MORE), mutates=True):
        stage.add_job("one", script=DONE, backoffLimit=0)
        stage.wait_for("one", "Succeeded")
        assert stage.status("one")["launches"] == 1


def test_a_job_is_told_of_a_webhook_that_takes_its_label(stage: Stage, tmp_path: Path) -> None:
    """Its pods would not be found again: none is made; it runs once they are left alone."""
    label = [{"op": "replace", "path": "/metadata/labels/ballast.dev~1job", "value": "other"}]
    with stage.operator():
        with webhook(stage, tmp_path, of_jobs(label), mutates=True):
            stage.add_job("one", script=DONE, backoffLimit=0)
            refused(stage, "one", "NotAllowed", "ballast.dev/job")
            assert stage.status("one").get("launches", 0) == 0
        stage.wait_for("one", "Succeeded")


def test_a_job_quotes_a_webhook_that_denies_its_pods(stage: Stage, tmp_path: Path) -> None:
    with stage.operator():
        with webhook(stage, tmp_path, lambda asked: review(asked, denied="no team label")):
            stage.add_job("one", script=DONE, backoffLimit=0)
            refused(stage, "one", "NotAllowed", "denied the request: no team label")
        stage.wait_for("one", "Succeeded")


@pytest.mark.parametrize("seconds", [1, 30], ids=["the API server gives up", "the operator gives up"])
def test_a_job_is_told_of_a_webhook_that_does_not_answer(stage: Stage, tmp_path: Path, seconds: int) -> None:
    """The jobs of other namespaces go on; it runs once the webhook is gone."""
    over = threading.Event()

    def hangs(asked: Review) -> bytes:
        over.wait(60)
        return review(asked)

    with stage.operator():
        with webhook(stage, tmp_path, hangs, seconds=seconds):
            stage.add_job("one", script=DONE, backoffLimit=0)
            words = "failed calling webhook" if seconds == 1 else "no answer in"
            refused(stage, "one", "NotAllowed", words)
        over.set()
        stage.wait_for("one", "Succeeded")
