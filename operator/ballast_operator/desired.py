"""The objects that a job owns, each with the job's labels and the job as owner.

A pod is the user's template with the operator's additions.
"""

import copy
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from ballast_policies.contract.messages import (
    CONFIG_KEY,
    HANDOVER_ENV,
    JOB_LABEL,
    LAUNCH_LABEL,
    PLAN_KEY,
    POD_IP_ENV,
    POD_RANKS_ENV,
    RANK_LABEL,
    RANK_RESTARTS,
    RANK_RESTARTS_ENV,
    RENDEZVOUS_PORT,
    RENEW_ENV,
    RENEW_SECONDS,
    lease_name,
    plan_config_map_name,
    rendezvous_config_map_name,
    rendezvous_key,
)
from ballast_policies.contract.plan import Plan

from ballast_operator.api.job_allocation import JobAllocation, is_coming
from ballast_operator.api.rbac import trainer_rules
from ballast_operator.kube.kinds import (
    CONFIG_MAP,
    JOB,
    LEASE,
    POD,
    POD_GROUP,
    ROLE,
    ROLE_BINDING,
    SERVICE_ACCOUNT,
    Kind,
)
from ballast_operator.views.clock import Time, show_micro
from ballast_operator.views.job import PLAN_WRITTEN_ANNOTATION, JobView
from ballast_operator.views.node_constraints import gpu_toleration
from ballast_operator.views.nodes import pod_gpus
from ballast_operator.views.notices import seconds_to_save
from ballast_operator.views.pod import USUAL_GRACE_SECONDS
from ballast_operator.views.spec import JobSpec

MANAGED_BY = {"app.kubernetes.io/managed-by": "ballast-operator"}


def owned(view: JobView, kind: Kind, name: str, **content: Any) -> dict[str, Any]:
    """An object of the job; the garbage collector deletes it with the job, with or without an operator."""
    owner = JOB.object(name=view.name, uid=view.uid, controller=True, blockOwnerDeletion=False)
    metadata = {
        "namespace": view.key[0],
        "name": name,
        "labels": {JOB_LABEL: view.name, **MANAGED_BY},
        "ownerReferences": [owner],
    }
    return kind.object(metadata=metadata, **content)


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
    """The ConfigMap with ``plan``; refused by the API server where ``resource_version`` is not the newest.

    Its last step stays that of the launch: the ranks end there, whatever the spec says by then.
    """
    steps = view.launched_steps or spec.config.total_steps
    config = spec.config.model_copy(update={"total_steps": steps})
    data = {PLAN_KEY: plan.to_json(), CONFIG_KEY: config.to_json()}
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
    """Name for the next launch: the job, and the priority class of its pods, which a group keeps."""
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
    """Variables of the pod with this number at launch: torchrun's, and what the client library reads.

    ``PET_*`` are torchrun's own options: a pod of several GPUs runs ``torchrun``, which starts one process
    for each and sets the ranks; with one GPU a pod both forms work. Rank 0 hears its own address from its
    pod; for the others' ConfigMap, written once rank 0 has one, the kubelet waits with their start, their
    images pulled. ``save_seconds``: from the order to save and stop until the pods are deleted.
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


COMMAND = ["ballast-train", "pod"]
"""Command of the first container unless the template sets one."""

TERMINATION_LOG = "/dev/termination-log"
"""File in which Kubernetes reads a container's termination message unless the template sets a path."""

STAYS = {
    "karpenter.sh/do-not-disrupt": "true",
    "cluster-autoscaler.kubernetes.io/safe-to-evict": "false",
}
"""Annotations unless the template sets them: autoscalers take no node from under a gang to save money, and
drain a node that is taken back only once the gang has left it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NewNode:
    """Target of a pod whose node does not exist yet: an autoscaler sees it wait, and makes one.

    Attributes:
        node_selector: labels of the pool's nodes.
        not_on: nodes of the pool that other gangs hold, or are promised.
    """

    node_selector: Mapping[str, str] = dataclasses.field(default_factory=dict)
    not_on: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodOptions:
    """Options of a pod beside its job's template and its place in the gang.

    Attributes:
        renew_seconds: how often its trainer renews the Lease.
        save_seconds: how long its trainer may take to save and stop.
        environment: of its trainer, in addition.
        new_node: where it goes, if its node does not exist yet.
    """

    renew_seconds: float = RENEW_SECONDS
    save_seconds: float = math.inf
    environment: Sequence[Mapping[str, Any]] = ()
    new_node: NewNode = NewNode()


NO_OPTIONS = PodOptions()


def pod_object(
    view: JobView,
    spec: JobSpec,
    allocation: JobAllocation,
    *,
    number: int,
    pod: str,
    gpu_resource: str,
    options: PodOptions = NO_OPTIONS,
) -> dict[str, Any]:
    """The pod called ``pod``, pinned to its node in ``allocation``; kube-scheduler still binds it."""
    renewal = {"name": RENEW_ENV, "value": f"{options.renew_seconds:g}"}
    more_environment = (renewal, *options.environment)
    template = copy.deepcopy(dict(spec.template))
    body = owned(view, POD, pod, spec=dict(template.get("spec") or {}))
    metadata, wanted = body["metadata"], template.get("metadata") or {}
    ours = {
        **metadata["labels"],
        JOB_LABEL: view.name,
        LAUNCH_LABEL: str(allocation.launch),
        RANK_LABEL: str(number),
    }
    metadata["labels"] = {**(wanted.get("labels") or {}), **ours}
    metadata["annotations"] = {**STAYS, **(wanted.get("annotations") or {})}
    content = body["spec"]
    containers = content.get("containers") or [{"name": "trainer"}]
    grace = content.get("terminationGracePeriodSeconds")
    stop_seconds = USUAL_GRACE_SECONDS if grace is None else int(grace)
    handover = stop_seconds - seconds_to_save(stop_seconds, options.save_seconds)
    if handover > 0 and spec.grow and not spec.is_script and spec.smallest_gang < spec.largest_gang:
        # An eviction of one pod: the operator may release its ranks.
        more_environment = (*more_environment, {"name": HANDOVER_ENV, "value": f"{handover:g}"})
    if spec.holds_copies:
        more_environment = (*more_environment, {"name": RANK_RESTARTS_ENV, "value": str(RANK_RESTARTS)})
    ranks = allocation.gpus_per_pod
    trainer = _trainer(view, spec, containers[0], gpu_resource, stop_seconds, ranks, more_environment)
    if ranks > 1:
        trainer = with_shared_memory(content, trainer, ranks)
    content["containers"] = [trainer, *containers[1:]]
    tolerations, own = list(content.get("tolerations") or []), gpu_toleration(gpu_resource)
    content["tolerations"] = tolerations if own in tolerations else [*tolerations, own]
    if allocation.pod_group:
        content["schedulingGroup"] = {"podGroupName": allocation.pod_group}
    content["restartPolicy"] = "Never"
    content["serviceAccountName"] = trainer_account(view.name)
    node, affinity = allocation.node_of[pod], content.get("affinity") or {}
    if is_coming(node):
        content["nodeSelector"] = {**(content.get("nodeSelector") or {}), **options.new_node.node_selector}
        operator, names = "NotIn", options.new_node.not_on
    else:
        operator, names = "In", (node,)
    content["affinity"] = _narrowed(affinity, operator, names)
    body["spec"] = restricted(content)
    return body


def _narrowed(affinity: dict[str, Any], operator: str, nodes: Sequence[str]) -> dict[str, Any]:
    """The affinity with every required node term narrowed to, or kept from, these nodes; none: unchanged."""
    fields = [{"key": "metadata.name", "operator": operator, "values": [node]} for node in nodes]
    if not fields:
        return affinity
    node_affinity = dict(affinity.get("nodeAffinity") or {})
    required = node_affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or [{}]
    node_affinity["requiredDuringSchedulingIgnoredDuringExecution"] = {
        "nodeSelectorTerms": [{**term, "matchFields": fields} for term in terms]
    }
    return {**affinity, "nodeAffinity": node_affinity}


def _trainer(
    view: JobView,
    spec: JobSpec,
    container: dict[str, Any],
    gpu_resource: str,
    stop_seconds: int,
    ranks: int,
    more_environment: Sequence[Mapping[str, Any]],
) -> dict[str, Any]:
    container = dict(container)
    if not spec.is_script and not container.get("command") and not container.get("args"):
        container["command"] = list(COMMAND)
    ours: list[dict[str, Any]] = [
        {"name": "BALLAST_JOB", "value": view.name},
        {"name": "BALLAST_JOB_UID", "value": view.uid},
        {"name": "BALLAST_NAMESPACE", "value": view.key[0]},
        {"name": "BALLAST_POD_NAME", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}},
        {"name": POD_IP_ENV, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}},
        {"name": POD_RANKS_ENV, "value": str(ranks)},
        {"name": "BALLAST_CHECKPOINT_PATH", "value": spec.config.checkpoint.path or ""},
        {
            "name": "BALLAST_TERMINATION_LOG",
            "value": container.get("terminationMessagePath", TERMINATION_LOG),
        },
        # How long the trainer has to save after SIGTERM: an eviction, a spot notice.
        {"name": "BALLAST_STOP_SECONDS", "value": str(max(1, stop_seconds))},
        *(dict(variable) for variable in more_environment),
    ]
    users = list(container.get("env") or [])
    named = {variable["name"] for variable in users}
    container["env"] = [*(variable for variable in ours if variable["name"] not in named), *users]
    container["resources"] = _with_gpus(container, gpu_resource, ranks)
    # A process that ends without a message of its own is explained by the last lines of its log.
    container.setdefault("terminationMessagePolicy", "FallbackToLogsOnError")
    return container


def _with_gpus(container: Mapping[str, Any], gpu_resource: str, ranks: int) -> dict[str, Any]:
    resources = dict(container.get("resources") or {})
    for part in ("requests", "limits"):
        resources[part] = {**(resources.get(part) or {}), gpu_resource: str(ranks)}
    return resources


def counted_pod(spec: JobSpec, gpu_resource: str) -> dict[str, Any]:
    """The PodSpec of the job's template with its GPUs, for those who count what its pods ask for."""
    content = copy.deepcopy(dict(spec.template.get("spec") or {}))
    first, *others = content.get("containers") or [{"name": "trainer"}]
    resources = _with_gpus(first, gpu_resource, spec.gpus_per_pod)
    return {**content, "containers": [{**first, "resources": resources}, *others]}


SHARED_MEMORY_PATH = "/dev/shm"
VOLUME = "ballast-shared-memory"
MEBIBYTES_PER_RANK = 1024
"""Limit of the volume, for each rank of the pod."""


def with_shared_memory(content: dict[str, Any], container: dict[str, Any], ranks: int) -> dict[str, Any]:
    """The container with the volume mounted, which is added to the pod's spec ``content``.

    Unchanged where the template mounts something there, or has a volume of this name.
    """
    mounts, volumes = list(container.get("volumeMounts") or []), list(content.get("volumes") or [])
    mounted = {str(mount.get("mountPath", "")).rstrip("/") for mount in mounts}
    if SHARED_MEMORY_PATH in mounted or VOLUME in {volume.get("name") for volume in volumes}:
        return container
    empty = {"medium": "Memory", "sizeLimit": f"{ranks * MEBIBYTES_PER_RANK}Mi"}
    content["volumes"] = [*volumes, {"name": VOLUME, "emptyDir": empty}]
    return {**container, "volumeMounts": [*mounts, {"name": VOLUME, "mountPath": SHARED_MEMORY_PATH}]}


TRAINER_GROUP = 65532
"""Group of the user in Ballast's images; volumes are made writable for it."""

_CONTEXT = "securityContext"
_CAPABILITIES = "capabilities"
_ROOT = 0
_POD_DEFAULTS = {
    "seccompProfile": {"type": "RuntimeDefault"},
    # Checkpoint volumes belong to root when they are made.
    "fsGroup": TRAINER_GROUP,
    "fsGroupChangePolicy": "OnRootMismatch",
}
_NEEDS_ESCALATION = ("SYS_ADMIN", "CAP_SYS_ADMIN", "ALL")


def restricted(content: dict[str, Any]) -> dict[str, Any]:
    """The PodSpec with the fields that the profile `restricted` asks for, except where it sets them.

    Each is filled in by itself, so that a template overrides one without losing the others; what has the
    wrong type is left as it is: the API server names it.
    A container that asks for more (``privileged``, ``SYS_ADMIN``, user 0) keeps what it asks for; Pod
    Security admission decides whether the namespace allows it.
    """
    lists = {
        name: [_container(one) for one in content[name]]
        for name in ("initContainers", "containers")
        if isinstance(content.get(name), list | tuple)
    }
    own = content.get(_CONTEXT)
    as_root = isinstance(own, Mapping) and own.get("runAsUser") == _ROOT
    return {**_filled(content, _CONTEXT, {"runAsNonRoot": not as_root, **_POD_DEFAULTS}), **lists}


def _container(container: Any) -> Any:
    if not isinstance(container, Mapping):
        return container
    own = container.get(_CONTEXT) or {}
    if not isinstance(own, Mapping):
        return container
    capabilities = own.get(_CAPABILITIES)
    added = capabilities.get("add") if isinstance(capabilities, Mapping) else ()
    added = added if isinstance(added, list | tuple) else ()
    defaults: dict[str, Any] = {}
    # The API server refuses allowPrivilegeEscalation: false beside either of these.
    if not own.get("privileged") and not any(one in _NEEDS_ESCALATION for one in added):
        defaults["allowPrivilegeEscalation"] = False
    if own.get("runAsUser") == _ROOT:
        defaults["runAsNonRoot"] = False
    filled = {**defaults, **_filled(own, _CAPABILITIES, {"drop": ["ALL"]})}
    return {**container, _CONTEXT: filled}


def _filled(owner: Mapping[str, Any], name: str, defaults: Mapping[str, Any]) -> dict[str, Any]:
    """``owner`` with the mapping called ``name`` completed by ``defaults``."""
    given = owner.get(name)
    if given is not None and not isinstance(given, Mapping):
        return dict(owner)
    return {**owner, name: {**defaults, **(given or {})}}


def gpus_elsewhere(template: Mapping[str, Any], gpu_resources: Sequence[str], gpus_per_pod: int = 1) -> str:
    """The field that asks for GPUs beside those of the pod's ranks, and what to change; empty: none does."""
    content = template.get("spec") or {}
    for path, container in _containers(content):
        first = path == "containers[0]"
        resources = container.get("resources") or {}
        for part in ("limits", "requests"):
            for name in gpu_resources:
                value = (resources.get(part) or {}).get(name)
                if value is None or str(value) in ("0", str(gpus_per_pod) if first else "0"):
                    continue
                return (
                    f"spec.template.spec.{path}.resources.{part}[{name}]: {str(value)[:40]!r}; the first "
                    f"container of a pod gets parallelism.gpusPerPod={gpus_per_pod} GPUs, and no other "
                    "container any. To fix: leave it out; pipeline.maxStages says how many GPUs the job has"
                )
    return ""


def changed_by_admission(
    wanted: Mapping[str, Any], made: Mapping[str, Any], gpu_resources: Sequence[str]
) -> str:
    """Effect of admission that hides the pod from its job, or lets it take other GPUs; empty: none.

    A pod that a webhook lets onto other nodes takes GPUs there that another gang is given.
    A LimitRange gives its default to each container that does not name the resource; a webhook may add a
    container. Nobody would count these GPUs, and another gang would wait for them on that node. Of a pod that
    a webhook leaves without its GPUs, the scheduler would give them away again.
    """
    for name in gpu_resources:
        asked, has = (pod_gpus(dict(pod), name) for pod in (wanted, made))
        if has == asked:
            continue
        before, after = (dict(_asking(pod, name)) for pod in (wanted, made))
        other = sorted(who for who in before | after if before.get(who) != after.get(who))
        changed = ", ".join(f"{who} {after.get(who, 0)}" for who in other)
        return (
            f"a LimitRange or a webhook gives the pod {has} {name} instead of {asked}: "
            f"{changed[:500]}. To fix: except the job's pods from it, or give the template's "
            f"further containers resources.limits[{name}]=0"
        )
    fields = [field for term in _terms(wanted)[:1] for field in term.get("matchFields") or ()]
    there = [term.get("matchFields") or () for term in _terms(made)] or [()]
    if made["spec"].get("nodeName") or any(field not in found for found in there for field in fields):
        return (
            "a webhook changes the pod's node affinity or nodeName, and it may run on other nodes than those "
            "whose GPUs it is given. To fix: except the job's pods from the webhook"
        )
    own, has = wanted["metadata"], made["metadata"]
    labels, owners = has.get("labels") or {}, has.get("ownerReferences") or ()
    known_by = (JOB_LABEL, LAUNCH_LABEL, RANK_LABEL)
    lost = [f"label {name}" for name in known_by if labels.get(name) != own["labels"].get(name)]
    lost += ["name"] * (has["name"] != own["name"])
    left = {owner.get("uid") for owner in owners if owner.get("controller")}
    lost += ["ownerReferences"] * any(owner["uid"] not in left for owner in own["ownerReferences"])
    if lost:
        return (
            f"a webhook changes the pod's {', '.join(lost)}, by which its job knows it: nobody would "
            "count its GPUs or delete it. To fix: except the job's pods from the webhook"
        )
    return ""


def _terms(pod: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Terms of the node affinity that is required."""
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity")) or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    return required.get("nodeSelectorTerms") or []


def _asking(pod: Mapping[str, Any], gpu_resource: str) -> Iterator[tuple[str, str]]:
    """(container by name, how many GPUs it asks for)."""
    for _, container in _containers(pod.get("spec") or {}):
        resources = container.get("resources") or {}
        limits, requests = (resources.get(part) or {} for part in ("limits", "requests"))
        count = requests.get(gpu_resource, limits.get(gpu_resource))
        if count is not None and str(count) != "0":
            yield f"container {container.get('name')}", str(count)


def _containers(content: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(content.get(kind) or []):
            yield f"{kind}[{index}]", container
