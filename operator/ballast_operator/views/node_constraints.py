"""Nodes that a pod's tolerations, nodeSelector and node affinity allow, as kube-scheduler compares them."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

BLOCKING_EFFECTS = ("NoSchedule", "NoExecute")
"""Effects that keep a pod from being started on a node."""

GONE_KEYS = frozenset({"node.kubernetes.io/out-of-service", "node.cloudprovider.kubernetes.io/shutdown"})
"""Taints of a node that has gone already: no gang is started there, whatever its template tolerates."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Taint:
    """Taint of a node; printed as kubectl writes it. ``added``: when, RFC 3339; empty: it does not say."""

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
    """True if one of a pod's ``tolerations`` matches the taint.

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
    """Toleration of a trainer pod beside those of its template."""
    return {"key": resource, "operator": "Exists", "effect": "NoSchedule"}


NAME_FIELD = "metadata.name"
"""The only field of a node that ``matchFields`` may name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """Expression over a label, or over the node's name."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, value: str | None) -> bool:
        """True if a label's value satisfies it; None: the node has no such label."""
        match self.operator:
            case "In":
                return value is not None and value in self.values
            case "NotIn":
                return value is None or value not in self.values
            case "Exists":
                return value is not None
            case "DoesNotExist":
                return value is None
            case "Gt" | "Lt":
                return self._compares(value)
        return False

    def _compares(self, value: str | None) -> bool:
        try:
            found, limit = int(value or ""), int(self.values[0])
        except (ValueError, IndexError):
            return False
        return found > limit if self.operator == "Gt" else found < limit


@dataclasses.dataclass(frozen=True, slots=True)
class SelectorTerm:
    """Requirements that have to hold together; an empty term allows no node."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def holds(self, name: str, labels: Mapping[str, str]) -> bool:
        """True if it allows the node."""
        if not self.labels and not self.fields:
            return False
        return all(one.holds(labels.get(one.key)) for one in self.labels) and all(
            one.key == NAME_FIELD and one.holds(name) for one in self.fields
        )


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRequirements:
    """Requirements of a template on its nodes.

    Attributes:
        selector: labels that a node has to have.
        terms: of which one has to hold; None: there are no such terms.
    """

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[SelectorTerm, ...] | None = None

    def __bool__(self) -> bool:
        """True if it asks for anything."""
        return bool(self.selector) or self.terms is not None

    def allow(self, name: str, labels: Mapping[str, str]) -> bool:
        """True if the pods may run on the node."""
        if any(labels.get(key) != value for key, value in self.selector):
            return False
        return self.terms is None or any(term.holds(name, labels) for term in self.terms)


def read_requirements(template: Mapping[str, Any]) -> NodeRequirements:
    """Requirements of a PodTemplateSpec that has been checked."""
    content = template.get("spec") or {}
    affinity = (content.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = None
    if required:
        terms = tuple(
            SelectorTerm(_requirements(term.get("matchExpressions")), _requirements(term.get("matchFields")))
            for term in required.get("nodeSelectorTerms") or []
        )
    selector = tuple(sorted((content.get("nodeSelector") or {}).items()))
    return NodeRequirements(selector=selector, terms=terms)


def _requirements(entries: Any) -> tuple[Requirement, ...]:
    return tuple(
        Requirement(entry["key"], entry["operator"], tuple(entry.get("values") or ()))
        for entry in entries or []
    )
