"""``TrainingJob.status``: the observed state of a job."""

from collections.abc import Mapping
from typing import Annotated, Any

from ballast_policies.contract.limits import MOST_EPOCH
from ballast_policies.protocol.observed import Cause
from pydantic import Field, field_validator

from ballast_operator.api.base import (
    Condition,
    Conditions,
    Name,
    StatusModel,
    Step,
    Text,
    Time,
    find_condition,
    listed,
    set_condition,
    storable,
)
from ballast_operator.api.conditions import SUSPENSIONS, JobCondition, JobReason, JobState
from ballast_operator.api.costs import DataCost, TeamPart
from ballast_operator.api.job_allocation import JobAllocation, LaunchDegrees, PoolCost


class Progress(StatusModel):
    """Progress of the training, as rank 0 reports it."""

    step: Step = 0
    """Optimizer steps done."""
    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Percent of ``spec.totalSteps``."""
    steps_per_second: Annotated[float, Field(ge=0)] | None = None
    """Speed over the last seconds, pauses included."""
    loss: float | None = None
    """Training loss of that step."""
    eta: Time | None = None
    """Time at which the last step is expected, at the present speed."""
    imbalance: Annotated[float, Field(ge=0)] | None = None
    """Load of the busiest rank / mean load - 1."""
    bubble: Annotated[float, Field(ge=0, le=1)] | None = None
    """Idle fraction of the ranks' time."""
    checkpoint_step: Step | None = None
    """Step of the newest complete checkpoint."""
    checkpoint_every_steps: Step | None = None
    """Steps between two checkpoints: ``spec.checkpoint.everySteps``, or what is chosen where it is absent."""
    checkpoint_seconds: Annotated[float, Field(ge=0)] | None = None
    """Seconds that training stands still for a checkpoint."""
    checkpoint_write_seconds: Annotated[float, Field(ge=0)] | None = None
    """Seconds until the checkpoint is whole, mostly beside the steps."""
    bad_samples: Step | None = None
    """Samples that this launch could not read and has left out (``training.skipBadSamples``)."""
    flops_per_second: Annotated[float, Field(ge=0)] | None = None
    """Operations per second and GPU, of the configured model's matrix products; absent: not counted."""
    part_of_peak: Annotated[float, Field(ge=0)] | None = None
    """These over those of the GPUs' data sheets: the model's FLOPS utilisation."""
    goodput: Annotated[float, Field(ge=0, le=1)] | None = None
    """Part of this launch's time in which steps ran, not starts, saves, evaluations or moves."""
    emulated_slowdown: Annotated[float, Field(ge=1)] | None = None
    """Factor by which the node emulates a slower GPU; absent: the speed is real."""
    validation_loss: float | None = None
    """Loss on the validation data, of the newest evaluation."""
    validation_step: Step | None = None
    """The step after which it was measured."""


class Rebalancing(StatusModel):
    """One move of layers between ranks."""

    time: Time
    """Time of the report."""
    launch: Annotated[int, Field(ge=1)] = 1
    """Launch in which it was."""
    step: Step
    """Step at which it was."""
    imbalance_before: float | None = None
    """Imbalance that led to it."""
    imbalance_after: float | None = None
    """Imbalance measured afterwards."""
    pause_ms: Annotated[float, Field(ge=0)] | None = None
    """Milliseconds that training stood still."""


class Survivor(StatusModel):
    """A pod that a repack kept."""

    name: Name
    """Its name."""
    uid: Name
    """Its UID, the same before and after."""


class Repacking(StatusModel):
    """One hand-back of GPUs while training."""

    time: Time
    """Time when the released pods were gone."""
    epoch: Annotated[int, Field(ge=1)]
    """The plan's epoch that it made."""
    step: Step
    """First step with fewer ranks."""
    released_pods: Annotated[tuple[Name, ...], listed(1024)]
    """Pods that went."""
    survivors: Annotated[tuple[Survivor, ...], listed(1024)]
    """Pods that stayed, by new rank."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs that stayed; absent: one for each of these pods."""
    pause_ms: Annotated[float, Field(ge=0)] | None = None
    """Milliseconds that training stood still."""
    step_seconds_before: Annotated[float, Field(ge=0)] | None = None
    """Predicted seconds per step as it was."""
    step_seconds_after: Annotated[float, Field(ge=0)] | None = None
    """Predicted seconds per step with fewer ranks."""
    reason: Text = ""
    """Reason, as text."""
    asked: bool = False
    """It was asked for, for other jobs or since nodes go; false: the trainer proposed it."""


MOST_RATIO = 1000.0
"""Most that a layer's measured seconds are over those stated; more is no measurement."""


class MeasuredOnType(StatusModel):
    """Measured times of a planned job's layers on a GPU type: its next launches are planned by them."""

    gpu_type: Name
    """The GPU type."""
    tensor: Annotated[int, Field(ge=1, le=1024)] = 1
    """Tensor degree."""
    ratios: Annotated[tuple[Annotated[float, Field(ge=0, le=MOST_RATIO)], ...], listed(1024)]
    """Measured seconds of each layer over those stated."""
    at: Time
    """Time of their measurement."""
    of: Name
    """Digest of the planner and model that they count for."""


class TriedPlan(StatusModel):
    """A plan that was tried."""

    plan: LaunchDegrees
    """Plan with its predicted seconds."""
    step_seconds: Annotated[float, Field(ge=0)] | None = None
    """Measured; absent: it has not run."""
    reason: Text = ""
    """Reason that it cannot."""

    def __str__(self) -> str:
        layers = ", ".join(map(str, self.plan.layers))
        took = "not measured" if self.step_seconds is None else f"{self.step_seconds:.3g} s a step measured"
        why = f": {self.reason}" if self.reason else ""
        of = f"{self.plan.schedule} of {layers} layers{self.plan.recomputed_as_text}"
        return f"{of}: {took}, {self.plan.step_seconds:.3g} predicted{why}"


class PlanTrial(StatusModel):
    """Trials of a gang with ``planner.trial`` in its first steps."""

    launch: Annotated[int, Field(ge=1, le=MOST_EPOCH)]
    """Number of the launch."""
    gpus: Name
    """GPUs on which it was."""
    of: Name
    """Digest of planner and model."""
    plans: Annotated[tuple[TriedPlan, ...], listed(8)] = ()
    """The launched one first."""
    kept: Annotated[int, Field(ge=0, le=7)] | None = None
    """Number of the one that continues, from 0; absent: not all were tried."""

    @property
    def was_ignored(self) -> bool:
        """True if the trainer tries no plans: each has a reason, the launched one as well."""
        return bool(self.plans) and all(one.reason for one in self.plans)

    @property
    def kept_plan(self) -> LaunchDegrees | None:
        """The plan that goes on; None: it is not known."""
        known = self.kept is not None and self.kept < len(self.plans)
        return self.plans[self.kept or 0].plan if known else None


class Decision(StatusModel):
    """The allocator's last decision about the job."""

    chosen: Text = ""
    """Choice."""
    next_best: Text = ""
    """Second choice."""
    why: Text = ""
    """Reason, in a sentence."""
    plan_id: Name = ""
    """The round."""
    gpu_type: Name = ""
    """GPU type chosen; empty: none."""


class Isolated(StatusModel):
    """Time that the job's progress would have taken on an isolated part of the cluster."""

    seconds: Annotated[float, Field(ge=0)]
    """Seconds, summed up with its part of each moment: of every GPU type, by the weights of the jobs then."""
    step: Step
    """The step up to which they count."""


class GpuTime(StatusModel):
    """Use of the job's GPUs, in GPU seconds; what is in none of the parts was productive."""

    held: Annotated[float, Field(ge=0)] = 0.0
    """GPU time held in all."""
    startup: Annotated[float, Field(ge=0)] = 0.0
    """No step was done: before all ranks train, and while they leave."""
    lost_steps: Annotated[float, Field(ge=0)] = 0.0
    """Steps that were done twice, at the job's mean time of a step."""
    moves: Annotated[float, Field(ge=0)] = 0.0
    """Training stood still while layers moved, or the gang changed its size."""
    checkpoint: Annotated[float, Field(ge=0)] = 0.0
    """Training stood still for checkpoints."""
    straggling: Annotated[float, Field(ge=0)] = 0.0
    """Ranks waited for the busiest one: imbalance / (1 + imbalance) of the time."""
    idle: Annotated[float, Field(ge=0)] = 0.0
    """Ranks were idle otherwise: the pipeline's bubble."""
    goodput: Annotated[float, Field(ge=0, le=1)] = 0.0
    """The part of ``held`` that was productive."""

    def plus(self, **seconds: float) -> "GpuTime":
        """GPU time with more of its parts, and goodput by them."""
        more = {name: getattr(self, name) + max(0.0, value) for name, value in seconds.items()}
        found = self.replace(**more)
        lost = sum(getattr(found, name) for name in WASTE)
        return found.replace(goodput=max(0.0, 1 - lost / found.held) if found.held > 0 else 0.0)


WASTE = ("startup", "lost_steps", "moves", "checkpoint", "straggling", "idle")
"""Parts of :class:`GpuTime` that are not productive."""


class TrainingJobStatus(StatusModel):
    """The observed state of a job."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation of the spec that this status is about."""
    state: JobState | None = None
    """One word for people, derived from the conditions; programs read the conditions."""
    conditions: Conditions = ()
    """Conditions by type."""
    allocation: JobAllocation | None = None
    """GPUs held; absent: none."""
    progress: Progress | None = None
    """Progress of the training."""
    rebalances: Annotated[tuple[Rebalancing, ...], listed(64)] = ()
    """The last moves of layers between ranks, oldest first."""
    repacks: Annotated[tuple[Repacking, ...], listed(64)] = ()
    """The last hand-backs of GPUs, oldest first."""
    measured_layers: Annotated[tuple[MeasuredOnType, ...], listed(8)] = ()
    """Measured layers by which the next launch with ``planner`` is planned, the newest last."""
    trial: PlanTrial | None = None
    """Last launch that tried plans, by ``planner.trial``."""
    launches: Annotated[int, Field(ge=0, le=MOST_EPOCH)] = 0
    """Number of launches of a gang."""
    restarts: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """Number of launches that ended early, by cause."""
    last_decision: Decision | None = None
    """The allocator's last decision about the job."""
    cost_so_far: Annotated[float, Field(ge=0)] = 0.0
    """GPU hours x price of the pool, in the currency of ``pricePerGpuHour``, up to ``costAt``, and data read
    from other regions."""
    cost_at: Time | None = None
    """Time of the cost's last sum."""
    active_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds during which it has held GPUs, up to ``costAt``."""
    pool_costs: Annotated[tuple[PoolCost, ...], listed(256, "pool")] = ()
    """``costSoFar`` by pool; ``ballast cost`` sums them up."""
    team_costs: Annotated[tuple[TeamPart, ...], listed(16, "team")] = ()
    """``costSoFar`` by team; the last one pays now, the others are those that the job belonged to before."""
    data: DataCost | None = None
    """Data that it has read from other regions, of a job with ``spec.dataLocation``."""
    lost_steps: Annotated[int, Field(ge=0)] = 0
    """Steps that were done and not saved when a launch ended: they are done twice."""
    lost_cost: Annotated[float, Field(ge=0)] = 0.0
    """Their cost, at the job's mean cost of a step until then."""
    gpu_time: GpuTime | None = None
    """Use of its GPUs; absent: it has held none."""
    isolated: Isolated | None = None
    """Time that an isolated share would have taken, for ``finish-time-fairness``. Absent: no progress."""
    gpu_left_at: Time | None = None
    """Time when it last left a GPU that it shared: from then on the other job pays for the whole of it."""
    suspended_since: Time | None = None
    """Since when it is suspended, by ``spec.suspend``, budget or deadline; absent: it is not."""
    suspended_seconds: Annotated[float, Field(ge=0)] = 0.0
    """Seconds of earlier suspensions: they do not count as time that the job had to wait."""
    next_launch_at: Time | None = None
    """Earliest time of the next launch, after a failure of the job itself."""
    finished_at: Time | None = None
    """Time when it succeeded or failed for good."""

    @field_validator("state", mode="before")
    @classmethod
    def _known(cls, state: object) -> object:
        # One of a newer release is derived anew from the conditions.
        return state if state in tuple(JobState) else None

    @field_validator("allocation")
    @classmethod
    def _holds_pods(cls, allocation: JobAllocation | None) -> JobAllocation | None:
        # The operator writes pods and nodes together. An allocation without them holds nothing.
        if allocation is None or not allocation.pods or len(allocation.pods) != len(allocation.nodes):
            return None
        if allocation.parts and {*allocation.pods} != {pod for part in allocation.parts for pod in part.pods}:
            allocation = allocation.replace(parts=())  # put there by hand
        gpus = len(allocation.pods) * allocation.gpus_per_pod
        return allocation if allocation.gpus == gpus else allocation.replace(gpus=gpus)

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if there is one."""
        return find_condition(self.conditions, kind)

    def is_true(self, kind: str) -> bool:
        """True if the condition of this type exists and is true."""
        condition = self.condition(kind)
        return condition is not None and condition.is_true

    def with_condition(
        self, kind: str, value: bool | None, reason: str, message: str, *, now: Time, generation: int
    ) -> "TrainingJobStatus":
        """The status with this condition; its transition time moves only when its status changes."""
        conditions = set_condition(
            self.conditions, kind, value, reason, message, now=now, generation=generation
        )
        return self.replace(conditions=conditions)

    @property
    def finished(self) -> bool:
        """Succeeded, or failed for good."""
        return any(condition.type in _ENDS and condition.is_true for condition in self.conditions)

    def without_end(self) -> "TrainingJobStatus":
        """The status of a job that has not ended."""
        return self.replace(conditions=tuple(each for each in self.conditions if each.type not in _ENDS))

    @property
    def counted_restarts(self) -> int:
        """Restarts that count toward ``backoffLimit``."""
        return sum(count for cause, count in self.restarts.items() if cause in COUNTED_CAUSES)

    def none_after(self, latest: Time, now: Time) -> "TrainingJobStatus":
        """The status with ``now`` for what is said to have happened, or to end a pause, after ``latest``.

        Such a time is of a clock that was wrong, or was put there by hand: nothing waits for it.
        """

        def late(part: StatusModel, *names: str) -> dict[str, Time]:
            times = {name: getattr(part, name) for name in names}
            return {name: now for name, time in times.items() if time is not None and time > latest}

        changes: dict[str, Any] = late(
            self, "cost_at", "gpu_left_at", "suspended_since", "next_launch_at", "finished_at"
        )
        if self.allocation is not None:
            held: dict[str, Any] = late(self.allocation, "since", "joining_since", "resized_at")
            if (ending := self.allocation.ending) is not None and (since := late(ending, "since")):
                held["ending"] = ending.replace(**since)
            if held:
                changes["allocation"] = self.allocation.replace(**held)
        return self.replace(**changes) if changes else self

    @property
    def unpaid_since(self) -> Time | None:
        """Time up to which cost and active time of its gang are summed up; None: it has none."""
        if self.allocation is None:
            return None
        since, cost_at = self.allocation.since, self.cost_at
        return cost_at if cost_at is not None and cost_at > since else since

    @property
    def summary_state(self) -> JobState:
        """One word for people, from the conditions and the allocation."""
        if self.is_true(JobCondition.SUCCEEDED):
            return JobState.SUCCEEDED
        if self.is_true(JobCondition.FAILED):
            return JobState.FAILED
        if self.allocation is None:
            admitted = self.condition(JobCondition.ADMITTED)
            suspended = admitted is not None and admitted.reason in SUSPENSIONS
            return JobState.SUSPENDED if suspended else JobState.WAITING
        if self.allocation.ending is not None:
            return JobState.STOPPING
        if not self.is_true(JobCondition.RUNNING):
            return JobState.STARTING
        repacked = self.condition(JobCondition.REPACKED)
        if repacked is not None and not repacked.is_true and repacked.reason == JobReason.REPACKING:
            return JobState.REPACKING
        return JobState.RUNNING


_ENDS = frozenset({JobCondition.SUCCEEDED, JobCondition.FAILED})

COUNTED_CAUSES = frozenset(cause.value for cause in Cause if cause.counts)
"""Keys of ``restarts`` that count toward ``backoffLimit``."""


PROGRESS_FIELDS = frozenset(
    {
        "progress",
        "cost_so_far",
        "cost_at",
        "pool_costs",
        "team_costs",
        "lost_steps",
        "lost_cost",
        "active_seconds",
        "gpu_time",
        "isolated",
    }
)
"""Fields of the status that change with every report, and may wait."""


def allocation_in(status: Mapping[str, Any] | None) -> JobAllocation | None:
    """The allocation in a stored status; None: it has none, or one that cannot be read."""
    read = TrainingJobStatus.written(status, "allocation")
    return None if read is None else read.allocation


def progress_alone(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """True if nothing differs but what changes with every report."""
    fields = TrainingJobStatus.model_fields.keys() - PROGRESS_FIELDS
    return all(getattr(old, field) == getattr(new, field) for field in fields)


def waits_alone(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """True if a job still waits, as it was told before, and nothing differs but why."""
    was, said = old.condition(JobCondition.ADMITTED), new.condition(JobCondition.ADMITTED)
    if new.allocation is not None or was is None or said is None or was.reason == JobReason.PENDING:
        return False
    if said.replace(reason=was.reason, message=was.message) != was:
        return False
    conditions = tuple(was if each is said else each for each in new.conditions)
    return old == new.replace(conditions=conditions, last_decision=old.last_decision)


def reconciled(status: TrainingJobStatus, now: Time, generation: int) -> TrainingJobStatus:
    """The status without the complaint of an earlier pass."""
    known = status.condition(JobCondition.RECONCILED)
    if known is None or known.is_true:
        return status
    message = "the last pass over the job succeeded"
    kind, reason = JobCondition.RECONCILED, JobReason.PASS_COMPLETED
    return status.with_condition(kind, True, reason, message, now=now, generation=generation)


def refused_since(status: TrainingJobStatus, generation: int) -> bool:
    """True if the API server has refused a status of this spec."""
    known = status.condition(JobCondition.RECONCILED)
    return (
        known is not None
        and known.reason == JobReason.STATUS_REFUSED
        and known.observed_generation == generation
    )


def asks_or_frees(old: TrainingJobStatus, new: TrainingJobStatus) -> bool:
    """True if a status is news to the allocator, which decides on more than what it has caused itself."""
    launched = old.allocation is None and new.allocation is not None
    return (
        (old.allocation != new.allocation and not launched)
        or old.finished != new.finished
        or old.is_true(JobCondition.RUNNING) != new.is_true(JobCondition.RUNNING)
        or len(old.repacks) != len(new.repacks)
    )


def least_status(
    old: TrainingJobStatus, new: TrainingJobStatus, why: str, now: Time, generation: int
) -> TrainingJobStatus:
    """Status written in place of ``new``, which the API server refuses for the reason ``why``.

    What the job's life hangs on is new, with plain texts; everything else is as it is stored.
    """
    allocation = new.allocation
    if allocation is not None and allocation.ending is not None:
        ending = allocation.ending
        allocation = allocation.replace(ending=ending.replace(message=plain(ending.message)))
    conditions = tuple(condition.replace(message=plain(condition.message)) for condition in new.conditions)
    kept = {field: getattr(new, field) for field in LIFE_FIELDS}
    least = old.replace(**kept, allocation=allocation, conditions=conditions)
    message = f"the API server refused the job's full status: {plain(why)}. To fix: report this message"
    kind, reason = JobCondition.RECONCILED, JobReason.STATUS_REFUSED
    return least.with_condition(kind, False, reason, message, now=now, generation=generation)


LIFE_FIELDS = (
    "observed_generation",
    "state",
    "launches",
    "restarts",
    "lost_steps",
    "suspended_since",
    "suspended_seconds",
    "next_launch_at",
    "finished_at",
    "gpu_left_at",
)
"""Fields that later passes decide on, beside the conditions and the allocation."""


def plain(text: str) -> str:
    """The text in at most 500 printable ASCII characters."""
    return "".join(character if " " <= character <= "~" else "?" for character in text[:500])


def status_content(status: TrainingJobStatus) -> dict[str, Any]:
    """The status as the API has it; until its first launch, without what is empty.

    Thousands of jobs may arrive and wait. Absent means empty, for every reader; what was
    there before goes, as the whole status is replaced.

    Raises:
        pydantic.ValidationError: a value is outside its schema; a bug of a step.
    """
    content: dict[str, Any] = storable(status.to_dict())
    TrainingJobStatus.model_validate(content)
    if status.launches:
        return content
    return {name: value for name, value in content.items() if value != _EMPTY.get(name)}


_EMPTY = TrainingJobStatus().to_dict()
