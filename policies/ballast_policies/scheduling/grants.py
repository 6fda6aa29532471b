"""Grants of the last decision whose gangs have not started yet; they stay valid until the round ends.

A round takes GPUs from some gangs for others. Until the former have saved and stopped, the latter hold
nothing, and each pod that ends asks for a decision. If that were made from the observed placements alone, a
waiting gang could lose its grant to one that is slightly more urgent, and both would pay for a start. Within
a round a grant therefore counts as held, and a gang that has to stop counts as stopped.
"""

import dataclasses
from collections.abc import Mapping

from ballast_policies.rounds.ledger import in_whole_pods
from ballast_policies.rounds.values import Node, Placement, Round, stays
from ballast_policies.scheduling.state import ClusterJob, ClusterState


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EffectivePlacements:
    """What counts as running within a round.

    Attributes:
        running: job -> placement.
        since: job -> since when, epoch seconds.
        pending: jobs that were granted their GPUs and do not hold them yet.
    """

    running: Mapping[str, Placement]
    since: Mapping[str, float]
    pending: frozenset[str] = frozenset()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Grants:
    """The grants of the last decision; each holds for one launch of its job.

    Attributes:
        granted: job -> (where, for which launch).
        leaving: running job that has to stop -> its launch.
        shrunk: running job that becomes smaller -> (where it will be, where it was, its launch).
        reasons: job -> (where, why).
    """

    granted: Mapping[str, tuple[Placement, int]] = dataclasses.field(default_factory=dict)
    leaving: Mapping[str, int] = dataclasses.field(default_factory=dict)
    shrunk: Mapping[str, tuple[Placement, Placement, int]] = dataclasses.field(default_factory=dict)
    reasons: Mapping[str, tuple[Placement, str]] = dataclasses.field(default_factory=dict)

    @classmethod
    def of(cls, decided: Round, state: ClusterState) -> "Grants":
        """Which jobs of ``state`` a decision starts and which it stops."""
        running = {job.name: job for job in state.jobs if job.placement is not None}
        launches = {job.name: job.launches for job in state.jobs}
        staying = {name for name, job in running.items() if _stays(job, decided.placements.get(name))}
        shrunk = {}
        for name in staying:
            before, after = running[name].placement, decided.placements[name]
            if before is not None and len(after.nodes) < len(before.nodes):
                shrunk[name] = after, before, launches[name]
        return cls(
            granted={
                name: (placement, launches[name])
                for name, placement in decided.placements.items()
                if name not in staying
            },
            leaving={name: launches[name] for name in running if name not in staying},
            shrunk=shrunk,
            reasons={name: (at, decided.reasons[name]) for name, at in decided.placements.items()},
        )

    def explain(self, decided: Round) -> Round:
        """``decided`` within a round, with the reasons of the decision that made each placement."""
        words = {
            job: reason
            for job, (placement, reason) in self.reasons.items()
            if decided.placements.get(job) == placement
        }
        return dataclasses.replace(decided, reasons={**decided.reasons, **words})

    def effective_placements(self, state: ClusterState, *, now: float) -> EffectivePlacements:
        """The state's gangs as the last decision placed them; a job launched since then as observed."""
        running, since, pending = {}, {}, set()
        nodes = {node.name: node for node in state.capacity.nodes}
        for job in state.jobs:
            granted = self.granted.get(job.name)
            if job.placement is not None and self.leaving.get(job.name) != job.launches:
                running[job.name], since[job.name] = self._as_asked(job, job.placement), job.running_since
            elif granted is not None and granted[1] == job.launches and _open(granted[0], job, nodes):
                running[job.name], since[job.name] = granted[0], now
                pending.add(job.name)
        return EffectivePlacements(running=running, since=since, pending=frozenset(pending))

    def _as_asked(self, job: ClusterJob, placement: Placement) -> Placement:
        """Where the job runs once it has shrunk as the last decision asks."""
        asked = self.shrunk.get(job.name)
        return asked[0] if asked is not None and asked[1:] == (placement, job.launches) else placement


def _open(placement: Placement, job: ClusterJob, nodes: Mapping[str, Node]) -> bool:
    """Whether the job may still be started there: a node may have a new taint or pool, its pods another."""
    there = [nodes[name] for name in placement.nodes if name in nodes]
    pools = {name: pool for pool, names in placement.nodes_by_pool.items() for name in names}
    barred = any(
        node.closed or node.taints in job.not_tolerated or node.pool != pools[node.name] for node in there
    )
    return not barred and in_whole_pods(placement.nodes, job.gpus_per_pod)


def _stays(job: ClusterJob, placement: Placement | None) -> bool:
    """Whether a running job continues without a restart, maybe with another size."""
    if placement is None or job.placement is None:
        return False
    if placement == job.placement:
        return True
    if job.placement.parts:
        return job.mixed is not None and job.mixed.becomes(job.placement, placement)
    return (
        job.elastic is not None and job.elastic.live and stays(job.placement, placement, job.elastic.together)
    )
