"""How a trainer process ends, as its exit code and its termination message say it."""

import enum

from pydantic import Field

from ballast_policies.contract.limits import LONGEST_REASON, MOST_STEP
from ballast_policies.contract.model import Model


class ExitCode(enum.IntEnum):
    """Exit codes of ``ballast-train`` in a pod."""

    OK = 0
    """All steps are done, or the rank was released by a shrink."""
    ERROR = 1
    """The user's model, data or configuration failed: counts toward ``backoffLimit``."""
    USAGE = 2
    """Wrong arguments or configuration: counts toward ``backoffLimit``."""
    STOPPED = 75
    """Stopped with a checkpoint, by directive or SIGTERM: the job continues later."""
    PEER_LOST = 76
    """Another rank died or hung: this one is healthy, the gang restarts from the checkpoint."""


class ExitReason(enum.StrEnum):
    """Why the process ended; the ``reason`` of the termination message."""

    FINISHED = "Finished"
    RELEASED = "Released"
    STOPPED = "CheckpointedAndStopped"
    PEER_LOST = "PeerLost"
    CONFIGURATION = "ConfigurationError"
    FAILED = "TrainingFailed"


class TerminationMessage(Model):
    """JSON in ``/dev/termination-log``, shown by ``kubectl describe pod`` and read by the operator."""

    reason: ExitReason
    message: str = Field(max_length=LONGEST_REASON)
    step: int | None = Field(None, ge=0, le=MOST_STEP)
