"""Trainer pods in a namespace that enforces the profile `restricted`, on a real API server."""

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import yaml
from ballast_operator.desired import pod_object
from kubernetes import client

from tests.operator.steps.contexts import PODS, a_running_view
from tests.operator.views.builders import a_spec
from tests.support.control_plane import ControlPlane, fresh_namespace
from tests.support.waiting import eventually

pytestmark = pytest.mark.api

EXAMPLES = sorted((Path(__file__).resolve().parents[3] / "examples").glob("trainingjob*.yaml"))
ENFORCE = "pod-security.kubernetes.io/enforce"
BARE_POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "bare"},
    "spec": {"containers": [{"name": "main", "image": "trainer:1"}]},
}
"""Without the security context that the profile demands."""


def trainer_pod(template: dict[str, Any]) -> dict[str, Any]:
    view = a_running_view()
    pod = pod_object(
        view,
        a_spec(template=template),
        view.status.allocation.with_pods(dict(zip(PODS, "abcd", strict=True))),
        number=0,
        pod=PODS[0],
        gpu_resource="nvidia.com/gpu",
    )
    # Made by the operator with the job: of no matter here.
    for field in ("namespace", "ownerReferences"):
        pod["metadata"].pop(field)
    pod["spec"]["serviceAccountName"] = "default"
    return pod


@pytest.fixture(scope="module")
def elsewhere(control_plane: ControlPlane):
    """Why the API server refuses a pod in a namespace without a profile; empty: it does not."""
    with control_plane.client() as api, fresh_namespace(control_plane) as namespace:
        yield functools.partial(_refused, client.CoreV1Api(api), namespace)


@pytest.fixture(scope="module")
def refusal(control_plane: ControlPlane):
    """The same in a restricted one."""
    with control_plane.client() as api, fresh_namespace(control_plane) as namespace:
        core = client.CoreV1Api(api)
        core.patch_namespace(namespace, {"metadata": {"labels": {ENFORCE: "restricted"}}})
        ask = functools.partial(_refused, core, namespace)
        # Admission reads the label from its own watch.
        eventually(lambda: "violates PodSecurity" in ask(BARE_POD), "the namespace enforces the profile")
        yield ask


def _refused(core: client.CoreV1Api, namespace: str, pod: dict[str, Any]) -> str:
    try:
        core.create_namespaced_pod(namespace, pod, dry_run="All")
    except client.ApiException as error:
        return str(error.body)
    return ""


def template(container: dict[str, Any] | None = None, **spec: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "trainer", "image": "trainer:1", **(container or {})}], **spec}}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_examples_are_accepted(refusal, path: Path) -> None:
    """As they are: no example has to speak of security contexts."""
    job = next(item for item in yaml.safe_load_all(path.read_text()) if item["kind"] == "TrainingJob")
    pod = trainer_pod(job["spec"]["template"])
    assert refusal(pod) == ""
    without = copy.deepcopy(pod)
    del without["spec"]["securityContext"]
    assert "violates PodSecurity" in refusal(without)  # the namespace does enforce it


@pytest.mark.parametrize(
    ("asked", "because"),
    [
        (template({"securityContext": {"privileged": True}}), "privileged"),
        (
            template({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}),
            "unrestricted capabilities",
        ),
        (template(hostNetwork=True), "host namespaces"),
        (template(securityContext={"runAsUser": 0}), "runAsNonRoot"),
        (template(volumes=[{"name": "v", "hostPath": {"path": "/"}}]), "restricted volume types"),
    ],
)
def test_a_template_that_asks_for_more_is_refused_by_the_namespace(refusal, asked, because) -> None:
    """Pod Security admission decides, as for every pod; the operator adds nothing that would hide it."""
    assert because in refusal(trainer_pod(asked))


@pytest.mark.parametrize(
    "asked",
    [
        template({"securityContext": {"privileged": True}}),
        template({"securityContext": {"capabilities": {"add": ["SYS_ADMIN"]}}}),
        template({"securityContext": {"runAsUser": 0}}),
        template(securityContext={"runAsUser": 0, "runAsNonRoot": False}, hostNetwork=True),
    ],
)
def test_a_template_that_asks_for_more_is_valid_elsewhere(elsewhere, asked) -> None:
    """What is filled in does not contradict it."""
    assert elsewhere(trainer_pod(asked)) == ""
