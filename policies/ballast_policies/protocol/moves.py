"""Answers of the machine: one :class:`Decision`, a value that is carried out as it is."""

import dataclasses
import enum

from ballast_policies.contract.plan import Directive
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
    """Before a pod was made, the GPUs of the launch turned out not to be free."""
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
