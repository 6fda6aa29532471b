"""New jobs that get GPUs before the next decision: those that no other job could use.

While thousands of jobs arrive, a decision takes a second, and a job that fits waits for one that is under way
and for the next. What the last one has left, and no job that waits could use, goes to such a job in the next
decision, whatever the policy (:mod:`ballast_policies.rounds.arrivals`). Here it is given at once; the next
decision finds it as a grant that is on its way, as those of its own.

Whatever is a matter of the policy or of other jobs is left to a decision: sizes to choose from, several
pools, prices, limits of tenants and budgets, shared GPUs, machines that do not exist yet.
"""

import dataclasses
import math
from collections.abc import Callable, Collection, Iterable, Mapping

from ballast_policies.allocation.policy import Reads
from ballast_policies.allocation.registry import find_policy
from ballast_policies.rounds import Placement, Round
from ballast_policies.rounds.arrivals import Idle, left_by, place_arrival

from ballast_operator.allocator.costs.spot_limits import spot_limits
from ballast_operator.allocator.problem.admission import Admissions, Admitted
from ballast_operator.allocator.problem.layer_profiles import LayerProfiles
from ballast_operator.allocator.problem.size_speeds import stated
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.allocator.problem.tenants import limits_of
from ballast_operator.allocator.wanting import as_job, wants_gpus
from ballast_operator.api.cluster_policy import ClusterPolicy
from ballast_operator.kube.kinds import Key, Object, job_id
from ballast_operator.views.assignment import Assignment, AssignmentAction
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import NodeView

LEAST_PAUSE_SECONDS = 0.1
"""Between two jobs that are looked at: where more arrive that fit, one decision on all of them costs less."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """What the last decision knew, and left.

    Attributes:
        policy: by which it was made.
        version: of all ClusterPolicies then; with others in force, nothing is given.
        snapshot: what it was made on.
        refused: jobs that the policy could not place.
        placed: job that it has placed -> its launches then.
        idle: the GPUs.
        nodes: as they were.
        profiles: what was known of layers, for this reader alone.
        plan_id: name of the decision.
        until: up to when nothing changes what may be given, epoch seconds: the round ends, a budget is spent.
    """

    policy: ClusterPolicy
    version: object
    snapshot: Snapshot
    refused: frozenset[Key]
    placed: Mapping[Key, int]
    idle: Idle
    nodes: Mapping[str, NodeView]
    profiles: LayerProfiles
    plan_id: str
    until: float


class Arrivals:
    """Gives GPUs to new jobs between two decisions. Used by the event loop alone."""

    def __init__(self) -> None:
        self._left: Left | None = None
        self._given: dict[Key, Assignment] = {}
        self._looked_at = 0.0

    @property
    def given(self) -> Mapping[Key, Assignment]:
        """Jobs that no decision has seen yet -> what they were given."""
        return self._given

    def decided(
        self, left: Left | None, seen: Iterable[Key], present: Callable[[Key], object | None]
    ) -> None:
        """A decision on the jobs ``seen`` has ended.

        ``left``: what it has left; None: nothing. ``present``: a job, or None where it is gone.
        """
        known = set(seen)
        self._given = {
            key: given for key, given in self._given.items() if key not in known and present(key) is not None
        }
        if left is not None:
            idle = left.idle.without(one.placement for one in self._given.values() if one.placement)
            left = dataclasses.replace(left, idle=idle)
        self._left = left

    def give(
        self,
        view: JobView,
        *,
        others: Callable[[], Iterable[JobView]],
        node: Callable[[str], NodeView | None],
        version: object,
        now: Time,
    ) -> Assignment | None:
        """GPUs for a new job; None: it waits for a decision.

        Args:
            view: the job, which has never been launched.
            others: all jobs as they are now.
            node: a node as it is now.
            version: of the ClusterPolicies as they are now.
            now: the time.
        """
        left, spec = self._left, view.spec
        if left is None or spec is None or left.version != version or now.timestamp() >= left.until:
            return None
        types = {name for name, free in left.idle.by_type.items() if free >= spec.smallest_gang}
        types.intersection_update(spec.gpu_types or tuple(types))
        if not types or not wants_gpus(view, now):
            return None
        if abs(now.timestamp() - self._looked_at) < LEAST_PAUSE_SECONDS:
            return None
        self._looked_at = now.timestamp()
        one = _admitted(left, view)
        contested = None if one is None else self._contested(left, view, others(), types, now)
        if one is None or contested is None:
            return None
        known = {gpu_type: stated(spec, gpu_type, one.gpus) for gpu_type in one.gpu_types}
        rates = {gpu_type: speed.steps_per_second for gpu_type, speed in known.items() if speed is not None}
        if len(one.gpu_types) == 1:
            rates = dict.fromkeys(one.gpu_types, rates.get(one.gpu_types[0], 1.0))
        placement = place_arrival(
            left.idle,
            as_job(view, spec, gpus=one.gpus, rates=rates, now=now),
            not_tolerated=one.not_tolerated,
            gpus_per_pod=spec.gpus_per_pod,
            contested=contested,
        )
        if placement is None or any(node(name) != left.nodes.get(name) for name in set(placement.nodes)):
            return None
        given = Assignment(
            action=AssignmentAction.PLACE,
            launches=view.status.launches,
            placement=placement,
            plan_id=left.plan_id,
            chosen=str(placement),
            why=f"GPUs of pool {placement.pool} are idle that no waiting job could use",
            layers=left.profiles.layers(view.key, spec),
            memory=left.snapshot.capacity.memory.get(placement.pool),
        )
        self._left = dataclasses.replace(left, idle=left.idle.without([placement]))
        self._given[view.key] = given
        return given

    def _contested(
        self, left: Left, view: JobView, others: Iterable[JobView], types: Collection[str], now: Time
    ) -> frozenset[str] | None:
        """Those of ``types`` that a waiting job could use; None: the namespace has too many of those."""
        open_, waiting = set(types), 0
        for other in others:
            status, spec = other.status, other.spec
            if (status.allocation is not None and status.allocation.ending is None) or status.finished:
                continue
            given = self._given.get(other.key)
            granted = left.placed.get(other.key) if given is None else given.launches
            if spec is None or other.key == view.key or granted == status.launches:
                continue
            waiting += other.key[0] == view.key[0]
            could_use = open_.intersection(spec.gpu_types or open_)
            if could_use and other.key not in left.refused and wants_gpus(other, now):
                open_ -= could_use
        most = limits_of(left.policy.spec.tenants, view.key[0]).waiting_jobs
        return None if most is not None and waiting >= most else frozenset(types) - open_


def what_is_left(
    policy: ClusterPolicy,
    snapshot: Snapshot,
    round_: Round | None,
    *,
    version: object,
    nodes: Mapping[str, NodeView],
    profiles: LayerProfiles,
    plan_id: str,
    until: Iterable[float | None],
) -> Left | None:
    """What a decision has left to new jobs; None: nothing, all of them wait for the next.

    Args:
        policy: by which it was made.
        snapshot: on what.
        round_: the decision; None: there is none.
        version: of all ClusterPolicies.
        nodes: all, as they were.
        profiles: what is known of layers.
        plan_id: name of the decision.
        until: times at which something else may be given, epoch seconds.
    """
    if (
        round_ is None
        or policy.spec.dry_run
        or Reads.PRICES in find_policy(policy.spec.objective.policy).reads
    ):
        return None
    capacity, limits = snapshot.capacity, spot_limits(policy.spec, snapshot.capacity.kinds)
    spot = limits.pools if limits.limits else frozenset()
    withheld = {*capacity.shared, *(node.name for node in capacity.nodes if node.pool in spot)}
    return Left(
        policy=policy,
        version=version,
        snapshot=snapshot,
        refused=frozenset(job.key for job in snapshot.refused),
        placed={job.key: job.launches for job in snapshot.jobs if job.name in round_.placements},
        idle=left_by(
            round_,
            jobs=snapshot.problem.jobs,
            nodes=capacity.nodes,
            elastic=snapshot.elastic,
            mixed=snapshot.mixed,
            withheld=withheld,
        ),
        nodes=nodes,
        profiles=profiles.copy(),
        plan_id=plan_id,
        until=min((at for at in until if at is not None), default=math.inf),
    )


def _admitted(left: Left, view: JobView) -> Admitted | None:
    """The job where nothing but its place has to be decided; None: there is something else."""
    spec, policy, capacity = view.spec, left.policy.spec, left.snapshot.capacity
    assert spec is not None
    limits = limits_of(policy.tenants, view.key[0])
    spent = left.snapshot.spent.get(spec.entity or "")
    if limits.gpus is not None or limits.running_jobs is not None or (spent is not None and spent.suspends):
        return None
    if spec.data is not None or spec.mixes_pools or spec.shares_gpu or not capacity.tolerance.knows(view):
        return None
    admitted, _ = Admissions().admit(policy, capacity, [view], left.profiles)
    return next((one for one in admitted if one.fits_one_pool and len(one.sizes) == 1), None)


def grants(given: Mapping[Key, Assignment]) -> dict[str, tuple[Placement, int]]:
    """Job name -> (where, for which launch), as a round remembers its own grants."""
    return {
        job_id(key): (one.placement, one.launches) for key, one in given.items() if one.placement is not None
    }


def version_of(policies: Iterable[Object]) -> object:
    """Another one where a ClusterPolicy has come, gone or changed."""
    metadata = (item["metadata"] for item in policies)
    return tuple((one["uid"], one.get("generation", 0)) for one in metadata)
