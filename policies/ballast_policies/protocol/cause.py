"""Causes for which a launch of a job ended; the keys of ``status.restarts``."""

import enum


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
    NOT_ALLOWED = "NotAllowed"
    """A quota, an admission policy or a missing class of the cluster forbade a pod."""
    NAME_TAKEN = "NameTaken"
    """An object of somebody else has the name of one that the launch needs."""
    USER_ERROR = "UserError"
    """The user's model, data, configuration, image or memory limit failed. Counts toward ``backoffLimit``."""
    HUNG = "Hung"
    """Pods ran, but the lease was not renewed or the start took too long. Counts toward ``backoffLimit``."""
    POD_LOST = "PodLost"
    """A pod was killed, evicted or deleted by someone else."""
    NODE_LOST = "NodeLost"
    """A node went away under a pod."""
    NODE_LEAVING = "NodeLeaving"
    """A node has announced that it goes, and the gang could not continue without it."""
    PEER_LOST = "PeerLost"
    """Ranks lost their connections and no other pod or node has failed."""
    STEPS_ADDED = "StepsAdded"
    """The launch has done the steps that it was told of, and the job has got more since."""
    SHRINK_TIMEOUT = "ShrinkTimeout"
    """A shrink was not acknowledged in time."""
    GROW_TIMEOUT = "GrowTimeout"
    """New ranks did not join in time."""

    @property
    def is_restart(self) -> bool:
        """The launch ended early and is followed by another: counted in ``status.restarts``."""
        return self not in (Cause.COMPLETED, Cause.SUSPENDED)

    @property
    def may_pass(self) -> bool:
        """Nothing is wrong with the job: what kept its pods from running may pass by itself."""
        return self in (Cause.NOT_BOUND, Cause.NOT_ALLOWED, Cause.NAME_TAKEN)

    @property
    def counts(self) -> bool:
        """It counts toward ``backoffLimit``."""
        return self in (Cause.USER_ERROR, Cause.HUNG)

    @property
    def graceful(self) -> bool:
        """The trainer is asked to save and stop before its pods are deleted."""
        return self in (Cause.SUSPENDED, Cause.PREEMPTED, Cause.NODE_LEAVING, Cause.STEPS_ADDED)

    @property
    def saves_first(self) -> bool:
        """As ``graceful``, or the trainer lives and has only not changed its size: it may still save."""
        return self.graceful or self in (Cause.SHRINK_TIMEOUT, Cause.GROW_TIMEOUT)
