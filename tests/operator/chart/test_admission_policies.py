"""The chart's ValidatingAdmissionPolicies, on a real API server, tried as those whom they are to stop."""

from typing import Any

import pytest
from ballast_operator.desired import trainer_account
from kubernetes import client

from tests.operator.api.objects import JOB, changed
from tests.operator.chart.conftest import JOBS, KINDS, Cluster, make_job, make_lease, make_pod
from tests.operator.chart.test_chart import of_kind, render
from tests.support.control_plane import ControlPlane
from tests.support.waiting import eventually


@pytest.mark.slow
def test_they_can_be_switched_off(chart: Any) -> None:
    """And are off where the cluster is not known to have the API."""
    assert not of_kind(render(chart), KINDS[0])
    assert not of_kind(render(chart, {"admissionPolicies": {"enabled": False}}), KINDS[0])
    on = render(chart, {"admissionPolicies": {"enabled": True}})
    policies, bindings = (of_kind(on, kind) for kind in KINDS)
    assert [b["spec"]["policyName"] for b in bindings] == [p["metadata"]["name"] for p in policies]


@pytest.mark.slow
def test_trusted_users_are_named_beside_the_operator(chart: Any) -> None:
    """A backup tool that restores pods with their labels."""
    items = render(chart, {"admissionPolicies": {"enabled": True, "trustedUsers": ["velero"]}})
    pods, leases, _ = (policy["spec"]["matchConditions"][0] for policy in of_kind(items, KINDS[0]))
    trusted = "!(request.userInfo.username in ['system:serviceaccount:ballast-system:ballast', 'velero'"
    assert pods["expression"] == f"{trusted}])"
    assert leases["expression"].startswith(trusted)


@pytest.mark.slow
def test_a_release_with_the_jobs_of_one_namespace_forbids_no_other_operator_its_pods(chart: Any) -> None:
    """The policies trust its own operator alone: they hold for that namespace, within the selector."""
    chosen = {"key": "team", "operator": "Exists"}
    policies = {"enabled": True, "namespaceSelector": {"matchExpressions": [chosen]}}
    items = render(chart, {"watchNamespace": "research", "admissionPolicies": policies})
    watched = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": ["research"]}
    bindings = of_kind(items, KINDS[1])
    assert len(bindings) == 3
    for binding in bindings:
        selector = binding["spec"]["matchResources"]["namespaceSelector"]
        assert selector == {"matchExpressions": [chosen, watched]}
    (binding, *_) = of_kind(
        render(chart, {"watchNamespace": "research", "admissionPolicies": {"enabled": True}}), KINDS[1]
    )
    assert binding["spec"]["matchResources"]["namespaceSelector"] == {"matchExpressions": [watched]}


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
    labels = {"ballast.dev/entity": "vision", "ballast.dev/max-weight": "2.5", "ballast.dev/user": "ann"}
    with control_plane.client() as api:
        client.CoreV1Api(api).patch_namespace(here, {"metadata": {"labels": labels}})

    def ask(**spec: Any) -> str:
        return cluster.refusal("eve", lambda api: make_job(api, here, **spec))

    eventually(lambda: "set spec.entity to vision" in ask(entity="speech", weight=1.0), "the labels")
    assert ask(entity="vision", user="ann", weight=2.5) == ""
    assert "have a weight of at most 2.5" in ask(entity="vision", user="ann", weight=3.0)
    assert "set spec.user to ann" in ask(entity="vision", user="bob")


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
