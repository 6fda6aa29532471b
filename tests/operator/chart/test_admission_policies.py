"""The chart's ValidatingAdmissionPolicies, on a real API server, tried as those whom they are to stop."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
from ballast_operator.desired.access import trainer_account
from kubernetes import client
from kubernetes.dynamic import DynamicClient

from tests.operator.api.objects import JOB, changed
from tests.operator.chart.test_chart import CHART, helm, of_kind, render
from tests.support.control_plane import ControlPlane
from tests.support.waiting import eventually

KINDS = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding")
JOBS = ("ballast.dev", "v1alpha1")


@pytest.fixture(scope="module")
def chart() -> Iterator[Any]:
    with helm.Chart.load(CHART) as loaded:
        yield loaded


@pytest.mark.slow
def test_they_can_be_switched_off(chart: Any) -> None:
    """And are off where the cluster is not known to have the API."""
    assert not of_kind(render(chart), KINDS[0])
    assert not of_kind(render(chart, {"admissionPolicies": {"enabled": False}}), KINDS[0])
    on = render(chart, {"admissionPolicies": {"enabled": True}})
    policies, bindings = (of_kind(on, kind) for kind in KINDS)
    assert [b["spec"]["policyName"] for b in bindings] == [p["metadata"]["name"] for p in policies]


def test_trusted_users_are_named_beside_the_operator(chart: Any) -> None:
    """A backup tool that restores pods with their labels."""
    items = render(chart, {"admissionPolicies": {"enabled": True, "trustedUsers": ["velero"]}})
    conditions = [
        condition["expression"]
        for policy in of_kind(items, KINDS[0])
        for condition in policy["spec"].get("matchConditions", [])
    ]
    assert (
        conditions
        == ["!(request.userInfo.username in ['system:serviceaccount:ballast-system:ballast', 'velero'])"] * 2
    )


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
    """The policies in force, for the test's namespace and kube-system alone."""
    names = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": [namespace, "kube-system"]}
    values = {
        "admissionPolicies": {
            "enabled": True,
            "namespaceSelector": {"matchExpressions": [names]},
            "leaseAnnotationCharacters": 1024,
        },
        "fullnameOverride": f"ballast-{namespace}",
        "serviceAccount": {"name": "ballast"},
    }
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


def make_lease(api: client.ApiClient, namespace: str, dry_run: str | None = "All") -> None:
    body = {"metadata": {"name": "victim", "labels": {"ballast.dev/job": "victim"}}}
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


@pytest.mark.api
def test_only_the_operator_labels_a_pod_as_a_trainer(cluster: Cluster) -> None:
    """Neither at its creation nor later; other labels and other pods are everybody's."""
    here = cluster.namespace
    assert "only Ballast's operator sets them" in cluster.refusal("eve", lambda api: make_pod(api, here))
    assert cluster.refusal("eve", lambda api: make_pod(api, here, labels={"app": "x"})) == ""
    assert cluster.refusal(cluster.operator, lambda api: make_pod(api, here, dry_run=None)) == ""

    def patch(**labels: str | None) -> Any:
        body = {"metadata": {"labels": {name.replace("_", "/"): value for name, value in labels.items()}}}
        return lambda api: client.CoreV1Api(api).patch_namespaced_pod("pod", here, body, dry_run="All")

    assert cluster.refusal("eve", patch(app="x")) == ""
    assert "To fix" in cluster.refusal("eve", patch(**{"ballast.dev_job": "other"}))
    assert "To fix" in cluster.refusal("eve", patch(**{"ballast.dev_job": None}))
    assert "To fix" in cluster.refusal("eve", patch(**{"ballast.dev_launch": "7"}))


@pytest.mark.api
def test_a_trainer_only_writes_messages_of_bounded_size_to_its_lease(cluster: Cluster) -> None:
    """No finalizer that keeps the job, no other owner, no other label, no Lease for another job."""
    here, trainer = cluster.namespace, f"system:serviceaccount:x:{trainer_account('victim')}"
    assert "only Ballast's operator makes it" in cluster.refusal(trainer, lambda api: make_lease(api, here))
    assert cluster.refusal(cluster.operator, lambda api: make_lease(api, here, dry_run=None)) == ""

    def patch(**metadata: Any) -> Any:
        return lambda api: client.CoordinationV1Api(api).patch_namespaced_lease(
            "victim", here, {"metadata": metadata}, dry_run="All"
        )

    report = {"ballast.dev/report": "{}"}
    assert cluster.refusal(trainer, patch(annotations=report)) == ""
    too_long = {"ballast.dev/report": "x" * 1024}
    assert "exceed 1024 characters together" in cluster.refusal(trainer, patch(annotations=too_long))
    assert "finalizer" in cluster.refusal(trainer, patch(finalizers=["eve.example/stay"]))
    assert "owners" in cluster.refusal(trainer, patch(labels={"ballast.dev/job": "other"}))
    owner = {"apiVersion": "v1", "kind": "Pod", "name": "pod", "uid": "1"}
    assert "owners" in cluster.refusal(trainer, patch(ownerReferences=[owner]))


@pytest.mark.api
def test_a_namespace_says_which_team_and_weight_its_jobs_have(
    cluster: Cluster, control_plane: ControlPlane
) -> None:
    """By its labels, which its tenants cannot change."""
    here = cluster.namespace
    labels = {"ballast.dev/entity": "vision", "ballast.dev/max-weight": "2.5"}
    with control_plane.client() as api:
        client.CoreV1Api(api).patch_namespace(here, {"metadata": {"labels": labels}})

    def ask(**spec: Any) -> str:
        return cluster.refusal("eve", lambda api: make_job(api, here, **spec))

    eventually(lambda: "set spec.entity to vision" in ask(entity="speech", weight=1.0), "the labels")
    assert ask(entity="vision", weight=2.5) == ""
    assert "have a weight of at most 2.5" in ask(entity="vision", weight=3.0)


@pytest.mark.api
def test_names_that_the_control_plane_uses_are_not_for_jobs(cluster: Cluster) -> None:
    """A job in kube-system could be called as the scheduler's Lease; the leader's is refused by the CRD."""

    def ask(namespace: str, name: str) -> str:
        job = changed(changed(JOB, "metadata.namespace", namespace), "metadata.name", name)
        return cluster.refusal(
            "eve",
            lambda api: client.CustomObjectsApi(api).create_namespaced_custom_object(
                *JOBS, namespace, "trainingjobs", job, dry_run="All"
            ),
        )

    assert "create the job in another namespace" in ask("kube-system", "kube-scheduler")
    assert ask(cluster.namespace, "translator") == ""
