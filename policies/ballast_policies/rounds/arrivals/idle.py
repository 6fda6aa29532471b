"""New jobs on GPUs that a decision has left idle, and that no other job could use.

Within a round, free GPUs go to the jobs that wait, by urgency. Where no job that waits can use the free GPUs
of a type, there is nothing to weigh: a new job that fits there gets them in the next decision, whatever the
policy. So it may have them before that, and the next decision finds it there.
"""

import dataclasses
import functools
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence

from ballast_policies.allocation.problem import Job
from ballast_policies.rounds.gangs import ElasticGang, MixedGang
from ballast_policies.rounds.grants import grant_gpus
from ballast_policies.rounds.question import Question
from ballast_policies.rounds.values import Node, Placement, Round, RoundSettings


@dataclasses.dataclass(frozen=True, kw_only=True)
class Idle:
    """What a decision has left.

    Attributes:
        nodes: with the GPUs that are free on them, where there are some.
        contested: GPU types that a job of the decision could use which waits, or whose gang may grow.
    """

    nodes: tuple[Node, ...] = ()
    contested: frozenset[str] = frozenset()

    @functools.cached_property
    def by_type(self) -> Counter[str]:
        """GPU type that is not contested -> GPUs."""
        found = Counter[str]()
        for node in self.nodes:
            if node.gpu_type not in self.contested:
                found[node.gpu_type] += node.gpus
        return found

    def without(self, placements: Iterable[Placement]) -> "Idle":
        """What is left when these have their GPUs as well."""
        taken = Counter(name for placement in placements for name in placement.nodes)
        if not taken:
            return self
        left = (dataclasses.replace(node, gpus=node.gpus - taken[node.name]) for node in self.nodes)
        return dataclasses.replace(self, nodes=tuple(node for node in left if node.gpus > 0))


def left_by(
    decided: Round,
    *,
    jobs: Sequence[Job],
    nodes: Sequence[Node],
    elastic: Mapping[str, ElasticGang] | None = None,
    mixed: Mapping[str, MixedGang] | None = None,
    withheld: Collection[str] = (),
) -> Idle:
    """What the decision ``decided`` has left.

    Args:
        decided: on ``jobs`` and ``nodes``.
        jobs: all that take part.
        nodes: of the pools; of one that is closed, or does not exist yet, nothing is left.
        elastic: gangs that may have several sizes.
        mixed: gangs that may run in several pools.
        withheld: nodes of which nothing is left for another reason.
    """
    elastic, mixed = elastic or {}, mixed or {}
    contested: set[str] = set()
    for job in jobs:
        at, sizes, parts = decided.placements.get(job.name), elastic.get(job.name), mixed.get(job.name)
        if sizes is not None and (at is None or len(at.nodes) < sizes.most):
            contested.update(sizes.speeds)
        if at is None:
            contested.update(gpu_type for gpu_type, rate in job.throughput.items() if rate > 0)
            contested.update(parts.speeds if parts is not None else ())
    taken = Counter(name for at in decided.first_placements.values() for name in at.nodes)
    closed = set(withheld)
    left = (
        dataclasses.replace(node, gpus=node.gpus - taken[node.name])
        for node in nodes
        if not node.closed and not node.coming and node.name not in closed
    )
    return Idle(nodes=tuple(node for node in left if node.gpus > 0), contested=frozenset(contested))


def place_arrival(
    idle: Idle,
    job: Job,
    *,
    not_tolerated: frozenset[str] = frozenset(),
    gpus_per_pod: int = 1,
    contested: Collection[str] = (),
) -> Placement | None:
    """Where a new job of one size may be started at once; None: that is for a decision to say.

    It is offered its fastest GPU type and no other: whether it should wait for that one, or run on a slower
    one meanwhile, is a matter of the policy.

    Args:
        idle: what the last decision and the arrivals since then have left.
        job: with the speeds that are known of it; a type without one is as good as none.
        not_tolerated: taints of nodes (``Node.taints``) on which it must not be started.
        gpus_per_pod: GPUs of each of its pods, which are on one node.
        contested: GPU types that jobs could use which wait and were not part of that decision.
    """
    fastest = max(job.throughput.values(), default=0.0)
    types = {gpu_type for gpu_type, rate in job.throughput.items() if rate == fastest > 0}
    types -= {*idle.contested, *contested}
    nodes = [node for node in idle.nodes if node.gpu_type in types and node.taints not in not_tolerated]
    if sum(node.gpus for node in nodes) < job.gpus:
        return None
    decided = grant_gpus(
        Question(
            now=0.0,
            shares={job.name: dict.fromkeys(types, 1.0 / len(types))},
            jobs=[job],
            nodes=nodes,
            settings=RoundSettings(within_round=True),
            gpus_per_pod={job.name: gpus_per_pod} if gpus_per_pod > 1 else {},
        )
    )
    return decided.placements.get(job.name)
