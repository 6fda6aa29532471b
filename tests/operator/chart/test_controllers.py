"""The chart's ValidatingAdmissionPolicies keep no controller of the control plane from its work."""

import functools
from typing import Any

import pytest
from kubernetes import client

from tests.operator.api.objects import JOB, changed
from tests.operator.chart.conftest import JOBS, Cluster, make_job, make_lease, make_pod
from tests.support.control_plane import ControlPlane, apply_crds
from tests.support.waiting import eventually

pytestmark = pytest.mark.api

pytest.importorskip("helm_python", reason="Helm as a library has no wheel for this machine")

COLLECTOR = "system:serviceaccount:kube-system:generic-garbage-collector"
ONE_IDENTITY = "system:kube-controller-manager"
"""Who collects garbage; the second where all controllers have one name."""

CONTROLLERS = (
    COLLECTOR,
    ONE_IDENTITY,
    *(
        f"system:serviceaccount:kube-system:{name}"
        for name in (
            "disruption-controller",
            "namespace-controller",
            "node-controller",
            "pod-garbage-collector",
            "resourcequota-controller",
            "storage-version-migrator-controller",
            "taint-eviction-controller",
        )
    ),
    "system:kube-scheduler",
    "system:node:fast-0",
)


def dependants(api: client.ApiClient, namespace: str, job: str) -> list[Any]:
    """Makes a job and what the operator makes for one; how to read each of the latter."""
    jobs = client.CustomObjectsApi(api)
    body = changed(changed(JOB, "metadata.namespace", namespace), "metadata.name", job)
    made = jobs.create_namespaced_custom_object(*JOBS, namespace, "trainingjobs", body)
    owner = {"apiVersion": "ballast.dev/v1alpha1", "kind": "TrainingJob", "name": job, "controller": True}
    owner |= {"uid": made["metadata"]["uid"], "blockOwnerDeletion": True}
    metadata = {"name": job, "labels": {"ballast.dev/job": job}, "ownerReferences": [owner]}
    make_pod(api, namespace, dry_run=None, **metadata)
    make_lease(api, namespace, dry_run=None, **metadata)
    core, access, leases = (
        client.CoreV1Api(api),
        client.RbacAuthorizationV1Api(api),
        client.CoordinationV1Api(api),
    )
    core.create_namespaced_config_map(namespace, {"metadata": metadata})
    access.create_namespaced_role(namespace, {"metadata": metadata})
    reads = (
        core.read_namespaced_pod,
        core.read_namespaced_config_map,
        access.read_namespaced_role,
        leases.read_namespaced_lease,
    )
    return [functools.partial(read, job, namespace) for read in reads]


def found(read: Any) -> Any:
    """What is read; None: there is no such object."""
    try:
        return read()
    except client.ApiException as error:
        if error.status != 404:
            raise
        return None


def delete_job(api: client.ApiClient, namespace: str, job: str, cascade: str) -> Any:
    """Has it deleted; how to read it."""
    jobs, where = client.CustomObjectsApi(api), (*JOBS, namespace, "trainingjobs", job)
    jobs.delete_namespaced_custom_object(*where, propagation_policy=cascade)
    return functools.partial(jobs.get_namespaced_custom_object, *where)


def give_to_team(api: client.ApiClient, namespace: str) -> None:
    """From now on no job like those that it has could be made there."""
    labels = {"ballast.dev/entity": "speech", "ballast.dev/max-weight": "0"}
    client.CoreV1Api(api).patch_namespace(namespace, {"metadata": {"labels": labels}})


def test_the_control_planes_controllers_are_never_in_the_way_of_a_policy(cluster: Cluster) -> None:
    """Under whatever name they write; but their name makes no trainers of a Deployment's pods."""
    here = cluster.namespace
    with cluster.as_user(cluster.operator) as api:
        dependants(api, here, "mine")
        # More than a later release, or another value, lets be written.
        too_long = {"metadata": {"annotations": {"ballast.dev/report": "x" * 2048}}}
        client.CoordinationV1Api(api).patch_namespaced_lease("mine", here, too_long)
        give_to_team(api, here)
        eventually(lambda: cluster.refusal("eve", lambda a: make_job(a, here)), "the labels of the namespace")

    def writes(api: client.ApiClient, metadata: dict[str, Any]) -> None:
        core, leases, jobs = (
            client.CoreV1Api(api),
            client.CoordinationV1Api(api),
            client.CustomObjectsApi(api),
        )
        body: dict[str, Any] = {"metadata": metadata}
        core.patch_namespaced_pod("mine", here, body, dry_run="All")
        leases.patch_namespaced_lease("mine", here, body, dry_run="All")
        jobs.patch_namespaced_custom_object(*JOBS, here, "trainingjobs", "mine", body, dry_run="All")
        core.patch_namespaced_pod_status("mine", here, {"status": {"phase": "Failed"}}, dry_run="All")
        core.create_namespaced_pod_eviction("mine", here, {"metadata": {"name": "mine"}}, dry_run="All")
        core.delete_namespaced_pod("mine", here, dry_run="All")
        leases.delete_namespaced_lease("mine", here, dry_run="All")
        jobs.delete_namespaced_custom_object(*JOBS, here, "trainingjobs", "mine", dry_run="All")

    for user in CONTROLLERS:
        assert cluster.refusal(user, lambda api: writes(api, {"annotations": {}})) == "", user
    for user in (COLLECTOR, ONE_IDENTITY):
        assert cluster.refusal(user, lambda api: writes(api, {"ownerReferences": []})) == "", user
        assert cluster.refusal(user, lambda api: writes(api, {"finalizers": ["foregroundDeletion"]})) == ""
        assert "only Ballast's operator sets them" in cluster.refusal(user, lambda api: make_pod(api, here))


def test_jobs_go_however_their_deletion_cascades_and_so_does_their_namespace(cluster: Cluster) -> None:
    """By the real garbage collector; also where a job's team or weight would not be allowed any more."""
    here = f"{cluster.namespace}-more"
    with cluster.as_user(cluster.operator) as api:
        core = client.CoreV1Api(api)
        core.create_namespace({"metadata": {"name": here}})
        try:
            eventually(lambda: core.list_namespaced_service_account(here).items, "its account for pods")
            owned = {name: dependants(api, here, name) for name in ("orphan", "foreground", "background")}
            dependants(api, here, "last")
            give_to_team(api, here)
            eventually(lambda: cluster.refusal("eve", lambda a: make_job(a, here)), "the labels")
            # The collector has seen what the first one has once it has collected what was made later: an
            # object of whose owner it hears too late is collected although it was orphaned.
            for name, reads in reversed(owned.items()):
                job = delete_job(api, here, name, name.capitalize())
                eventually(lambda job=job: found(job) is None, f"job {name} to be gone")
                if name == "orphan":
                    assert [read().metadata.owner_references for read in reads] == [None] * 4
                else:
                    eventually(lambda reads=reads: not any(map(found, reads)), f"what {name} had to be gone")
            delete_job(api, here, "last", "Orphan")
        finally:
            core.delete_namespace(here)
        eventually(lambda: found(lambda: core.read_namespace(here)) is None, "the namespace to be gone")


def test_the_kind_can_be_deleted_and_made_again_while_jobs_are_orphaned(
    cluster: Cluster, control_plane: ControlPlane
) -> None:
    """A job that never went kept the kind, and then no job could be made in the whole cluster."""
    if control_plane.cluster is None:
        pytest.skip("all jobs of the cluster would go")
    here, kind = cluster.namespace, "trainingjobs.ballast.dev"
    with cluster.as_user(cluster.operator) as api:
        dependants(api, here, "mine")
        delete_job(api, here, "mine", "Orphan")
        kinds = client.ApiextensionsV1Api(api)
        kinds.delete_custom_resource_definition(kind)
        try:
            eventually(
                lambda: found(lambda: kinds.read_custom_resource_definition(kind)) is None, "the kind to go"
            )
        finally:
            apply_crds(control_plane)

        def makes() -> bool:
            try:
                make_job(api, here)
            except client.ApiException as error:
                assert error.status == 404, error  # it is not served yet
                return False
            return True

        eventually(makes, "a job to be made")
