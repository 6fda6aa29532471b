"""Which nodes the jobs of a snapshot may be started on, by taints and tolerations.

Jobs with the same tolerations, and nodes with the same taints, are looked at once: there may be thousands.
"""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Self

from ballast_policies.rounds import Node
from ballast_policies.rounds.explanations import barred_nodes

from ballast_operator.allocator.problem.gang_size import Refusal
from ballast_operator.api.cluster_policy import NodePool
from ballast_operator.api.conditions import JobReason
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView
from ballast_operator.views.spec import JobSpec
from ballast_operator.views.taints import Taint, blocking


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tolerance:
    """Who tolerates what.

    Attributes:
        taints: node -> its taints that a template may have to tolerate, as text.
        not_tolerated: tolerations of a template, as JSON -> taint texts that they do not cover.
        by_no_job: taint texts that no job covers; empty where there are no jobs.
    """

    taints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    not_tolerated: Mapping[str, frozenset[str]] = dataclasses.field(default_factory=dict)
    by_no_job: frozenset[str] = frozenset()

    @classmethod
    def of(
        cls, pools: Sequence[NodePool], members: Mapping[str, Sequence[NodeView]], jobs: Sequence[JobView]
    ) -> Self:
        """From the nodes of each pool and the jobs that want GPUs."""
        texts: dict[str, str] = {}
        kinds: dict[str, tuple[Taint, ...]] = {}
        for pool in pools:
            for node in members[pool.name]:
                relevant = blocking(node.taints, (), pool.gpu_resource) if node.taints else ()
                texts[node.name] = text = ",".join(str(taint) for taint in relevant)
                kinds[text] = relevant
        not_tolerated = {}
        if any(kinds):
            for spec in (view.spec for view in jobs):
                if spec is not None and _signature(spec) not in not_tolerated:
                    not_tolerated[_signature(spec)] = frozenset(
                        text for text, taints in kinds.items() if blocking(taints, spec.tolerations)
                    )
        sets = list(not_tolerated.values())
        by_no_job = sets[0].intersection(*sets[1:]) if sets else frozenset[str]()
        return cls(taints=texts, not_tolerated=not_tolerated, by_no_job=by_no_job)

    def barred(self, spec: JobSpec) -> frozenset[str]:
        """The taint texts that the job's template does not cover."""
        return self.not_tolerated.get(_signature(spec), frozenset()) if self.not_tolerated else frozenset()


def usable_by_pool(nodes: Sequence[Node], barred: frozenset[str]) -> Counter[str]:
    """Pool -> GPUs of the nodes on which a job may be started that does not tolerate ``barred``."""
    found: Counter[str] = Counter()
    for node in nodes:
        found[node.pool] += node.gpus if not node.closed and node.taints not in barred else 0
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


def _signature(spec: JobSpec) -> str:
    return json.dumps(spec.tolerations, sort_keys=True)
