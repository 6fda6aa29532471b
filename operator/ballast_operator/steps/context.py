"""Values that a step reads (:class:`ReconcileContext`) and returns (:class:`StepResult`)."""

import dataclasses
import enum
from collections.abc import Mapping

from ballast_policies.contract.messages import Proposal
from ballast_policies.contract.plan import Plan
from ballast_policies.protocol.moves import proposal_error
from ballast_policies.scheduling.assignments import Assignment
from ballast_policies.scheduling.refusals import Refusal, Verdict

from ballast_operator.api.conditions import JobCondition
from ballast_operator.api.job_allocation import JobAllocation
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.desired import NewNode
from ballast_operator.kube.kinds import Kind, Object
from ballast_operator.settings import JobSettings
from ballast_operator.views.assignment import UNKNOWN_POOL, PoolInfo
from ballast_operator.views.clock import Time
from ballast_operator.views.job import JobView
from ballast_operator.views.nodes import Sharer
from ballast_operator.views.spec import JobSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Apply:
    """Server-side apply an object of the job that does not hold GPUs.

    Attributes:
        beside: the actions that follow do not wait for it; among themselves such actions keep their order.
    """

    kind: Kind
    body: Object
    beside: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class CreatePod:
    """Create a pod; its name is free or taken by the very same pod. ``gpu_resource``: of its ranks."""

    body: Object
    gpu_resource: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class DeletePod:
    """Delete exactly this pod. ``grace_seconds`` None: as the pod says; 0: its node is gone."""

    name: str
    uid: str
    grace_seconds: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class WritePlan:
    """Write the plan; the epoch is one more than the last one's."""

    plan: Plan


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the TrainingJob itself."""

    uid: str


ALLOCATOR_CONDITIONS = frozenset(
    {
        JobCondition.INPUTS_COMPLETE,
        JobCondition.ON_TIME,
        JobCondition.DEADLINE_AT_RISK,
        JobCondition.BUDGET_EXHAUSTED,
        JobCondition.CONSOLIDATED,
        JobCondition.DECIDED,
    }
)
"""Conditions of a job that the allocator sets, since it knows all GPUs, speeds and prices."""

Action = Apply | CreatePod | DeletePod | WritePlan | DeleteJob


class JobCounter(enum.StrEnum):
    """Metrics that a pass adds to."""

    LAUNCHES = "launches"
    RESTARTS = "restarts"
    REPACKS = "repacks"
    RELEASED_GPUS = "released_gpus"
    GROWN_GPUS = "grown_gpus"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """The result of a pass.

    Attributes:
        actions: to carry out in this order; each is safe to repeat.
        status: to write after the actions, if it differs.
        meanwhile: made while the status is written; the next pass makes what this one could not.
        write_later: the allocator's decision is due, and its status contains all of this one.
        requeue_after_seconds: look again after this long even if nothing changes; None: only on a change.
        allocate: the allocator has something new to decide on.
        needs_fresh_view: carry it out only if a fresh look at the job's pods and lease shows the same.
        grants_rights: the actions make sure that the launch's pods may report.
        restores: objects that somebody has deleted or changed, and the actions put right.
        metric_increments: (metric, label or nothing, amount) to add once the status is written.
    """

    status: TrainingJobStatus
    actions: tuple[Action, ...] = ()
    meanwhile: tuple[Apply, ...] = ()
    requeue_after_seconds: float | None = None
    allocate: bool = False
    write_later: bool = False
    needs_fresh_view: bool = False
    grants_rights: bool = False
    restores: tuple[str, ...] = ()
    metric_increments: tuple[tuple[JobCounter, str, int], ...] = ()

    @property
    def makes_pods(self) -> bool:
        """True if the pass is part of a launch or of a growth."""
        return any(isinstance(action, CreatePod) for action in self.actions)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Surroundings:
    """Nodes, pools and other jobs around a gang, or around the launch that is wanted.

    Attributes:
        shortage: why the assignment's nodes cannot hold the gang yet, as text; empty: they can.
        pools: pool -> what is known of it.
        older_nodes: pool -> its nodes that were there before the gang: not those that it waits for.
        sharer: who is on its GPU as well, or would be at its launch; None: no job.
        partner_left: when the partner that its allocation names last left a GPU; None: not known.
        has_pod_groups: the API server has Kubernetes' own gangs.
    """

    shortage: str = ""
    pools: Mapping[str, PoolInfo] = dataclasses.field(default_factory=dict)
    older_nodes: Mapping[str, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    sharer: Sharer | None = None
    partner_left: Time | None = None
    has_pod_groups: bool = False

    def pool(self, name: str) -> PoolInfo:
        """Properties of the pool."""
        return self.pools.get(name, UNKNOWN_POOL)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReconcileContext:
    """Input of a step.

    Attributes:
        spec: ``view.launched_spec``, known to be there.
        assignment: the allocator's; None: it has not decided since this operator started.
        around: the nodes, pools and other jobs that matter to it.
    """

    view: JobView
    spec: JobSpec
    assignment: Assignment | None
    now: Time
    settings: JobSettings
    around: Surroundings = dataclasses.field(default_factory=Surroundings)

    def price_of(self, pool: str, since: Time, until: Time) -> float:
        """Mean price of a GPU hour of a pool of the gang, from ``since`` to ``until``."""
        return self.around.pool(pool).mean_price(since, until)

    def pool_of(self, pod: str) -> PoolInfo:
        """Properties of the pool in which the pod is."""
        return self.around.pool(self.allocation.part_of(pod).pool)

    @property
    def bind_seconds(self) -> float:
        """Seconds that the pods of a launch or a growth may take until all run.

        More where nodes have to come, and while images or init containers are all that is missing: to give up
        then would start the same on another node.
        """
        allocation = self.view.status.allocation
        waits = () if allocation is None else allocation.pools_to_grow
        slowest = max((self.around.pool(pool).pool.start_seconds for pool in waits), default=0.0)
        not_ready = [pod for pod in self.view.gang if not pod.ready_for_plan]
        pulls = bool(not_ready) and all(pod.pulling for pod in not_ready)
        limit = self.settings.bind_seconds
        return slowest + (max(limit, self.settings.pull_seconds) if pulls else limit)

    def new_node_of(self, pod: str) -> NewNode:
        """Target of the pod, if its node does not exist yet."""
        older = self.around.older_nodes.get(self.allocation.part_of(pod).pool, ())
        return NewNode(node_selector=self.pool_of(pod).pool.node_selector, not_on=older)

    @property
    def hold(self) -> Refusal | None:
        """Reason that the job must hold no GPUs; None: it may."""
        return self.view.hold(self.now)

    @property
    def allocation(self) -> JobAllocation:
        """The job's allocation, for steps that run only while it has one."""
        allocation = self.view.status.allocation
        assert allocation is not None
        return allocation

    @property
    def change_pause_ms(self) -> float | None:
        """Milliseconds that training stood still to reach the plan, by rank 0; None: not reported."""
        ack = self.view.lease.ack if self.view.lease is not None else None
        return None if ack is None or ack.pause_ms is None else max(0.0, ack.pause_ms)

    @property
    def plan(self) -> Plan:
        """The plan of the job's launch, for steps that run only once it is written."""
        plan = self.view.launched_plan
        assert plan is not None
        return plan


def with_condition(
    context: ReconcileContext,
    status: TrainingJobStatus,
    kind: str,
    value: bool | None,
    reason: str,
    message: str,
) -> TrainingJobStatus:
    """The status with this condition, at the context's time and generation."""
    return status.with_condition(
        kind, value, reason, message, now=context.now, generation=context.view.generation
    )


def apply_allocator_conditions(
    context: ReconcileContext, known: tuple[Verdict, ...] = ()
) -> TrainingJobStatus:
    """The status with the conditions that the allocator sets; unchanged before it has decided.

    ``known``: conditions that the pass itself knows better, since it is later than the decision.
    """
    status, assignment = context.view.status, context.assignment
    certain = {advice.type for advice in known}
    advised = known
    if assignment is not None:
        advised += tuple(advice for advice in assignment.advice if advice.type not in certain)
        said = {advice.type for advice in advised}
        kept = tuple(c for c in status.conditions if c.type not in ALLOCATOR_CONDITIONS or c.type in said)
        status = status.replace(conditions=kept)
    for advice in advised:
        status = with_condition(context, status, *advice)
    return status


def with_status(context: ReconcileContext, status: TrainingJobStatus) -> ReconcileContext:
    """The context of a job with this status."""
    return dataclasses.replace(context, view=dataclasses.replace(context.view, status=status))


def refusal(context: ReconcileContext, proposal: Proposal) -> str:
    """Reason to refuse the trainer's proposal for the plan in force, with numbers; empty: it is accepted."""
    spec = context.spec
    return proposal_error(
        context.plan,
        proposal,
        spec.config.repack,
        gpus_per_pod=context.allocation.gpus_per_pod,
        ranks_per_position=spec.ranks_per_position,
        layers=spec.layers,
    )


def seconds_since(context: ReconcileContext, time: Time) -> float:
    """Seconds from ``time`` to the context's present."""
    return (context.now - time).total_seconds()
