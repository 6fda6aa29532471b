"""A job as one pass sees it: everything read once, nothing changes under the reader."""

import dataclasses
from collections.abc import Collection, Iterable, Mapping

from ballast_policies.contract.errors import ContractError
from ballast_policies.contract.job.job import JobConfig
from ballast_policies.contract.plan import Directive, Plan
from ballast_policies.protocol.moves import pods_after_drain
from ballast_policies.protocol.observed import Cause
from ballast_policies.scheduling.refusals import Refusal

from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.api.costs import OnLimit
from ballast_operator.api.job_allocation import JobAllocation, LaunchDegrees
from ballast_operator.api.training_job import TrainingJobSpec
from ballast_operator.api.training_job_status import TrainingJobStatus
from ballast_operator.errors import OVER_QUOTA
from ballast_operator.kube.kinds import Key
from ballast_operator.views.clock import Time, show
from ballast_operator.views.lease import LeaseView
from ballast_operator.views.pod import PodView
from ballast_operator.views.spec import BEING_PLANNED, JobSpec, spec_of_launch

ROUNDING = 1e-9
"""Relative error of a sum of costs."""


def hold(asked: TrainingJobSpec, status: TrainingJobStatus, now: Time) -> Refusal | None:
    """Reason that the job must hold no GPUs; None: it may."""
    if asked.suspend:
        return Refusal(JobReason.SUSPENDED, "spec.suspend is set")
    if asked.on_budget_exhausted is not OnLimit.CONTINUE and budget_spent(asked, status):
        fails = asked.on_budget_exhausted is OnLimit.FAIL
        return Refusal(JobReason.BUDGET_SPENT, budget_message(asked), fails)
    if asked.on_deadline_missed is not OnLimit.CONTINUE and deadline_passed(asked, now):
        fails = asked.on_deadline_missed is OnLimit.FAIL
        return Refusal(JobReason.DEADLINE_MISSED, deadline_message(asked), fails)
    limit = asked.active_deadline_seconds
    if limit is not None and active_seconds(status, now) >= limit * (1 - ROUNDING):
        message = f"the job has run for spec.activeDeadlineSeconds={limit}. To fix: ask for more in a new job"
        return Refusal(JobReason.ACTIVE_DEADLINE_EXCEEDED, message, fails=True)
    return None


def limits_left(asked: TrainingJobSpec, status: TrainingJobStatus, now: Time) -> dict[str, float]:
    """Fields of the spec at which :func:`hold` will stop the job -> what is left of each: costs, or seconds.

    Those of ``activeDeadlineSeconds`` pass while it holds GPUs.
    """
    left = {}
    if asked.budget is not None and asked.on_budget_exhausted is not OnLimit.CONTINUE:
        left["budget"] = asked.budget - status.cost_so_far
    if asked.deadline is not None and asked.on_deadline_missed is not OnLimit.CONTINUE:
        left["deadline"] = (asked.deadline - now).total_seconds()
    if asked.active_deadline_seconds is not None:
        left["activeDeadlineSeconds"] = asked.active_deadline_seconds - active_seconds(status, now)
    return left


def active_seconds(status: TrainingJobStatus, now: Time) -> float:
    """Seconds during which the job has held GPUs, up to ``now``."""
    since = status.unpaid_since
    return status.active_seconds + (0.0 if since is None else max(0.0, (now - since).total_seconds()))


def budget_spent(asked: TrainingJobSpec, status: TrainingJobStatus) -> bool:
    """True if the cost that is summed up has reached the budget."""
    return asked.budget is not None and status.cost_so_far >= asked.budget * (1 - ROUNDING)


def deadline_passed(asked: TrainingJobSpec, now: Time) -> bool:
    """True if there is a deadline, and it is over."""
    return asked.deadline is not None and now >= asked.deadline


def budget_message(asked: TrainingJobSpec) -> str:
    """Message that the budget is spent; unchanged while the cost of the last checkpoint is added."""
    assert asked.budget is not None
    what = f"the job has cost its budget of {asked.budget:.10g}"
    if asked.on_budget_exhausted is OnLimit.FAIL:
        return f"{what}, and spec.onBudgetExhausted is Fail"
    if asked.on_budget_exhausted is OnLimit.SUSPEND:
        return f"{what}. To fix: raise spec.budget, and it resumes from its checkpoint"
    return f"{what}, and continues, as spec.onBudgetExhausted is Continue"


def deadline_message(asked: TrainingJobSpec) -> str:
    """Message that the deadline has passed."""
    assert asked.deadline is not None
    what = f"spec.deadline, {show(asked.deadline)}, has passed before the job was done"
    if asked.on_deadline_missed is OnLimit.FAIL:
        return f"{what}, and spec.onDeadlineMissed is Fail"
    if asked.on_deadline_missed is OnLimit.SUSPEND:
        return f"{what}. To fix: set a later spec.deadline, and it resumes from its checkpoint"
    return f"{what}; the job continues"


def pods_of_gangs(views: Iterable["JobView"]) -> set[Key]:
    """(namespace, name) of the pods that running gangs count as theirs."""
    held = ((view.key[0], view.held_placement) for view in views if not view.deleting)
    return {(namespace, pod) for namespace, gang in held if gang is not None for pod in gang.pods}


QUEUE_LABEL = "kueue.x-k8s.io/queue-name"
"""Label of a TrainingJob: the LocalQueue of Kueue in which it is."""

PLAN_WRITTEN_ANNOTATION = "ballast.dev/written"
"""Annotation of the plan's ConfigMap: time at which this epoch was written, RFC 3339, by the operator."""


FAILED_CHANGES = (Cause.SHRINK_TIMEOUT, Cause.GROW_TIMEOUT)
"""Restarts after a change of size that the trainer did not carry out."""

MOST_FAILED_CHANGES = 2
"""Failed changes after which the gang keeps the size that it is launched with."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobView:
    """A TrainingJob with all that belongs to it.

    Attributes:
        spec: None where it cannot be used; ``spec_problem`` says why.
        ttl_seconds: how long it is kept after its end, also without a usable spec; None: for ever.
        orphans: its deletion is to leave its pods.
        pods: by launch and rank.
        lease: None before it exists.
        plan: the newest plan; None before the first launch.
        plan_written: when it was written.
        plan_config: the trainer's configuration beside the plan, as JSON.
        plan_intact: whether the ConfigMap has the plan; otherwise someone has deleted or changed it.
        created: when the job was made.
        avoided: nodes on which its pods did not run in time lately.
        blocked: why no pod of it can be made, whatever GPUs are free; None: one can.
        queue: of Kueue, in which it is; empty: none.
        queued: why it must hold no GPUs by Kueue's word; None: it may.
        lacks_rights: its launch's pods may lack what they need in order to report.
        lacks_account: and their service account, too.
        lost_pool: why the GPUs that it holds are no pool's of the ClusterPolicy; empty: they are.
    """

    key: Key
    uid: str
    generation: int
    spec: JobSpec | None
    spec_problem: str = ""
    ttl_seconds: int | None = None
    deleting: bool = False
    orphans: bool = False
    status: TrainingJobStatus = dataclasses.field(default_factory=TrainingJobStatus)
    pods: tuple[PodView, ...] = ()
    lease: LeaseView | None = None
    plan: Plan | None = None
    plan_written: Time | None = None
    plan_config: str = ""
    plan_intact: bool = True
    created: Time | None = None
    avoided: frozenset[str] = frozenset()
    blocked: Refusal | None = None
    queue: str = ""
    queued: Refusal | None = None
    lacks_rights: bool = False
    lacks_account: bool = False
    lost_pool: str = ""

    def hold(self, now: Time) -> Refusal | None:
        """Reason that the job must hold no GPUs; None: it may."""
        return None if self.spec is None else hold(self.spec.asked, self.status, now) or self.queued

    def as_launched(self) -> "JobView":
        """The view by which its passes go: where its spec cannot be used, it holds no GPUs.

        What it holds it gives back as by ``suspend``, by the configuration that it was launched with. A job
        that has ended stays as it is, and one that is being planned keeps its GPUs meanwhile.
        """
        if self.spec is not None or (self.status.allocation is None and not self.status.finished):
            return self
        teams = self.status.team_costs
        spec = spec_of_launch(self.plan_config, teams[-1].team if teams else "")
        if self.spec_problem.startswith(BEING_PLANNED):
            return dataclasses.replace(self, spec=spec)
        cause = Refusal(JobReason.MISCONFIGURED, self.spec_problem)
        return dataclasses.replace(self, spec=spec, queued=cause)

    @property
    def launched_spec(self) -> JobSpec | None:
        """The spec with the degrees of the launch that holds GPUs; None: it cannot be used."""
        allocation = self.status.allocation
        degrees = None if allocation is None else allocation.degrees
        if self.spec is None or allocation is None or degrees is None:
            return self.spec
        if degrees.gpus_per_stage * degrees.positions != allocation.gpus:
            return self.spec  # put there by hand
        try:
            return self.spec.with_degrees(degrees)
        except ContractError:  # it was changed since, for the next launch
            return self.spec

    @property
    def as_planned(self) -> bool:
        """True if its launch divides the work as its spec does for these GPUs; also where neither plans."""
        allocation = self.status.allocation
        if self.spec is None or allocation is None:
            return False
        has, planned = allocation.degrees, self.spec.degrees_on(allocation.by_pool)
        if has is None or planned is None:
            return has is planned and not self.spec.plans
        plans, planner = (planned, self.live_plans.get(allocation.gpus)), self.spec.asked.planner
        tried = planner is not None and planner.trial is not None
        return any(
            has.divides_as(plan) and (tried or has.repeated == plan.repeated)
            for plan in plans
            if plan is not None
        )

    @property
    def name(self) -> str:
        """The job's name."""
        return self.key[1]

    @property
    def launch(self) -> int:
        """The launch that holds GPUs; 0 where none does."""
        return self.status.allocation.launch if self.status.allocation is not None else 0

    @property
    def running_allocation(self) -> JobAllocation | None:
        """The allocation, unless its launch is ending."""
        allocation = self.status.allocation
        return allocation if allocation is not None and allocation.ending is None else None

    @property
    def held_placement(self) -> JobAllocation | None:
        """The running allocation without the pods that are about to go: released by a shrink, or with a node.

        None where it cannot continue without those that go, or its pool is gone: it needs GPUs elsewhere.
        """
        allocation, plan = self.running_allocation, self.launched_plan
        if allocation is None or self.lost_pool:
            return None
        if plan is not None and self.shrinking:
            kept = {pod: node for pod, node in allocation.node_of.items() if plan.rank_of(pod) is not None}
            return allocation.with_pods(kept)
        if not self.leaving:
            return allocation
        survivors = self.survivors
        if not survivors:
            return None
        return allocation.with_pods({pod: allocation.node_of[pod] for pod in survivors}, joining=())

    @property
    def leaving(self) -> tuple[PodView, ...]:
        """Pods of the gang that run and are about to go: by their node's notice, an eviction, or a deletion.

        Of deletions those that the operator has not asked for, and without whose pods the gang can continue.
        """
        found = tuple(pod for pod in self.gang if pod.leaves is not None)
        deleted = self._deleted({pod.name for pod in found})
        return found + tuple(dataclasses.replace(pod, leaves=pod.deletion) for pod in deleted)

    def _deleted(self, leaving: set[str]) -> list[PodView]:
        plan = self.launched_plan
        deleted = [pod for pod in self.gang if pod.deletion is not None and pod.leaves is None]
        if not deleted or plan is None or self.running_allocation is None or self.deleting:
            return []
        needed = [pod for pod in deleted if plan.rank_of(pod.name) is not None]
        if needed and not self._pods_without(leaving | {pod.name for pod in needed}):
            needed = []
        if plan.directive is Directive.SHRINK and not self.acknowledged:
            # They still hold their layers; the operator itself deletes them only after the acknowledgement.
            needed += [pod for pod in deleted if plan.rank_of(pod.name) is None]
        return needed

    @property
    def resizable(self) -> bool:
        """True if its gang may change its size without a restart, once it trains; a script's cannot."""
        allocation, spec = self.running_allocation, self.spec
        if allocation is None or spec is None or not spec.grow or spec.is_script or spec.replicas:
            return False
        if (spec.plans or allocation.degrees is not None) and not self.live_plans:
            return False
        failed = sum(self.status.restarts.get(cause, 0) for cause in FAILED_CHANGES)
        return allocation.gpus_per_pod == spec.gpus_per_pod and failed < MOST_FAILED_CHANGES

    @property
    def has_template(self) -> bool:
        """True if new pods of its gang would be made of the template that it was launched with."""
        allocation = self.status.allocation
        return (
            allocation is None or self.spec is None or allocation.template in ("", self.spec.template_digest)
        )

    @property
    def may_change_size(self) -> bool:
        """True if the gang trains and can change its size now, maybe by a restart; no script."""
        allocation = self.running_allocation
        if allocation is None or self.shrinking or allocation.joining or self.leaving:
            return False
        by_restart = self.spec is not None and self.spec.grow and bool(self.spec.plans)
        return self.acknowledged and (self.resizable or by_restart)

    @property
    def live_plans(self) -> Mapping[int, LaunchDegrees]:
        """GPUs -> the plan with which its launch of planned degrees goes on there; none: by a restart alone.

        Ranks keep their tensor and data degree, microbatches and recomputation while they train.
        """
        allocation, spec = self.running_allocation, self.spec
        if allocation is None or spec is None or allocation.degrees is None or allocation.parts:
            return {}
        report = None if self.lease is None else self.lease.report
        if report is not None and report.tried and report.kept is None:
            return {}  # its ranks are trying others
        return spec.plans_with(allocation.gpu_type, allocation.degrees)

    @property
    def survivors(self) -> tuple[str, ...]:
        """Pods that the gang can continue with once those that leave, or are lost, are gone, by rank.

        Whole positions of the pipeline, rank 0 among them unless it is lost, and a size that the job may
        have. Empty: there is no such size, or no rank leaves.
        """
        return self._pods_without({pod.name for pod in self.leaving} | self.lost, lost=self.lost)

    @property
    def lost(self) -> set[str]:
        """Pods of the plan that have ended or are gone, or whose node is; none where no copies are held.

        A launch of planned degrees, which has been told how many stages it has, goes on by another launch.
        """
        plan, spec = self.launched_plan, self.spec
        if plan is None or spec is None or not spec.holds_copies or spec.plans:
            return set()
        there = {pod.name for pod in self.gang if pod.alive and pod.node_ready and not pod.forced}
        return set(plan.pods) - there

    def _pods_without(self, going: set[str], *, lost: Collection[str] = ()) -> tuple[str, ...]:
        plan, spec, allocation = self.launched_plan, self.spec, self.running_allocation
        if plan is None or spec is None or allocation is None or not self.resizable:
            return ()
        per_pod = allocation.gpus_per_pod
        known = spec.throughput.get(allocation.gpu_type, {})

        def fits(pods: int) -> bool:
            ranks = pods * per_pod
            if spec.plans:
                return ranks in self.live_plans
            return ranks >= spec.smallest_gang and spec.suits(ranks) and known.get(ranks, 1.0) > 0

        together = (self.launched_spec or spec).ranks_together(per_pod) // per_pod
        return pods_after_drain(plan.pods, going, together=together, fits=fits, lost=lost)

    @property
    def gang(self) -> tuple[PodView, ...]:
        """Pods of the launch that holds GPUs."""
        return tuple(pod for pod in self.pods if pod.launch == self.launch)

    @property
    def alive(self) -> tuple[PodView, ...]:
        """Pods of any launch that hold, or may come to hold, a GPU."""
        return tuple(pod for pod in self.pods if pod.alive)

    @property
    def launched_plan(self) -> Plan | None:
        """The plan, if it is one of the launch that holds GPUs."""
        return (
            self.plan if self.plan is not None and self.launch and self.plan.launch == self.launch else None
        )

    @property
    def is_script(self) -> bool:
        """It runs its template's own command: its pods' ends, and not a trainer, say how it is."""
        return self.spec is not None and self.spec.is_script

    @property
    def acknowledged(self) -> bool:
        """Rank 0 has reached the newest plan; a script has with the plan's writing."""
        return self.launched_plan is not None and (self.is_script or self.has_spoken)

    @property
    def over_quota(self) -> bool:
        """A quota had no room for the gang of its last launch."""
        running = self.status.condition(JobCondition.RUNNING)
        refused = running is not None and running.reason == JobReason.NOT_ALLOWED
        return running is not None and refused and OVER_QUOTA in running.message

    @property
    def has_spoken(self) -> bool:
        """Rank 0 has acknowledged the newest plan: a trainer, or the client library in a script."""
        plan = self.launched_plan
        ack = self.lease.ack if self.lease is not None else None
        return plan is not None and ack is not None and ack.epoch >= plan.epoch

    @property
    def listens(self) -> bool:
        """The ranks read plans: a trainer, or a script whose client has acknowledged one of this launch.

        The stop that is being asked for need not be acknowledged yet.
        """
        plan, lease = self.launched_plan, self.lease
        if not self.is_script:
            return True
        if plan is None or lease is None or lease.ack is None or lease.released:
            return False
        return lease.ack.epoch >= plan.epoch - (plan.directive is Directive.CHECKPOINT_AND_STOP)

    @property
    def shrinking(self) -> bool:
        """A shrink has been planned and its pods are not all accounted for yet; those that join are none."""
        plan, allocation = self.launched_plan, self.status.allocation
        return (
            plan is not None
            and allocation is not None
            and plan.directive is Directive.SHRINK
            and not {*plan.pods, *allocation.joining}.issuperset(allocation.pods)
        )

    @property
    def finished_step(self) -> int | None:
        """The last step, where training is done and saved; None while there is more to do.

        The last one of the configuration, unless a callback ended the training. A script is done when its
        ranks have exited: None.
        """
        if self.is_script:
            return None
        step = self.lease.finished_step if self.lease is not None else None
        if self.spec is None or step is None:
            return None
        return step if self.ended_early or step >= self.spec.config.total_steps else None

    @property
    def launched_steps(self) -> int | None:
        """The last step, as its ranks were told at their launch; None: they were not, or it is not known."""
        try:
            return (
                JobConfig.from_json(self.plan_config).total_steps if self.launched_plan is not None else None
            )
        except ContractError:  # someone has changed the ConfigMap
            return None

    @property
    def ended_early(self) -> str:
        """Reason that the job's callback ended its training before the last step; empty: it did not."""
        lease = self.lease
        if lease is None or self.is_script or self.spec is None:
            return ""
        if lease.finished_step is None or lease.finished_step >= self.spec.config.total_steps:
            return ""
        return lease.end_reason or ""

    @property
    def kept(self) -> tuple[PodView, ...]:
        """Pods of the gang that the newest plan names."""
        plan = self.launched_plan
        return () if plan is None else tuple(pod for pod in self.gang if plan.rank_of(pod.name) is not None)
