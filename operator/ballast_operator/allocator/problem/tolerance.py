"""Which nodes the jobs of a snapshot may be started on: by taints, node selectors, and what happened there.

Jobs with the same template, and nodes that are alike, are looked at once: there may be thousands.
"""

import dataclasses
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

from ballast_policies.rounds import Node
from ballast_policies.rounds.explanations import TOLD_APART, barred_nodes

from ballast_operator.allocator.problem.gang_size import Refusal
from ballast_operator.api.conditions import JobReason
from ballast_operator.api.node_pool import NodePool
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView
from ballast_operator.views.selectors import NodeRequirements
from ballast_operator.views.taints import Taint, blocking

Signature = tuple[str, NodeRequirements, frozenset[str]]
"""Tolerations as JSON, requirements, and nodes to avoid."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Which nodes are alike to every job, and which of them each job may not be started on.

    Attributes:
        taints: node -> text, equal for nodes that are alike to every job: the taints that a template may
            have to tolerate, and a number where something else tells nodes with the same taints apart.
        not_tolerated: what jobs have in common (:func:`_signature`) -> texts of nodes barred to them.
        by_no_job: texts of nodes that are barred to every job; empty where there are no jobs.
    """

    taints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    not_tolerated: Mapping[Signature, frozenset[str]] = dataclasses.field(default_factory=dict)
    by_no_job: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls,
        pools: Sequence[NodePool],
        members: Mapping[str, Sequence[NodeView]],
        jobs: Sequence[JobView],
        *,
        apart: Mapping[str, str] | None = None,
    ) -> Self:
        """From the nodes of each pool and the jobs that want GPUs.

        ``apart``: pool -> mark of pools whose nodes are told from those of others.
        """
        relevant = {
            node.name: blocking(node.taints, (), pool.gpu_resource) if node.taints else ()
            for pool in pools
            for node in members[pool.name]
        }
        wanting = {_signature(view): view for view in jobs if view.spec is not None}
        wanting |= {_signature(view, avoid=False): view for view in jobs if view.avoided and view.spec}
        nodes = [node for pool in pools for node in members[pool.name]]
        excluded = {
            asked: frozenset(node.name for node in nodes if not asked.allow(node.name, node.labels))
            for asked in {requirements for _, requirements, _ in wanting}
        }
        avoided = frozenset[str]().union(*(names for _, _, names in wanting))
        marks = {node.name: mark for pool, mark in (apart or {}).items() for node in members[pool]}
        texts = _texts(relevant, list(excluded.values()), avoided, marks)
        kinds = {texts[name]: taints for name, taints in relevant.items()}
        not_tolerated: dict[Signature, frozenset[str]] = {}
        if any(kinds.values()) or avoided or any(excluded.values()):
            for signature, view in wanting.items():
                assert view.spec is not None
                by_taint = {text for text, found in kinds.items() if blocking(found, view.spec.tolerations)}
                names = excluded[signature[1]] | signature[2]
                not_tolerated[signature] = frozenset(by_taint.union(texts[n] for n in names if n in texts))
        sets = list(not_tolerated.values())
        by_no_job = sets[0].intersection(*sets[1:]) if sets else frozenset[str]()
        return cls(taints=texts, not_tolerated=not_tolerated, by_no_job=by_no_job)

    def barred(self, view: JobView, *, avoid: bool = True) -> frozenset[str]:
        """Texts of nodes on which the job must not be started.

        Args:
            view: a job with a spec.
            avoid: also nodes on which its pods did not run in time.
        """
        if not self.not_tolerated:
            return frozenset()
        return self.not_tolerated.get(_signature(view, avoid=avoid), frozenset())


def _signature(view: JobView, *, avoid: bool = True) -> Signature:
    """Equal for jobs that may be started on the same nodes."""
    assert view.spec is not None
    return (*view.spec.node_signature, view.avoided if avoid else frozenset())


def _texts(
    relevant: Mapping[str, tuple[Taint, ...]],
    excluded: Sequence[frozenset[str]],
    avoided: frozenset[str],
    apart: Mapping[str, str],
) -> dict[str, str]:
    """Node -> its text; a node that some job avoids has its own."""
    marks: dict[str, list[str]] = {name: [apart[name]] if name in apart else [] for name in relevant}
    for number, names in enumerate(excluded):
        for name in names:
            marks[name].append(str(number))
    for name in avoided & marks.keys():
        marks[name].append(name)
    classes: dict[tuple[str, ...], int] = {}
    texts = {}
    for name, taints in relevant.items():
        text = ",".join(str(taint) for taint in taints)
        if marks[name]:
            text += f"{TOLD_APART}{classes.setdefault(tuple(marks[name]), len(classes))}"
        texts[name] = text
    return texts


def usable_by_pool(nodes: Sequence[Node], barred: frozenset[str], gpus_per_pod: int = 1) -> Counter[str]:
    """Pool -> GPUs of the nodes on which a job may be started that does not tolerate ``barred``.

    Of a node only as many as fill whole pods of ``gpus_per_pod``.
    """
    found: Counter[str] = Counter()
    for node in nodes:
        usable = not node.closed and node.taints not in barred
        found[node.pool] += node.gpus // gpus_per_pod * gpus_per_pod if usable else 0
    return found


def with_barred_nodes(
    refusal: Refusal, nodes: Sequence[Node], barred: frozenset[str], allowed: Sequence[str]
) -> Refusal:
    """The refusal for lack of GPUs, with the nodes of ``allowed`` types that are closed to the job."""
    if refusal.reason != JobReason.EXCEEDS_CAPACITY:
        return refusal
    tainted: dict[str, Counter[str]] = {}
    closed: dict[str, Counter[str]] = {}
    for node in nodes:
        if node.gpu_type not in allowed:
            continue
        if node.closed:
            closed.setdefault(node.pool, Counter())[node.closed] += 1
        elif node.taints in barred:
            tainted.setdefault(node.pool, Counter())[node.taints] += 1
    words = "".join(
        barred_nodes(pool, tainted.get(pool, {}), closed.get(pool, {}))
        for pool in sorted({*tainted, *closed})
    )
    if not words:
        return refusal
    what, _, fix = refusal.message.partition(". To fix: ")
    more = "add the tolerations to spec.template, or " if tainted else ""
    return dataclasses.replace(refusal, message=f"{what}{words}. To fix: {more}{fix}")
