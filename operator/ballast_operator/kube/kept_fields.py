"""Objects as the caches keep them: without what nothing here reads, and with equal strings stored once.

A pod of the API server takes some 15 kB as Python values, most of it bookkeeping; a pruned one takes 3.
"""

import dataclasses
import re
import sys
from collections.abc import Mapping
from typing import Any

from ballast_policies.contract.messages import JOB_LABEL, LAUNCH_LABEL, POD_IP_ENV, RANK_LABEL

from ballast_operator.kube.kinds import JOB, NODE, POD, Kind, Object


def pinned_node(pod: Object) -> str:
    """The node a pod is bound or pinned to; empty where it is neither."""
    content = pod.get("spec") or {}
    if content.get("nodeName"):
        return str(content["nodeName"])
    required = ((content.get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    ) or {}
    for term in required.get("nodeSelectorTerms") or []:
        for field in term.get("matchFields") or []:
            one = field.get("operator", "In") == "In" and len(field.get("values") or []) == 1
            if field.get("key") == "metadata.name" and one:
                return str(field["values"][0])
    return ""


LEAVES_AT_ANNOTATION = "ballast.dev/leaves-at"
"""Annotation of a node that has a notice: when it goes, RFC 3339."""

KARPENTER_ENDS_AT_ANNOTATION = "karpenter.sh/nodeclaim-termination-timestamp"
"""Annotation of a node that Karpenter drains: when it ends the last pods by force, RFC 3339. It comes from
``terminationGracePeriod`` of the NodePool, and says nothing of when a cloud takes back a spot machine."""

LEAVES_AT_ANNOTATIONS = (LEAVES_AT_ANNOTATION, KARPENTER_ENDS_AT_ANNOTATION)
"""The first that can be read counts."""

AWS_SECONDS = 120.0
"""https://docs.aws.amazon.com/AWSEC2/latest/UserGuide/spot-instance-termination-notices.html"""

GCP_SECONDS = 30.0
"""https://cloud.google.com/kubernetes-engine/docs/concepts/spot-vms#termination-grace-period"""

AZURE_SECONDS = 30.0
"""Preempt: https://learn.microsoft.com/azure/virtual-machines/linux/scheduled-events"""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NoticeKind:
    """A mark that a handler puts on a node that is about to go.

    Attributes:
        name: key of a taint, or type of a condition; one that ends with ``/`` stands for all that begin so.
        seconds: how long the node lasts from then on, where it does not state it.
        means: for people.
        reasons: of a condition: the reasons that say so, by their beginnings; empty: any.
    """

    name: str
    seconds: float
    means: str
    reasons: tuple[str, ...] = ()

    def matches(self, name: str) -> bool:
        """True if the taint's key or the condition's type is one of this kind."""
        return name.startswith(self.name) if self.name.endswith("/") else name == self.name


TAINTS = (
    NoticeKind(name="aws-node-termination-handler/", seconds=AWS_SECONDS, means="AWS takes the machine back"),
    NoticeKind(name="karpenter.sh/disrupted", seconds=AWS_SECONDS, means="Karpenter drains the node"),
    NoticeKind(name="karpenter.sh/disruption", seconds=AWS_SECONDS, means="Karpenter drains the node"),
    NoticeKind(
        name="cloud.google.com/impending-node-termination",
        seconds=GCP_SECONDS,
        means="Google Cloud takes the machine back",
    ),
    NoticeKind(name="aks-node-termination-handler/", seconds=AZURE_SECONDS, means="Azure evicts the machine"),
    NoticeKind(
        name="remediator.kubernetes.azure.com/unschedulable",
        seconds=AZURE_SECONDS,
        means="Azure drains the node",
    ),
    NoticeKind(
        name="ToBeDeletedByClusterAutoscaler",
        seconds=AWS_SECONDS,
        means="the autoscaler removes the node",
    ),
    NoticeKind(name="ballast.dev/leaving", seconds=AWS_SECONDS, means="somebody has said so"),
)
"""Taints that give notice, by key, whatever the effect."""

CONDITIONS = (
    NoticeKind(
        name="VMEventScheduled",
        seconds=AZURE_SECONDS,
        means="Azure has scheduled an event",
        reasons=("Preempt", "Terminate", "Redeploy", "Reboot"),
    ),
    NoticeKind(name="PreemptScheduled", seconds=AZURE_SECONDS, means="Azure evicts the machine"),
    NoticeKind(name="TerminateScheduled", seconds=AZURE_SECONDS, means="Azure deletes the machine"),
    NoticeKind(name="RedeployScheduled", seconds=AZURE_SECONDS, means="Azure moves the machine"),
    NoticeKind(name="RebootScheduled", seconds=AZURE_SECONDS, means="Azure restarts the machine"),
    NoticeKind(name="Terminating", seconds=AWS_SECONDS, means="the machine's provider takes it back"),
)
"""Conditions that give notice, by type, where the status is True."""


LONGEST_SHARED = 80
"""Characters of a string that is worth a look whether an equal one is there."""

_LAUNCH_AND_RANK = re.compile(r"-([0-9]{1,10})-([0-9]{1,10})")
"""Part after the job in the name of its pod: :func:`ballast_policies.contract.messages.pod_name`."""

_POD_STATUS = ("phase", "podIP", "reason", "message")
_POD_SPEC = (
    "nodeName",
    "affinity",
    "priorityClassName",
    "schedulerName",
    "terminationGracePeriodSeconds",
    "resources",
    "overhead",
)
_CONDITION = ("type", "status", "reason", "message")
_CONTAINER = ("name", "resources", "restartPolicy")


def prune_fields(kind: Kind, item: Object) -> Object:
    """The object without ``managedFields``, of pods and nodes only what is read; too deep a one as it is."""
    try:
        return _pruned(kind, item)
    except RecursionError:
        return item


def _pruned(kind: Kind, item: Object) -> Object:
    metadata = {key: value for key, value in item["metadata"].items() if key != "managedFields"}
    if kind is POD:
        metadata.pop("annotations", None)
        metadata = _with_own_labels(metadata)
        parts = {"spec": _pod_spec(item.get("spec") or {}), "status": _pod_status(item.get("status") or {})}
    elif kind is NODE:
        notes = metadata.pop("annotations", None) or {}
        if stated := {name: notes[name] for name in LEAVES_AT_ANNOTATIONS if name in notes}:
            metadata["annotations"] = stated
        spec, status = item.get("spec") or {}, item.get("status") or {}
        parts = {"spec": _some(spec, ("taints", "unschedulable")), "status": _node_status(status)}
    else:
        parts = {key: value for key, value in item.items() if key not in ("metadata", "apiVersion", "kind")}
    names = _some(item, ("apiVersion", "kind"))
    shared: dict[str, Any] = _shared({**names, "metadata": metadata, **parts})
    return shared


def _with_own_labels(metadata: dict[str, Any]) -> dict[str, Any]:
    """Metadata of a pod; those of a job's pod with the labels that its controller and its name tell.

    Whoever edits them does not take the pod out of its gang, nor put it into another.
    """
    for owner in metadata.get("ownerReferences") or ():
        if not owner.get("controller") or owner.get("kind") != JOB.kind:
            continue
        job = owner.get("name", "")
        match = _LAUNCH_AND_RANK.fullmatch(metadata["name"].removeprefix(job))
        if match:
            own = {JOB_LABEL: job, LAUNCH_LABEL: match[1], RANK_LABEL: match[2]}
            return {**metadata, "labels": {**(metadata.get("labels") or {}), **own}}
    return metadata


def _pod_spec(spec: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's container comes first, also where a webhook has put its own before it (Linkerd)."""
    found = _some(spec, _POD_SPEC)
    for part in ("containers", "initContainers"):
        if spec.get(part):
            ours_first = sorted(
                spec[part],
                key=lambda each: not any(v.get("name") == POD_IP_ENV for v in each.get("env") or ()),
            )
            found[part] = [_some(container, _CONTAINER) for container in ours_first]
    return found


def _pod_status(status: Mapping[str, Any]) -> dict[str, Any]:
    found = _some(status, _POD_STATUS)
    for part in ("conditions", "initContainerStatuses", "containerStatuses"):
        if status.get(part):
            keys = _CONDITION if part == "conditions" else ("name", "state")
            found[part] = [_some(entry, keys) for entry in status[part]]
    return found


def _node_status(status: Mapping[str, Any]) -> dict[str, Any]:
    found = _some(status, ("allocatable",))
    found["nodeInfo"] = _some(status.get("nodeInfo") or {}, ("bootID",))
    found["conditions"] = [
        {"type": c["type"], "status": c["status"]}
        if not any(kind.matches(c["type"]) for kind in CONDITIONS)
        else _some(c, (*_CONDITION[:3], "lastTransitionTime"))
        for c in status.get("conditions") or []
    ]
    return found


def _some(content: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: content[key] for key in keys if key in content}


def _shared(value: Any) -> Any:
    """The value with its keys and short strings interned."""
    if isinstance(value, str):
        return sys.intern(value) if len(value) <= LONGEST_SHARED and type(value) is str else value
    if isinstance(value, Mapping):
        return {sys.intern(key): _shared(part) for key, part in value.items()}
    if isinstance(value, list):
        return [_shared(part) for part in value]
    return value
