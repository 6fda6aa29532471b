"""The status of a job as the operator's steps see and make it.

``JobAllocation`` is the heart of it: the gang that a job has, or is about to have.  It is written before the
first pod is created and removed after the last one is gone; so whoever reads the status after a crash
knows at least as much as the one who crashed.
"""

import dataclasses
import enum
from collections.abc import Mapping
from typing import Any

from ballast_operator.views.clock import Time


class Cause(enum.StrEnum):
    """Why a launch ended or has to end; keys of ``status.restarts``."""

    COMPLETED = "Completed"
    """All steps are done."""
    SUSPENDED = "Suspended"
    """``spec.suspend`` was set."""
    PREEMPTED = "Preempted"
    """The allocator gave the GPUs to another job, or this job to other GPUs."""
    NOT_BOUND = "NotBound"
    """Not every pod of the gang ran in time: all or none, so none."""
    USER_ERROR = "UserError"
    """The user's model, data, configuration or memory. Counts toward ``backoffLimit``."""
    HUNG = "Hung"
    """Pods ran, but the lease was not renewed or the start took too long. Counts toward ``backoffLimit``."""
    POD_LOST = "PodLost"
    """A pod was killed, evicted or deleted by someone else."""
    NODE_LOST = "NodeLost"
    """A node went away under a pod."""
    PEER_LOST = "PeerLost"
    """Ranks lost touch with each other and nobody else is to blame."""
    SHRINK_TIMEOUT = "ShrinkTimeout"
    """A shrink was not acknowledged in time."""
    GROW_TIMEOUT = "GrowTimeout"
    """New ranks did not join in time."""

    @property
    def is_restart(self) -> bool:
        """Training was going on and goes on from its checkpoint: counted in ``status.restarts``."""
        return self not in (Cause.COMPLETED, Cause.SUSPENDED, Cause.NOT_BOUND)

    @property
    def counts(self) -> bool:
        """It counts toward ``backoffLimit``."""
        return self in (Cause.USER_ERROR, Cause.HUNG)

    @property
    def graceful(self) -> bool:
        """The trainer is asked to save and stop before its pods are deleted."""
        return self in (Cause.SUSPENDED, Cause.PREEMPTED)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """A launch that is being ended.

    Attributes:
        cause: why, as a word.
        message: why, in a sentence.
        since: when it was decided.
    """

    cause: Cause
    message: str
    since: Time


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """One pod of a gang and the node it is pinned to."""

    pod: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobAllocation:
    """The gang that a job holds, one GPU a pod.

    Attributes:
        launch: which launch of the job, from 1.
        slots: in the order of the ranks.
        plan_id: the allocator's round that chose it.
        joining: those of the slots' pods that are to join the running gang, and have not yet.
        joining_since: when the last growth was decided.
        first_newcomer: number in the name of the first pod of the last growth; 0: there was none.
        ending: set once the launch has to end; never unset.
    """

    launch: int
    gpu_type: str
    pool: str
    slots: tuple[Slot, ...]
    plan_id: str
    since: Time
    joining: tuple[str, ...] = ()
    joining_since: Time | None = None
    first_newcomer: int = 0
    ending: Ending | None = None

    @property
    def pods(self) -> tuple[str, ...]:
        """Names of its pods."""
        return tuple(slot.pod for slot in self.slots)

    @property
    def nodes(self) -> tuple[str, ...]:
        """Node of each pod."""
        return tuple(slot.node for slot in self.slots)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """metav1.Condition."""

    type: str
    status: bool
    reason: str
    message: str
    since: Time
    generation: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Isolated:
    """Seconds that the progress up to ``step`` would have taken on isolated equal shares."""

    seconds: float
    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobStatus:
    """``TrainingJob.status``.

    Attributes:
        launches: how many launches there have been; the next one's number is one more.
        restarts: how often a launch ended early, by cause.
        progress, rebalances, repacks, last_decision: JSON as the CRD has them.
        cost: currency units spent, up to ``cost_at``.
        isolated: how long the progress would have taken on isolated equal shares; None: no progress yet.
        suspended_since, suspended_seconds: the present suspension, and the earlier ones together.
        next_launch_at: not before, after a failure of its own making.
        finished_at: when it succeeded or failed for good.
    """

    observed_generation: int = 0
    conditions: tuple[Condition, ...] = ()
    allocation: JobAllocation | None = None
    launches: int = 0
    restarts: Mapping[Cause, int] = dataclasses.field(default_factory=dict)
    progress: Mapping[str, Any] | None = None
    rebalances: tuple[Mapping[str, Any], ...] = ()
    repacks: tuple[Mapping[str, Any], ...] = ()
    last_decision: Mapping[str, Any] | None = None
    cost: float = 0.0
    cost_at: Time | None = None
    isolated: Isolated | None = None
    suspended_since: Time | None = None
    suspended_seconds: float = 0.0
    next_launch_at: Time | None = None
    finished_at: Time | None = None

    def condition(self, kind: str) -> Condition | None:
        """The condition of this type, if there is one."""
        return next((c for c in self.conditions if c.type == kind), None)

    def is_true(self, kind: str) -> bool:
        """Whether the condition of this type is there and true."""
        condition = self.condition(kind)
        return condition is not None and condition.status

    @property
    def finished(self) -> bool:
        """Succeeded, or failed for good."""
        return self.is_true("Succeeded") or self.is_true("Failed")

    @property
    def counted_restarts(self) -> int:
        """Restarts that count toward ``backoffLimit``."""
        return sum(count for cause, count in self.restarts.items() if cause.counts)
