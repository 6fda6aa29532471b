"""Notices: how a node, or the cluster on behalf of a pod, says that it is about to go, and by when.

A handler of the cloud marks the node with a taint or a condition
(:mod:`~ballast_operator.kube.kept_fields`); an eviction marks the pod. Where the node states its time, by
annotation, that counts; else the time since the mark, or since it was first seen, and how long such a node
lasts.
"""

import dataclasses
import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ballast_operator.api.node_pool import CapacityType
from ballast_operator.kube.kept_fields import (
    CONDITIONS,
    KARPENTER_ENDS_AT_ANNOTATION,
    LEAVES_AT_ANNOTATION,
    TAINTS,
    NoticeKind,
)
from ballast_operator.views.clock import Time, parsed
from ballast_operator.views.node_constraints import Taint

_SPOT, _ON_DEMAND = CapacityType.SPOT, CapacityType.ON_DEMAND

LABELS: Mapping[str, Mapping[str, CapacityType]] = {
    "ballast.dev/capacity-type": {"spot": _SPOT, "ondemand": _ON_DEMAND},
    "karpenter.sh/capacity-type": {"spot": _SPOT, "ondemand": _ON_DEMAND, "reserved": _ON_DEMAND},
    "eks.amazonaws.com/capacitytype": {"spot": _SPOT, "ondemand": _ON_DEMAND, "capacityblock": _ON_DEMAND},
    "cloud.google.com/gke-spot": {"true": _SPOT, "false": _ON_DEMAND},
    "cloud.google.com/gke-preemptible": {"true": _SPOT, "false": _ON_DEMAND},
    "cloud.google.com/gke-provisioning": {"spot": _SPOT, "preemptible": _SPOT, "standard": _ON_DEMAND},
    "kubernetes.azure.com/scalesetpriority": {"spot": _SPOT, "regular": _ON_DEMAND},
    "node.kubernetes.io/lifecycle": {"spot": _SPOT, "ondemand": _ON_DEMAND, "normal": _ON_DEMAND},
}
"""Label, in lower case -> its values, in lower case without hyphens -> what they say; the first one counts.

ballast.dev's own; Karpenter's; EKS's; GKE's three; AKS's; and the one of kops and others.
"""


def capacity_type_of(labels: Mapping[str, str]) -> tuple[CapacityType, str] | None:
    """(what the labels say, the label that says so); None: none does."""
    found = {key.lower(): (key, value) for key, value in labels.items() if "/" in key}
    for name, values in LABELS.items():
        if name in found:
            key, value = found[name]
            said = values.get(value.lower().replace("-", "").replace("_", ""))
            if said is not None:
                return said, f"{key}={value}"
    return None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """A node, or a pod, is about to go.

    Attributes:
        by: the mark, as text.
        seconds: how long it lasts from the mark on.
        since: when the mark was put there; None: it does not say.
        at: when it goes, where that is stated.
        latest: when it goes at the latest, though it may go ``seconds`` from the mark on; None: not known.
    """

    by: str
    seconds: float = 0.0
    since: Time | None = None
    at: Time | None = None
    latest: Time | None = None

    def goes_at(self, first_seen: Time) -> Time:
        """Time when it goes; ``first_seen``: when the mark was first seen here."""
        if self.at is not None:
            return self.at
        since = first_seen if self.since is None else min(self.since, first_seen)
        lasts = since + datetime.timedelta(seconds=self.seconds)
        return lasts if self.latest is None else min(lasts, self.latest)


def read_leaving(
    taints: Sequence[Taint],
    conditions: Iterable[Mapping[str, Any]],
    annotations: Mapping[str, str],
    labels: Mapping[str, str],
) -> Leaving | None:
    """Reason and time of a node's leaving, by the mark that leaves it the least time; None: it stays.

    Karpenter's limit of a drain counts as the time of a node that is no spot machine by its labels: those may
    be taken back before.
    """
    found = [
        Leaving(by=f"taint {taint} ({kind.means})", seconds=kind.seconds, since=_since(taint))
        for taint in taints
        for kind in TAINTS
        if kind.matches(taint.key)
    ]
    found += [
        Leaving(
            by=f"condition {condition['type']} {condition.get('reason') or ''}".strip() + f" ({kind.means})",
            seconds=kind.seconds,
            since=parsed(condition.get("lastTransitionTime")),
        )
        for condition in conditions
        for kind in CONDITIONS
        if _says_so(kind, condition)
    ]
    if not found:
        return None
    first = min(found, key=lambda leaving: leaving.seconds)
    stated = parsed(annotations.get(LEAVES_AT_ANNOTATION))
    ends = parsed(annotations.get(KARPENTER_ENDS_AT_ANNOTATION))
    if stated is not None or ends is None:
        return dataclasses.replace(first, at=stated)
    kind = capacity_type_of(labels)
    spot = kind is not None and kind[0] is CapacityType.SPOT
    return dataclasses.replace(first, latest=ends) if spot else dataclasses.replace(first, at=ends)


def _says_so(kind: NoticeKind, condition: Mapping[str, Any]) -> bool:
    if condition.get("status") != "True" or not kind.matches(condition.get("type", "")):
        return False
    return not kind.reasons or str(condition.get("reason") or "").startswith(kind.reasons)


LEAST_SAVING_SECONDS = 15.0
"""Kept of a notice for saving, where half of it is less: a shorter notice leaves no time for a shrink."""


def seconds_to_save(notice: float, stop_seconds: float) -> float:
    """Seconds of a notice that are kept for saving; until then a shrink may take the gang off the nodes.

    ``notice``: seconds from the notice to the end. ``stop_seconds``: how long a trainer may take to save and
    stop.
    """
    return min(stop_seconds, max(LEAST_SAVING_SECONDS, notice / 2))


def evicted(deletion: str | None, reason: str) -> Leaving:
    """Leaving of a pod that the cluster is to end."""
    return Leaving(by=f"eviction{f' ({reason})' if reason else ''}", seconds=30.0, at=parsed(deletion))


NODE_DELETED = Leaving(by="deletion of its Node object", seconds=40.0)
"""Notice of pods that are bound to a node which is not there: they may run on, and Kubernetes deletes them
so long after (the quarantine of kube-controller-manager's ``podgc``) unless the node comes back."""


def deleted(deletion: str | None) -> Leaving | None:
    """Leaving of a pod that is being deleted; None: it is not. ``deletion``: when its grace ends."""
    return Leaving(by="deletion of a pod", at=parsed(deletion)) if deletion else None


def _since(taint: Taint) -> Time | None:
    """Time of the taint: Cluster Autoscaler writes the seconds since 1970 as its value."""
    if taint.key == "ToBeDeletedByClusterAutoscaler" and taint.value.isdecimal() and len(taint.value) < 12:
        return datetime.datetime.fromtimestamp(int(taint.value), tz=datetime.UTC)
    return parsed(taint.added)
