"""``TrainingJob.status``: what has become of a job."""

from typing import Annotated

from pydantic import Field

from ballast_operator.api.base import Conditions, StatusModel, Step, Time, schema
from ballast_operator.api.conditions import JobState

_Text = Annotated[str, Field(max_length=4096)]
_Name = Annotated[str, Field(max_length=253)]


class Ending(StatusModel):
    """A launch that is being ended."""

    cause: _Name
    """Why, in a word."""
    message: _Text = ""
    """Why, in a sentence."""
    since: Time
    """When it was decided."""


class JobAllocation(StatusModel):
    """The GPUs that the job holds, or is about to hold. Written before the first pod is made."""

    gpu_type: _Name
    """Type of the GPUs."""
    pool: _Name
    """Node pool they are in."""
    gpus: Annotated[int, Field(ge=0)]
    """Number of GPUs, one a pod."""
    pods: Annotated[
        tuple[_Name, ...], Field(max_length=1024, json_schema_extra=schema(list_type="atomic"))
    ] = ()
    """Names of the pods, by rank at launch."""
    nodes: Annotated[
        tuple[_Name, ...], Field(max_length=1024, json_schema_extra=schema(list_type="atomic"))
    ] = ()
    """Node of each of the pods."""
    plan_id: _Name = ""
    """The round that chose it."""
    launch: Annotated[int, Field(ge=1)] = 1
    """Which launch of the job this is, from 1."""
    since: Time
    """When it was given."""
    joining: Annotated[
        tuple[_Name, ...], Field(max_length=1024, json_schema_extra=schema(list_type="atomic"))
    ] = ()
    """Those of the pods that are to join the running gang, and have not yet."""
    joining_since: Time | None = None
    """When the last growth was decided."""
    first_newcomer: Annotated[int, Field(ge=0)] = 0
    """Number in the name of the first pod of the last growth."""
    ending: Ending | None = None
    """Set once the launch has to end."""


class Progress(StatusModel):
    """How far the training is, as rank 0 reports it."""

    step: Step = 0
    """Optimizer steps done."""
    percent: Annotated[int, Field(ge=0, le=100)] | None = None
    """Of ``spec.totalSteps``."""
    steps_per_second: Annotated[float, Field(ge=0)] | None = None
    """Over the last seconds, pauses included."""
    loss: float | None = None
    """Training loss of that step."""
    eta: Time | None = None
    """When the last step is expected, at the present speed."""
    imbalance: Annotated[float, Field(ge=0)] | None = None
    """Load of the busiest rank / mean load - 1."""
    bubble: Annotated[float, Field(ge=0, le=1)] | None = None
    """Idle fraction of the ranks' time."""
    checkpoint_step: Step | None = None
    """Step of the newest complete checkpoint."""
    emulated_slowdown: Annotated[float, Field(ge=1)] | None = None
    """Factor by which the node emulates a slower GPU; absent: the speed is real."""


class Rebalancing(StatusModel):
    """One move of layers between ranks."""

    time: Time
    """When it was reported."""
    launch: Annotated[int, Field(ge=1)] = 1
    """In which launch."""
    step: Step
    """At which step."""
    imbalance_before: float | None = None
    """Imbalance that led to it."""
    imbalance_after: float | None = None
    """Imbalance measured afterwards."""
    pause_ms: Annotated[float, Field(ge=0)] | None = None
    """How long training stood still, in milliseconds."""


class Survivor(StatusModel):
    """A pod that a repack kept."""

    name: _Name
    """Its name."""
    uid: _Name
    """Its UID, the same before and after."""


class Repacking(StatusModel):
    """One hand-back of GPUs while training."""

    time: Time
    """When the released pods were gone."""
    epoch: Annotated[int, Field(ge=1)]
    """The plan's epoch that it made."""
    step: Step
    """First step with fewer ranks."""
    released_pods: Annotated[
        tuple[_Name, ...], Field(max_length=1024, json_schema_extra=schema(list_type="atomic"))
    ]
    """Pods that went."""
    survivors: Annotated[
        tuple[Survivor, ...], Field(max_length=1024, json_schema_extra=schema(list_type="atomic"))
    ]
    """Pods that stayed, by new rank."""
    pause_ms: Annotated[float, Field(ge=0)] | None = None
    """How long training stood still, in milliseconds."""
    step_seconds_before: Annotated[float, Field(ge=0)] | None = None
    """Predicted seconds per step as it was."""
    step_seconds_after: Annotated[float, Field(ge=0)] | None = None
    """Predicted seconds per step with fewer ranks."""
    reason: _Text = ""
    """Why, in words."""


class Decision(StatusModel):
    """The allocator's last word on the job."""

    chosen: _Text = ""
    """What was chosen."""
    next_best: _Text = ""
    """What would have been second."""
    why: _Text = ""
    """Why, in a sentence."""
    plan_id: _Name = ""
    """The round."""
    gpu_type: _Name = ""
    """GPU type chosen; empty: none."""


class Isolated(StatusModel):
    """How long the job's progress would have taken on an equal, isolated part of the cluster."""

    seconds: Annotated[float, Field(ge=0)]
    """Seconds, summed up with the equal part of each moment: 1/n of every GPU type, n being the jobs then."""
    step: Step
    """The step up to which they count."""


class TrainingJobStatus(StatusModel):
    """What has become of a job."""

    observed_generation: Annotated[int, Field(ge=0)] = 0
    """metadata.generation of the spec that this status is about."""
    state: JobState | None = None
    """One word for people, derived from the conditions; programs read the conditions."""
    conditions: Conditions = ()
    """Admitted, Running, Rebalanced, Repacked, Grown, Preempted, InputsComplete, OnTime; at the end
    Succeeded or Failed."""
    allocation: JobAllocation | None = None
    """GPUs held; absent: none."""
    progress: Progress | None = None
    """How far the training is."""
    rebalances: Annotated[
        tuple[Rebalancing, ...], Field(max_length=64, json_schema_extra=schema(list_type="atomic"))
    ] = ()
    """The last moves of layers between ranks, oldest first."""
    repacks: Annotated[
        tuple[Repacking, ...], Field(max_length=64, json_schema_extra=schema(list_type="atomic"))
    ] = ()
    """The last hand-backs of GPUs, oldest first."""
    launches: Annotated[int, Field(ge=0)] = 0
    """How often a gang was launched."""
    restarts: dict[str, Annotated[int, Field(ge=0)]] = Field(default_factory=dict)
    """How often a launch ended early, by cause."""
    last_decision: Decision | None = None
    """The allocator's last word on the job."""
    cost_so_far: Annotated[float, Field(ge=0)] | None = None
    """GPU hours x price of the pool, in the currency of ``pricePerGpuHour``, up to ``costAt``."""
    cost_at: Time | None = None
    """When the cost was summed up last."""
    isolated: Isolated | None = None
    """For ``finish-time-fairness``: what an isolated equal share would have taken. Absent: no progress."""
    suspended_since: Time | None = None
    """Since when ``spec.suspend`` is set; absent: it is not."""
    suspended_seconds: Annotated[float, Field(ge=0)] | None = None
    """Seconds of earlier suspensions: they do not count as time that the job had to wait."""
    next_launch_at: Time | None = None
    """Not launched before, after a failure of its own doing."""
    finished_at: Time | None = None
    """When it succeeded or failed for good."""
