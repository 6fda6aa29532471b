"""Nodes that a template's nodeSelector and required node affinity allow, as kube-scheduler compares them."""

import dataclasses
from collections.abc import Mapping
from typing import Any

NAME_FIELD = "metadata.name"
"""The only field of a node that ``matchFields`` may name."""


@dataclasses.dataclass(frozen=True, slots=True)
class Requirement:
    """One expression over a label, or over the node's name."""

    key: str
    operator: str
    values: tuple[str, ...] = ()

    def holds(self, value: str | None) -> bool:
        """Whether it holds of a label's value; None: the node has no such label."""
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
class Term:
    """Requirements that have to hold together; an empty term allows no node."""

    labels: tuple[Requirement, ...] = ()
    fields: tuple[Requirement, ...] = ()

    def holds(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether it allows the node."""
        if not self.labels and not self.fields:
            return False
        return all(one.holds(labels.get(one.key)) for one in self.labels) and all(
            one.key == NAME_FIELD and one.holds(name) for one in self.fields
        )


@dataclasses.dataclass(frozen=True, slots=True)
class NodeRequirements:
    """What a template asks of its nodes.

    Attributes:
        selector: labels that a node has to have.
        terms: of which one has to hold; None: there are no such terms.
    """

    selector: tuple[tuple[str, str], ...] = ()
    terms: tuple[Term, ...] | None = None

    def __bool__(self) -> bool:
        """Whether it asks for anything."""
        return bool(self.selector) or self.terms is not None

    def allow(self, name: str, labels: Mapping[str, str]) -> bool:
        """Whether the pods may run on the node."""
        if any(labels.get(key) != value for key, value in self.selector):
            return False
        return self.terms is None or any(term.holds(name, labels) for term in self.terms)


def read_requirements(template: Mapping[str, Any]) -> NodeRequirements:
    """Of a PodTemplateSpec that has been checked."""
    content = template.get("spec") or {}
    affinity = (content.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution")
    terms = None
    if required:
        terms = tuple(
            Term(_requirements(term.get("matchExpressions")), _requirements(term.get("matchFields")))
            for term in required.get("nodeSelectorTerms") or []
        )
    selector = tuple(sorted((content.get("nodeSelector") or {}).items()))
    return NodeRequirements(selector=selector, terms=terms)


def _requirements(entries: Any) -> tuple[Requirement, ...]:
    return tuple(
        Requirement(entry["key"], entry["operator"], tuple(entry.get("values") or ()))
        for entry in entries or []
    )
