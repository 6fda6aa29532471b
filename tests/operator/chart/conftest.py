"""The chart, and its admission policies in force on a real API server."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from kubernetes.dynamic import DynamicClient

from tests.operator.api.objects import JOB, changed
from tests.support.control_plane import ControlPlane
from tests.support.waiting import eventually

KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
JOBS = ("ballast.dev", "v1alpha1")


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    """Helm as a library, with the chart."""
    from tests.operator.chart.test_chart import CHART, helm

    with helm.Chart.load(CHART) as loaded:
        yield loaded


class Cluster:
    """One namespace for which the policies hold, and who asks in it; the operator is installed there."""

    def __init__(self, plane: ControlPlane, namespace: str) -> None:
        self.plane, self.namespace = plane, namespace
        self.operator = f"system:serviceaccount:{namespace}:ballast"

    @contextlib.contextmanager
    def as_user(self, user: str) -> Iterator[client.ApiClient]:
        """With the administrator's rights, since not RBAC is tried, under another name."""
        with self.plane.client() as api:
            api.set_default_header("Impersonate-User", user)
            api.set_default_header("Impersonate-Group", "system:masters")
            yield api

    def refusal(self, user: str, ask: Any) -> str:
        """What the policies say to ``ask``; empty: they let it pass."""
        with self.as_user(user) as api:
            try:
                ask(api)
            except client.ApiException as error:
                assert "ValidatingAdmissionPolicy" in str(error.body), error.body
                return str(error.body)
        return ""


@pytest.fixture
def cluster(chart: Any, control_plane: ControlPlane, namespace: str) -> Iterator[Cluster]:
    """The policies in force, for the test's namespaces and kube-system alone."""
    names = {
        "key": "kubernetes.io/metadata.name",
        "operator": "In",
        "values": [namespace, f"{namespace}-more", "kube-system"],
    }
    values = {
        "admissionPolicies": {
            "enabled": True,
            "namespaceSelector": {"matchExpressions": [names]},
            "leaseAnnotationCharacters": 1024,
        },
        "fullnameOverride": f"ballast-{namespace}",
        "serviceAccount": {"name": "ballast"},
    }
    from tests.operator.chart.test_chart import render

    rendered = render(chart, values, namespace=namespace)
    items = [item for item in rendered if item["kind"] in KINDS]
    found = Cluster(control_plane, namespace)
    with control_plane.client() as api:
        kube = DynamicClient(api)
        for item in items:
            resource = kube.resources.get(api_version=item["apiVersion"], kind=item["kind"])
            resource.create(body=item)
        try:
            for ask in (lambda a: make_pod(a, namespace), lambda a: make_lease(a, namespace)):
                eventually(lambda ask=ask: found.refusal("eve", ask), "the policies to be in force")
            client.CoreV1Api(api).patch_namespace(
                namespace, {"metadata": {"labels": {"ballast.dev/max-weight": "0"}}}
            )
            eventually(lambda: found.refusal("eve", lambda a: make_job(a, namespace)), "the jobs' policy")
            client.CoreV1Api(api).patch_namespace(
                namespace, {"metadata": {"labels": {"ballast.dev/max-weight": None}}}
            )
            eventually(lambda: not found.refusal("eve", lambda a: make_job(a, namespace)), "no label")
            yield found
        finally:
            for item in items:
                resource = kube.resources.get(api_version=item["apiVersion"], kind=item["kind"])
                resource.delete(name=item["metadata"]["name"])


def make_pod(api: client.ApiClient, namespace: str, dry_run: str | None = "All", **metadata: Any) -> None:
    metadata = metadata or {"labels": {"ballast.dev/job": "victim", "ballast.dev/rank": "0"}}
    body = {
        "metadata": {"name": "pod", **metadata},
        "spec": {"containers": [{"name": "a", "image": "a"}], "nodeSelector": {"none": "such"}},
    }
    client.CoreV1Api(api).create_namespaced_pod(namespace, body, **({"dry_run": dry_run} if dry_run else {}))


def make_lease(api: client.ApiClient, namespace: str, dry_run: str | None = "All", **metadata: Any) -> None:
    body = {"metadata": {"name": "victim", "labels": {"ballast.dev/job": "victim"}, **metadata}}
    client.CoordinationV1Api(api).create_namespaced_lease(
        namespace, body, **({"dry_run": dry_run} if dry_run else {})
    )


def make_job(api: client.ApiClient, namespace: str, **spec: Any) -> None:
    body = changed(JOB, "metadata.namespace", namespace)
    for field, value in spec.items():
        body = changed(body, f"spec.{field}", value)
    client.CustomObjectsApi(api).create_namespaced_custom_object(
        *JOBS, namespace, "trainingjobs", body, dry_run="All"
    )
