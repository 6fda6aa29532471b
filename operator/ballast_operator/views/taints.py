"""Taints of nodes, and which of them the pods of a job tolerate: as kube-scheduler compares them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
"""Effects that keep a pod from being started on a node."""

GONE_KEYS = frozenset({"node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown"})
"""Taints of a node that has gone already: no gang is started there, whatever its template tolerates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """One taint; printed as kubectl writes it. ``added``: when, RFC 3339; empty: it does not say."""

    key: str
    value: str = ""
    effect: str
    added: str = ""

    def __str__(self) -> str:
        value = f"={self.value}" if self.value else ""
        return f"{self.key}{value}:{self.effect}"


def read_taints(spec: Mapping[str, Any]) -> tuple[Taint, ...]:
    """The taints in a node's spec, in the order of their text."""
    found = [
        Taint(
            key=taint.get("key", ""),
            value=taint.get("value") or "",
            effect=taint.get("effect", ""),
            added=taint.get("timeAdded") or "",
        )
        for taint in spec.get("taints") or []
    ]
    return tuple(sorted(found, key=str))


def tolerates(tolerations: Sequence[Mapping[str, Any]], taint: Taint) -> bool:
    """Whether one of a pod's ``tolerations`` matches the taint.

    An empty key or effect matches every one; the operator is Equal (also where it is empty) or Exists.
    """
    return any(_matches(toleration, taint) for toleration in tolerations)


def _matches(toleration: Mapping[str, Any], taint: Taint) -> bool:
    if toleration.get("effect") and toleration["effect"] != taint.effect:
        return False
    if toleration.get("key") and toleration["key"] != taint.key:
        return False
    match toleration.get("operator") or "Equal":
        case "Equal":
            return (toleration.get("value") or "") == taint.value
        case "Exists":
            return True
        case _:
            return False


def blocking(
    taints: Sequence[Taint], tolerations: Sequence[Mapping[str, Any]], resource: str = ""
) -> tuple[Taint, ...]:
    """The taints that keep a trainer pod with these tolerations away.

    Every trainer pod tolerates the key ``resource``, the GPUs that it asks for: nodes with GPUs are often
    kept for such pods in this way (the admission plugin ExtendedResourceToleration).
    """
    known = [*tolerations, gpu_toleration(resource)] if resource else tolerations
    return tuple(
        taint for taint in taints if taint.effect in BLOCKING_EFFECTS and not tolerates(known, taint)
    )


def gpu_toleration(resource: str) -> dict[str, str]:
    """What a trainer pod tolerates beside what its template says."""
    return {"key": resource, "operator": "Exists", "effect": "NoSchedule"}
