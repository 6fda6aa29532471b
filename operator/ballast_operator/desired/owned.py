"""Objects of a job beside its pods: each carries its labels and the job as owner."""

import math
from typing import Any

from ballast_policies.contract import (
    CONFIG_KEY,
    JOB_LABEL,
    PLAN_KEY,
    RENDEZVOUS_PORT,
    Plan,
    lease_name,
    plan_config_map_name,
    rendezvous_config_map_name,
    rendezvous_key,
)

from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.rbac import trainer_rules
from ballast_operator.kube.kinds import (
    CONFIG_MAP,
    JOB,
    LEASE,
    POD_GROUP,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Kind,
)
from ballast_operator.views.clock import Time, show_micro
from ballast_operator.views.job import PLAN_WRITTEN_ANNOTATION, JobView
from ballast_operator.views.spec import JobSpec

MANAGED_BY = {"app.kubernetes.io/managed-by": "ballast-operator"}


def owned(view: JobView, kind: Kind, name: str, **content: Any) -> dict[str, Any]:
    """An object of the job; the garbage collector deletes it with the job, with or without an operator."""
    return {
        "apiVersion": kind.api_version,
        "kind": kind.kind,
        "metadata": {
            "namespace": view.key[0],
            "name": name,
            "labels": {JOB_LABEL: view.name, **MANAGED_BY},
            "ownerReferences": [
                {
                    "apiVersion": JOB.api_version,
                    "kind": JOB.kind,
                    "name": view.name,
                    "uid": view.uid,
                    "controller": True,
                    "blockOwnerDeletion": False,
                }
            ],
        },
        **content,
    }


def trainer_account(job: str) -> str:
    """Name of the service account, the role and the binding of a job's pods."""
    return f"{job}-trainer"


def access_objects(view: JobView) -> tuple[tuple[Kind, dict[str, Any]], ...]:
    """Service account, role and binding: read the job's plan, renew the job's lease, nothing else."""
    name = trainer_account(view.name)
    rules = trainer_rules(view.name)
    role_ref = {"apiGroup": "rbac.authorization.k8s.io", "kind": ROLE.kind, "name": name}
    subject = {"kind": SERVICE_ACCOUNT.kind, "name": name, "namespace": view.key[0]}
    return (
        (SERVICE_ACCOUNT, owned(view, SERVICE_ACCOUNT, name)),
        (ROLE, owned(view, ROLE, name, rules=rules)),
        (ROLE_BINDING, owned(view, ROLE_BINDING, name, roleRef=role_ref, subjects=[subject])),
    )


def plan_object(
    view: JobView, spec: JobSpec, plan: Plan, *, now: Time, resource_version: str | None
) -> dict[str, Any]:
    """The ConfigMap with ``plan``; refused by the API server where ``resource_version`` is not the newest."""
    data = {PLAN_KEY: plan.to_json(), CONFIG_KEY: spec.config.to_json()}
    body = owned(view, CONFIG_MAP, plan_config_map_name(view.name), data=data)
    body["metadata"]["annotations"] = {PLAN_WRITTEN_ANNOTATION: show_micro(now)}
    if resource_version is not None:
        body["metadata"]["resourceVersion"] = resource_version
    return body


def lease_object(view: JobView, heartbeat_seconds: float) -> dict[str, Any]:
    """The lease that says how long it lasts; all else of it belongs to the trainer."""
    duration = max(1, math.ceil(heartbeat_seconds))
    return owned(view, LEASE, lease_name(view.name), spec={"leaseDurationSeconds": duration})


def pod_group_name(view: JobView, spec: JobSpec) -> str:
    """Of the next launch: the job, and the priority class of its pods, which a group keeps."""
    priority = (spec.template.get("spec") or {}).get("priorityClassName")
    return f"{view.name}.{priority}" if priority else view.name


def pod_group_object(view: JobView, allocation: JobAllocation) -> dict[str, Any]:
    """The gang as Kubernetes knows it: as many pods as it is to have are bound, or none."""
    content: dict[str, Any] = {"schedulingPolicy": {"gang": {"minCount": len(allocation.pods)}}}
    if priority := allocation.pod_group.partition(".")[2]:
        content["priorityClassName"] = priority
    return owned(view, POD_GROUP, allocation.pod_group, spec=content)


def rendezvous_object(view: JobView, allocation: JobAllocation, address: str) -> dict[str, Any]:
    """The ConfigMap with the address of rank 0 of this launch."""
    data = {rendezvous_key(allocation.launch): address}
    return owned(view, CONFIG_MAP, rendezvous_config_map_name(view.name), data=data)


def script_environment(
    view: JobView, spec: JobSpec, allocation: JobAllocation, *, pod: int, save_seconds: float
) -> list[dict[str, Any]]:
    """Variables of the pod with this number: torchrun's, and what the client library reads.

    ``PET_*`` are torchrun's own options: a pod of several GPUs runs ``torchrun``, which starts one process
    for each and sets the ranks; with one GPU a pod both forms work. Rank 0 hears its own address from its
    pod. The others refer to a ConfigMap, which the operator writes once rank 0 has an address: until then
    the kubelet waits with their start, their images pulled. ``pod``: its number at launch. ``save_seconds``:
    from the order to save and stop until the pods are deleted.
    """
    each, pods = allocation.gpus_per_pod, len(allocation.pods)
    found: dict[str, Any] = {
        "PET_NNODES": pods,
        "PET_NPROC_PER_NODE": each,
        "PET_NODE_RANK": pod,
        "PET_MASTER_PORT": RENDEZVOUS_PORT,
        "WORLD_SIZE": pods * each,
        "GROUP_RANK": pod,
        "GROUP_WORLD_SIZE": pods,
        "LOCAL_WORLD_SIZE": each,
        "MASTER_PORT": RENDEZVOUS_PORT,
        "BALLAST_SAVE_SECONDS": f"{save_seconds:g}",
        "BALLAST_TOTAL_STEPS": spec.config.total_steps,
        "BALLAST_CHECKPOINT_EVERY_STEPS": spec.config.checkpoint.steps,
        "BALLAST_CHECKPOINT_KEEP": spec.config.checkpoint.keep,
    }
    if each == 1:
        found |= {"RANK": pod, "LOCAL_RANK": 0}
    if pod == 0:
        source: dict[str, Any] = {"fieldRef": {"fieldPath": "status.podIP"}}
    else:
        name = rendezvous_config_map_name(view.name)
        source = {"configMapKeyRef": {"name": name, "key": rendezvous_key(allocation.launch)}}
    return [
        {"name": "MASTER_ADDR", "valueFrom": source},
        {"name": "PET_MASTER_ADDR", "value": "$(MASTER_ADDR)"},
        *({"name": name, "value": str(value)} for name, value in found.items()),
    ]
