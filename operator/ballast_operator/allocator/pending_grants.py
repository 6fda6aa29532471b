"""Grants of the last decision whose gangs have not started yet; they stay valid until the round ends.

A round takes GPUs from some gangs for others. Until the former have saved and stopped, the latter hold
nothing, and each pod that ends triggers the allocator. If it decided again from the observed placements
alone, a waiting gang could lose its grant to one that is slightly more urgent, and both would pay for a
start. Within a round a grant therefore counts as held, and a gang that has to stop counts as stopped.
"""

import dataclasses
from collections.abc import Mapping

from ballast_policies.rounds import Node, Placement, Round, in_whole_pods, stays

from ballast_operator.allocator.problem.jobs.snapshot_job import SnapshotJob
from ballast_operator.allocator.problem.snapshot import Snapshot


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


class PendingGrants:
    """The grants of the last decision; each holds for one launch of its job."""

    def __init__(self) -> None:
        self._granted: dict[str, tuple[Placement, int]] = {}
        self._leaving: dict[str, int] = {}
        self._shrunk: dict[str, tuple[Placement, Placement, int]] = {}
        self._reasons: dict[str, tuple[Placement, str]] = {}

    def remember(self, decided: Round, snapshot: Snapshot) -> None:
        """Record which jobs ``decided`` starts and which it stops."""
        jobs, running = snapshot.by_name, snapshot.running
        self._reasons = {
            job: (placement, decided.reasons[job]) for job, placement in decided.placements.items()
        }
        staying = {job for job in running if _stays(jobs[job], decided.placements.get(job))}
        self._granted = {
            job: (placement, jobs[job].launches)
            for job, placement in decided.placements.items()
            if job not in staying
        }
        self._leaving = {job: jobs[job].launches for job in running if job not in staying}
        self._shrunk = {
            job: (decided.placements[job], running[job], jobs[job].launches)
            for job in staying
            if len(decided.placements[job].nodes) < len(running[job].nodes)
        }

    def explain(self, decided: Round) -> Round:
        """``decided`` within a round, with the reasons of the decision that made each placement."""
        words = {
            job: reason
            for job, (placement, reason) in self._reasons.items()
            if decided.placements.get(job) == placement
        }
        return dataclasses.replace(decided, reasons={**decided.reasons, **words})

    def effective_placements(self, snapshot: Snapshot, *, moment: float) -> EffectivePlacements:
        """The snapshot's gangs as the last decision placed them; a job launched since then as observed."""
        running, since, pending = {}, {}, set()
        nodes = {node.name: node for node in snapshot.capacity.nodes}
        for job in snapshot.jobs:
            granted = self._granted.get(job.name)
            if job.placement is not None and self._leaving.get(job.name) != job.launches:
                running[job.name], since[job.name] = self._as_asked(job), job.running_since
            elif granted is not None and granted[1] == job.launches and _open(granted[0], job, nodes):
                running[job.name], since[job.name] = granted[0], moment
                pending.add(job.name)
        return EffectivePlacements(running=running, since=since, pending=frozenset(pending))

    def _as_asked(self, job: SnapshotJob) -> Placement:
        """Where the job runs once it has shrunk as the last decision asks."""
        assert job.placement is not None
        asked = self._shrunk.get(job.name)
        return asked[0] if asked is not None and asked[1:] == (job.placement, job.launches) else job.placement


def _open(placement: Placement, job: SnapshotJob, nodes: Mapping[str, Node]) -> bool:
    """Whether the job may still be started there: a node may have a new taint or pool, its pods another."""
    there = [nodes[name] for name in placement.nodes if name in nodes]
    pools = {name: pool for pool, names in placement.nodes_by_pool.items() for name in names}
    barred = any(
        node.closed or node.taints in job.not_tolerated or node.pool != pools[node.name] for node in there
    )
    return not barred and in_whole_pods(placement.nodes, job.gpus_per_pod)


def _stays(job: SnapshotJob, placement: Placement | None) -> bool:
    """Whether a running job continues without a restart, maybe with another size."""
    if placement is None or job.placement is None:
        return False
    together = job.elastic.together if job.elastic is not None else 1
    return placement == job.placement or (
        job.elastic is not None and stays(job.placement, placement, together)
    )
