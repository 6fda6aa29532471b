"""Answers of the machine: one :class:`Decision`, carried out as it is; and the checks of a shrink."""

import dataclasses
import enum
from collections.abc import Callable, Collection, Sequence

from ballast_policies.contract.job.pipeline import RepackConfig
from ballast_policies.contract.messages import Proposal
from ballast_policies.contract.plan import Directive, Plan
from ballast_policies.protocol.observed import Cause, Deadline, Gang


class State(enum.StrEnum):
    """The states of a job's life."""

    WAITING = "Waiting"
    """It holds no GPUs."""
    STARTING = "Starting"
    """A launch is written; its pods are made, and its plan once all of them run."""
    TRAINING = "Training"
    """The plan is written; no change of the gang's size is under way."""
    SHRINKING = "Shrinking"
    """The plan leaves out pods that the gang still holds."""
    JOINING = "Joining"
    """New pods are written; the plan does not name them yet."""
    GROWING = "Growing"
    """The plan names the new pods; rank 0 has not acknowledged it."""
    STOPPING = "Stopping"
    """The launch has to end."""
    COMPLETING = "Completing"
    """The last step is done and the launch has to end."""
    ENDED = "Ended"
    """It succeeded or failed for good."""


class Why(enum.StrEnum):
    """Observation that ends a launch or gives up a growth."""

    DONE = "Done"
    SUSPENDED = "Suspended"
    TAKEN_BACK = "TakenBack"
    """The allocator wants the GPUs."""
    GPUS_TAKEN = "GpusTaken"
    """The GPUs of the launch turned out not to be free before a pod was made."""
    NOT_RUNNING_IN_TIME = "NotRunningInTime"
    POD_FAILED = "PodFailed"
    POD_DELETED = "PodDeleted"
    POD_MISSING = "PodMissing"
    NODE_SILENT = "NodeSilent"
    NOT_RENEWED = "NotRenewed"
    NOT_STARTED = "NotStarted"
    NOT_ACKNOWLEDGED = "NotAcknowledged"
    NODE_LEAVES = "NodeLeaves"
    """A node that the gang needs is about to go."""
    STEPS_ADDED = "StepsAdded"
    EXITED_EARLY = "ExitedEarly"
    """Every rank exited with success before the last step."""


class WaitFor(enum.StrEnum):
    """State or event that a job waits for."""

    OLD_PODS = "OldPods"
    RESUME = "Resume"
    PAUSE = "Pause"
    DECISION = "Decision"
    """The allocator has not decided on the job as it is."""
    GPUS = "Gpus"
    """The allocator gives it none."""
    FREE_GPUS = "FreeGpus"
    """The GPUs that it is given are still held."""
    PODS = "Pods"
    TRAINER = "Trainer"
    """It trains, or its ranks meet."""
    ACKNOWLEDGEMENT = "Acknowledgement"
    SAVE = "Save"
    EXIT = "Exit"
    READERS = "Readers"
    """It has ended and is kept for its time."""


@dataclasses.dataclass(frozen=True, slots=True)
class Wait:
    """Write nothing that changes the launch; look again when ``until`` has passed, if nothing changes."""

    reason: WaitFor
    until: Deadline | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class CreatePods:
    """Create these pods of the gang."""

    pods: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class WritePlan:
    """Write the plan; on the version of the last one that was read."""

    epoch: int
    directive: Directive
    pods: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class RefuseProposal:
    """Say that the proposal is refused; the gang stays as it is."""


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """Write a new launch."""

    gang: Gang


@dataclasses.dataclass(frozen=True, slots=True)
class BeginGrowth:
    """Write the larger gang."""

    gang: Gang


@dataclasses.dataclass(frozen=True, slots=True)
class AbandonGrowth:
    """Write the gang without the new pods, because of ``why`` (of ``pod``)."""

    gang: Gang
    why: Why
    pod: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class RecordGrowth:
    """Write that the new pods have joined."""

    gang: Gang


@dataclasses.dataclass(frozen=True, slots=True)
class RecordShrink:
    """Write the smaller gang: the pods ``released`` are gone."""

    gang: Gang
    released: tuple[str, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class End:
    """Write that the launch has to end, by ``cause``; ``why`` and ``pods`` are what was seen."""

    gang: Gang
    cause: Cause
    why: Why
    pods: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Release:
    """Write that the job holds nothing; ``failed``: and that it is launched no more."""

    failed: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Succeed:
    """Write that the job has succeeded and holds nothing."""


@dataclasses.dataclass(frozen=True, slots=True)
class GiveUp:
    """Write that the job, which holds nothing, has failed for good: it has reached a limit of its owner's."""


@dataclasses.dataclass(frozen=True, slots=True)
class DeleteJob:
    """Delete the job itself."""


Move = (
    Wait
    | CreatePods
    | WritePlan
    | RefuseProposal
    | Launch
    | BeginGrowth
    | AbandonGrowth
    | RecordGrowth
    | RecordShrink
    | End
    | Release
    | Succeed
    | GiveUp
    | DeleteJob
)

FREEING = (AbandonGrowth, RecordShrink, Release, Succeed)
"""Moves after which GPUs count as free."""


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """The next move of a job.

    Attributes:
        state: the job's, as it was observed.
        delete: pods to delete first, by name.
        force: those of them that are deleted without grace: their node cannot confirm it.
    """

    state: State
    move: Move
    delete: tuple[str, ...] = ()
    force: frozenset[str] = frozenset()

    @property
    def needs_fresh_view(self) -> bool:
        """True if it needs a fresh look at the job's pods and its lease that shows the same.

        An answer to the creation of a pod may have been lost and the watch may be late: then a pod exists
        that was not observed, and its GPU is not free. And the trainer may have finished before its pods
        failed: then the job is not launched again.
        """
        return isinstance(self.move, FREEING)


def pods_after_drain(
    pods: Sequence[str],
    going: Collection[str],
    *,
    together: int,
    fits: Callable[[int], bool],
    lost: Collection[str] = (),
) -> tuple[str, ...]:
    """Pods that a gang can continue with once ``going`` are gone, by rank; empty: it cannot, or none goes.

    Args:
        pods: of the plan, by rank; the first, rank 0's, stays unless it is lost.
        going: names of those that go.
        together: pods of a whole position of the pipeline, which join and leave as one.
        fits: whether the job may have a gang of so many pods.
        lost: those of ``going`` that are gone already, and that the others go on in place without.
    """
    blocks = [pods[first : first + together] for first in range(0, len(pods), together)]
    kept = [block for block in blocks if not set(going) & set(block)]
    if not kept or len(kept) == len(blocks) or (kept[0] != blocks[0] and pods[0] not in lost):
        return ()
    for count in range(len(kept), 0, -1):
        if fits(count * together):
            return tuple(pod for block in kept[:count] for pod in block)
    return ()


def named_pods_error(pods: Sequence[str], kept: Sequence[str], released: Sequence[str]) -> str:
    """Reason that a proposal's pods are not a split of the plan's ``pods``, as text; empty: they are."""
    named = sorted((*kept, *released))
    if named != sorted(pods):
        return f"the proposal names {named}, the plan's pods are {sorted(pods)}"
    if not kept or not released:
        return "a repack keeps at least one pod and releases at least one"
    if kept[0] != pods[0]:
        return f"rank 0 must stay {pods[0]}, the proposal moves it to {kept[0]}"
    return ""


def proposal_error(
    plan: Plan,
    proposal: Proposal,
    repack: RepackConfig,
    *,
    gpus_per_pod: int,
    ranks_per_position: int,
    layers: int | None,
) -> str:
    """Reason to refuse a trainer's proposal for ``plan``, with numbers; empty: it is accepted.

    Args:
        plan: of the launch.
        proposal: the trainer's.
        repack: of the spec.
        gpus_per_pod: GPUs, and ranks, of each pod of the launch.
        ranks_per_position: ranks at each position of the pipeline.
        layers: of the model, as the spec says; None: as the plan's stages have it.
    """
    each, kept = ranks_per_position, len(proposal.kept_pods) * gpus_per_pod
    if not repack.enabled:
        return "spec.repack.enabled is false"
    if text := named_pods_error(plan.pods, proposal.kept_pods, proposal.released_pods):
        return text
    what = "pods" if gpus_per_pod == 1 else "ranks"
    keeps = f"the proposal keeps {kept} {what}"
    ranks_each = f" with {each} ranks each" if each > 1 else ""
    if kept % each:
        return f"{keeps}, not a multiple of the {each} at each pipeline position"
    if kept < repack.min_stages * each:
        return f"{keeps}, below spec.repack.minStages={repack.min_stages}{ranks_each}"
    target = repack.target_stages
    if target is not None and kept != target * each:
        return f"{keeps}, spec.repack.targetStages={target}{ranks_each}"
    limit = proposal.step_seconds_before * (1 + repack.max_slowdown)
    if not proposal.step_seconds_after <= limit:
        return (
            f"a step would take {proposal.step_seconds_after:.4g} s instead of "
            f"{proposal.step_seconds_before:.4g} s, above the {limit:.4g} s that "
            f"spec.repack.maxSlowdown={repack.max_slowdown:g} allows"
        )
    if text := _stages_error(plan, proposal, kept, one_each=each == 1, layers=layers):
        return text
    try:
        plan.shrink(proposal)
    except ValueError as error:
        return str(error)
    return ""


def _stages_error(plan: Plan, proposal: Proposal, kept: int, *, one_each: bool, layers: int | None) -> str:
    """Reason that the proposal's stages do not partition the model over ``kept`` ranks; empty: they do."""
    stages = proposal.stages
    if not stages:
        return ""  # the trainer chooses
    highest = max(stage.rank for stage in stages)
    if highest >= kept:
        return f"a stage is on rank {highest}, but the proposal keeps {kept} ranks"
    end = max(stage.end_layer for stage in stages)
    if layers is None:
        layers = max((stage.end_layer for stage in plan.stages), default=None)
    if layers is not None and end != layers:
        return f"the stages end at layer {end}, the model has {layers} layers"
    idle = sorted(set(range(kept)) - {stage.rank for stage in stages})
    if idle and one_each:
        return f"rank {idle[0]} would have no stage"
    return ""
