"""Messages of operator and trainer: their names and keys, and what the trainer tells of ranks and stages.

Each constant says who writes it, who reads it and what a missing one means.
"""

import enum
from typing import Annotated, Self

from pydantic import FailFast, Field, model_validator

from ballast_policies.contract.errors import ContractError, shown
from ballast_policies.contract.limits import (
    LONGEST_NAME,
    LONGEST_REASON,
    MOST_CANDIDATES,
    MOST_EPOCH,
    MOST_LAYERS,
    MOST_RANKS,
    MOST_RATE,
    MOST_SECONDS,
    MOST_SLOW_RANKS,
    MOST_STEP,
)
from ballast_policies.contract.model import Model

PLAN_KEY = "plan.json"
"""Key in the ConfigMap ``<job>-plan``. Written by the operator, read by every rank. Missing: wait."""

CONFIG_KEY = "config.json"
"""Key in the same ConfigMap: the fields of ``TrainingJob.spec`` that the trainer acts on, defaults filled in
(totalSteps, model, pipeline, dynamics, rebalance, repack, checkpoint). Written by the operator at a launch,
read by every rank. Missing: wait."""

REPORT_ANNOTATION = "ballast.dev/report"
"""Annotation of the Lease ``<job>``: a Report. Written by rank 0, read by the operator. Missing: no step
yet."""

PROPOSAL_ANNOTATION = "ballast.dev/proposal"
"""Annotation of the Lease: a Proposal. Written by rank 0, read by the operator. Missing: nothing proposed."""

ACK_ANNOTATION = "ballast.dev/ack"
"""Annotation of the Lease: an Ack. Written by rank 0, read by the operator. Missing: no epoch reached yet."""

FINISHED_ANNOTATION = "ballast.dev/finished-step"
"""Annotation of the Lease: the last step, a decimal. Written by rank 0 after the last checkpoint.
Missing: training."""

END_REASON_ANNOTATION = "ballast.dev/end-reason"
"""Annotation of the Lease: the reason, as text, of an end before the last step. Written by rank 0 with the
finished step, read by the operator. Missing: it trains, or all steps are done."""

JOB_LABEL = "ballast.dev/job"
"""Label of pods, ConfigMaps, Leases: the TrainingJob's name. Written and read by the operator."""

LAUNCH_LABEL = "ballast.dev/launch"
"""Label of pods: the launch that they belong to, a decimal from 1. Written and read by the operator."""

RANK_LABEL = "ballast.dev/rank"
"""Label of pods: the number in the pod's name, a decimal from 0; with one GPU a pod, its rank at launch.
Written and read by the operator."""

POD_IP_ENV = "BALLAST_POD_IP"
"""Variable of a pod: its own address, as a plan's ranks have it. Written by the operator, read by the
trainer, which follows no plan that names another one. Missing: it follows any."""

POD_RANKS_ENV = "BALLAST_POD_RANKS"
"""Variable of a pod: the number of its ranks, one for each of its GPUs. Written by the operator, read by
the trainer. Missing: one."""

RANK_RESTARTS_ENV = "BALLAST_RANK_RESTARTS"
"""Variable of a pod: the number of times that each killed rank is started again, while the others of
the gang wait and go on with it from their memory. Written by the operator, read by the trainer. Missing:
never; the pod ends with its rank."""

RANK_RESTARTS = 3
"""Number of times that a killed rank is started again, by its pod or by ``ballast-train run --ranks``."""

RENEW_ENV = "BALLAST_RENEW_SECONDS"
"""Variable of a pod: seconds between two renewals of the Lease by rank 0 while it has nothing to tell but
the newest report. Written by the operator, read by rank 0. Missing: :data:`RENEW_SECONDS`."""

HANDOVER_ENV = "BALLAST_HANDOVER_SECONDS"
"""Variable of a pod: seconds after SIGTERM for which its ranks train on and wait for a plan that releases
them, before they ask all ranks to save and stop. Written by the operator, read by every rank. Missing:
not at all, since no such plan will come."""

RENEW_SECONDS = 20.0
"""A third of the time after which a Lease that is not renewed counts as a hung job."""

EMULATED_SLOWDOWN_ENV = "BALLAST_EMULATED_SLOWDOWN"
"""Variable of a pod: JSON {model family or "default": factor >= 1}. Written by the process node,
read by the trainer, which pads its layers' compute time by the factor. Missing: nothing is emulated."""

GPU_RESOURCE = "nvidia.com/gpu"
"""The extended resource that nodes offer and pods ask for, where a node pool names no other."""

RENDEZVOUS_PORT = 29400
"""TCP port on rank 0's pod address where ranks meet."""


def plan_config_map_name(job: str) -> str:
    """Name of the ConfigMap that holds the job's plan."""
    return f"{job}-plan"


def rendezvous_config_map_name(job: str) -> str:
    """Name of the ConfigMap with the address of rank 0, under :func:`rendezvous_key`; of scripts only."""
    return f"{job}-rendezvous"


def rendezvous_key(launch: int) -> str:
    """Key of the address of rank 0 in a launch; missing: the kubelet waits with the other ranks' start."""
    return f"launch-{launch}"


def lease_name(job: str) -> str:
    """Name of the Lease that rank 0 renews."""
    return job


def pod_name(job: str, launch: int, number: int) -> str:
    """Name of pod ``number`` of the job's ``launch``, from 0; the same inputs give the same name."""
    return f"{job}-{launch}-{number}"


def process_name(pod: str, local_rank: int) -> str:
    """Name of one of a pod's processes: that of the pod for the first, ``pod/1``, ``pod/2`` and so on."""
    return f"{pod}/{local_rank}" if local_rank else pod


class Rank(Model):
    """One process of the gang.

    Attributes:
        rank: position in the process group, 0-based; rank 0 hosts the rendezvous and reports.
        pod: name of the pod that runs it. A pod keeps its name over epochs, its ranks may change.
        local_rank: position among the processes of the pod, 0-based; the GPU of the pod that it uses.
        address: IP address of the pod.
        gpu_type: the pool's GPU type, e.g. ``v100``.
        node: the pod's; empty: not known.
    """

    rank: int = Field(ge=0, le=MOST_RANKS)
    pod: str = Field(max_length=LONGEST_NAME)
    local_rank: int = Field(0, ge=0, le=MOST_RANKS)
    address: str = Field(max_length=LONGEST_NAME)
    gpu_type: str = Field(max_length=LONGEST_NAME)
    node: str = Field("", max_length=LONGEST_NAME)

    @property
    def process(self) -> str:
        """Name of the process, the same over epochs: see :func:`~ballast_policies.contract.process_name`."""
        return process_name(self.pod, self.local_rank)


class Stage(Model):
    """Consecutive layers ``first_layer`` (inclusive) to ``end_layer`` (exclusive) on one rank."""

    rank: int = Field(ge=0, le=MOST_RANKS)
    first_layer: int = Field(ge=0, le=MOST_LAYERS)
    end_layer: int = Field(ge=1, le=MOST_LAYERS)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.first_layer >= self.end_layer:
            raise ValueError(
                f"stage on rank {self.rank} has layers [{self.first_layer}, {self.end_layer}): "
                "a stage needs at least one layer"
            )
        return self


class Candidate(Model):
    """A plan that ranks may be trained by, without another launch.

    Attributes:
        schedule: as ``pipeline.schedule`` names it, with a flush.
        layers: of each stage.
        repeated: number of layers of which one repeats its forward; 0: none does; None: as launched.
        step_seconds: predicted.
        memory_bytes: predicted of the fullest GPU.
    """

    schedule: str = Field(max_length=LONGEST_NAME)
    layers: tuple[Annotated[int, Field(ge=1, le=MOST_LAYERS)], ...] = Field(
        min_length=1, max_length=MOST_LAYERS
    )
    repeated: int | None = Field(None, ge=0, le=MOST_LAYERS)
    step_seconds: float = Field(ge=0, le=MOST_SECONDS)
    memory_bytes: float = Field(0.0, ge=0)


class Tried(Model):
    """A candidate's result.

    Attributes:
        step_seconds: measured; None: not yet, or it does not run.
        reason: why it does not run.
    """

    step_seconds: float | None = Field(None, ge=0, le=MOST_SECONDS)
    reason: str = Field("", max_length=LONGEST_REASON)


class SlowRank(Model):
    """A rank that takes ``factor`` times as long for the same work as the median rank of its GPU type."""

    rank: int = Field(ge=0, le=MOST_RANKS)
    factor: float = Field(ge=1, le=MOST_RATE)


# Of a list as long as the layers the first problem is told: a trainer may send one of a hundred thousand.
_Seconds = Annotated[
    tuple[Annotated[float, Field(ge=0, le=MOST_SECONDS)], ...], Field(max_length=MOST_LAYERS), FailFast()
]
_Bytes = Annotated[
    tuple[Annotated[int, Field(ge=0, le=2**53)], ...], Field(max_length=MOST_LAYERS), FailFast()
]
Stages = Annotated[tuple[Stage, ...], Field(max_length=MOST_LAYERS), FailFast()]
"""Stages by layer."""


class Report(Model):
    """Rank 0's view of the running job, written at once when something happens, otherwise at each renewal.

    Attributes:
        epoch: the plan epoch that the ranks train with.
        step: optimizer steps finished since the job began (restarts do not reset it).
        loss: training loss of that step.
        steps_per_second: over the last reporting window, pauses included.
        layer_seconds: seconds per step of each layer (forward, backward and optimizer), as measured.
        layer_forward_seconds, layer_optimizer_seconds: those of them that are forward and optimizer.
        layer_bytes: bytes of each layer (parameters, gradients and optimizer state).
        layer_weight_bytes: those of them that are parameters.
        layer_activation_bytes: kept by each layer for its backward, of one microbatch, as measured.
        layer_output_bytes, layer_gradient_bytes, layer_repeated_bytes: of one microbatch: each layer's
            output, gradients from which those of its weights come, and what a repeated forward keeps.
        stages: the partition in force.
        imbalance: max over ranks of the load / mean load - 1.
        bubble: idle fraction of the ranks' time, 0 to 1.
        rebalances: how often layers moved between ranks without a change of ranks.
        last_rebalance_step: step at which layers moved last; None: not yet.
        imbalance_before, imbalance_after: around the last rebalance; ``after`` is measured, not predicted.
        rebalance_pause_ms: how long training stood still for the last rebalance.
        checkpoint_step: step of the newest complete checkpoint; None: none yet.
        resumed_from_step: step of the checkpoint this launch started from; None: from scratch.
        emulated: the slow-down factor that emulates GPU speed; None: real speed.
        validation_loss, validation_step: of the newest evaluation, and after which step; None: none since the
            launch.
        checkpoint_every_steps: steps between two checkpoints now; None: nothing is saved, or it is not known.
        checkpoint_seconds: how long training stood still for a checkpoint lately; None: not measured.
        checkpoint_write_seconds: how long it took until the checkpoint was whole, mostly beside the steps.
        not_saved: why checkpoints fail since the newest complete one; empty: none has.
        bad_samples: samples (of a loader: batches) that could not be read and were left out, of this launch.
        flops_per_second: operations per second and rank, as of step lines; None: not known.
        part_of_peak: the same over what the GPUs promise; None: not known.
        goodput: part of this launch's time in which steps ran; None: none has.
        slow_ranks: ranks that measure slow beside the others of their GPU type, the slowest first.
        tried: of each of the plan's candidates, what came out; empty: none are tried.
        kept: number of the candidate that measured fastest and goes on; None: they are being tried.
    """

    epoch: int = Field(ge=1, le=MOST_EPOCH)
    step: int = Field(ge=0, le=MOST_STEP)
    loss: float | None
    steps_per_second: float | None = Field(ge=0, le=MOST_RATE)
    layer_seconds: _Seconds = ()
    layer_bytes: _Bytes = ()
    layer_weight_bytes: _Bytes = ()
    layer_forward_seconds: _Seconds = ()
    layer_optimizer_seconds: _Seconds = ()
    layer_activation_bytes: _Bytes = ()
    layer_output_bytes: _Bytes = ()
    layer_gradient_bytes: _Bytes = ()
    layer_repeated_bytes: _Bytes = ()
    stages: Stages = ()
    imbalance: float | None = None
    bubble: float | None = None
    rebalances: int = Field(0, ge=0, le=MOST_STEP)
    last_rebalance_step: int | None = Field(None, ge=0, le=MOST_STEP)
    imbalance_before: float | None = None
    imbalance_after: float | None = None
    rebalance_pause_ms: float | None = Field(None, ge=0, le=1000 * MOST_SECONDS)
    checkpoint_step: int | None = Field(None, ge=0, le=MOST_STEP)
    resumed_from_step: int | None = Field(None, ge=0, le=MOST_STEP)
    emulated: float | None = Field(None, gt=0, le=1e9)
    validation_loss: float | None = None
    validation_step: int | None = Field(None, ge=0, le=MOST_STEP)
    checkpoint_every_steps: int | None = Field(None, ge=1, le=MOST_STEP)
    checkpoint_seconds: float | None = Field(None, ge=0, le=MOST_SECONDS)
    checkpoint_write_seconds: float | None = Field(None, ge=0, le=MOST_SECONDS)
    not_saved: str = Field("", max_length=LONGEST_REASON)
    bad_samples: int = Field(0, ge=0, le=MOST_STEP)
    flops_per_second: float | None = Field(None, ge=0)
    part_of_peak: float | None = Field(None, ge=0)
    goodput: float | None = Field(None, ge=0, le=1)
    slow_ranks: tuple[SlowRank, ...] = Field((), max_length=MOST_SLOW_RANKS)
    tried: tuple[Tried, ...] = Field((), max_length=MOST_CANDIDATES)
    kept: int | None = Field(None, ge=0, le=MOST_CANDIDATES)

    def without_layers(self) -> Self:
        """The report without its figures of each layer, nine tenths of it for a model of many."""
        return self.replace(**{name: () for name in type(self).model_fields if name.startswith("layer_")})


class Proposal(Model):
    """A repack that the trainer offers: fewer ranks, at nearly the same speed.

    The operator answers with a plan of epoch ``epoch + 1`` and directive ``shrink``, or not at all.

    Attributes:
        epoch: the epoch the proposal was made in; stale if the plan has moved on.
        step: the step it was made at.
        kept_pods: pods that stay, in the order of their new ranks; the first is that of today's rank 0.
        released_pods: pods whose GPUs come free.
        stages: the partition over the kept ranks (``rank`` counts in the new numbering).
        step_seconds_before: predicted seconds per step on today's ranks before the layers got cheaper.
        step_seconds_after: predicted seconds per step when repacked.
        reason: why, as text.
    """

    epoch: int = Field(ge=1, le=MOST_EPOCH)
    step: int = Field(ge=0, le=MOST_STEP)
    kept_pods: tuple[str, ...] = Field(max_length=MOST_RANKS)
    released_pods: tuple[str, ...] = Field(max_length=MOST_RANKS)
    stages: Stages
    step_seconds_before: float = Field(ge=0, le=MOST_SECONDS)
    step_seconds_after: float = Field(ge=0, le=MOST_SECONDS)
    reason: str = Field("", max_length=LONGEST_REASON)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if not self.kept_pods or not self.released_pods:
            raise ValueError("a repack keeps at least one pod and releases at least one")
        both = set(self.kept_pods) & set(self.released_pods)
        if both:
            raise ValueError(f"pods {sorted(both)} are both kept and released")
        return self


class Ack(Model):
    """Rank 0 says that all ranks of the plan have reached ``epoch`` and train (or have stopped) as it wants.

    Attributes:
        epoch: the epoch reached.
        step: the first step that runs, or would run, under it.
        pause_ms: how long training stood still for the change; None for a launch.
        checkpoint_step: for ``checkpointAndStop``: the step that was saved.
    """

    epoch: int = Field(ge=1, le=MOST_EPOCH)
    step: int = Field(ge=0, le=MOST_STEP)
    pause_ms: float | None = Field(None, ge=0, le=1000 * MOST_SECONDS)
    checkpoint_step: int | None = Field(None, ge=0, le=MOST_STEP)


def read_finished_step(text: str) -> int:
    """The last step, as the annotation ``ballast.dev/finished-step`` has it: a decimal.

    Raises:
        ContractError: it is none, or beyond the largest step number.
    """
    if len(text) <= len(str(MOST_STEP)) and text.isascii() and text.isdecimal() and int(text) <= MOST_STEP:
        return int(text)
    raise ContractError(f"expected a decimal from 0 to {MOST_STEP}, got {shown(text)}")


def read_end_reason(text: str) -> str:
    """Reason that a job ends before its last step, from the annotation ``ballast.dev/end-reason``.

    Raises:
        ContractError: it is empty, or longer than a reason may be.
    """
    if 0 < len(text) <= LONGEST_REASON:
        return text
    raise ContractError(f"expected a text of 1 to {LONGEST_REASON} characters, got {shown(text)}")


class ExitCode(enum.IntEnum):
    """Exit codes of ``ballast-train`` in a pod."""

    OK = 0
    """All steps are done, or the rank was released by a shrink."""
    ERROR = 1
    """The user's model, data or configuration failed: counts toward ``backoffLimit``."""
    USAGE = 2
    """Wrong arguments or configuration: counts toward ``backoffLimit``."""
    STOPPED = 75
    """Stopped by directive or SIGTERM: the job continues later, from its newest checkpoint."""
    PEER_LOST = 76
    """Another rank died or hung: this one is healthy, the gang restarts from the checkpoint."""


class ExitReason(enum.StrEnum):
    """Reason that the process ended; the ``reason`` of the termination message."""

    FINISHED = "Finished"
    RELEASED = "Released"
    STOPPED = "CheckpointedAndStopped"
    STOPPED_UNSAVED = "StoppedWithoutCheckpoint"
    PEER_LOST = "PeerLost"
    CONFIGURATION = "ConfigurationError"
    FAILED = "TrainingFailed"


class TerminationMessage(Model):
    """JSON in ``/dev/termination-log``, shown by ``kubectl describe pod`` and read by the operator."""

    reason: ExitReason
    message: str = Field(max_length=LONGEST_REASON)
    step: int | None = Field(None, ge=0, le=MOST_STEP)
