"""The trainer's errors, and the exit code of each.

::

    TrainerError
    +-- ConfigurationError   a field of the configuration is wrong: exit code USAGE
    +-- PeerLost             another rank died or hung: exit code PEER_LOST
    |   +-- WaitedTooLong    it lives, and was busy for too long
    +-- Stopped              told to stop before the first step: exit code STOPPED
    +-- CheckpointError      a checkpoint cannot be written or read: exit code ERROR
    |   +-- CheckpointNotWritten  storage refuses it for now
    +-- DataError            the user's data cannot be read: exit code ERROR
    +-- OutputClosed         the reader of rank 0's output has closed it: exit code ERROR
"""

import difflib
from collections.abc import Iterable


class TrainerError(Exception):
    """The trainer's own errors; ``shows_cause``: the user needs the traceback of what it was raised from."""

    shows_cause = False


class ConfigurationError(TrainerError):
    """The value of ``field``, a dotted path as the user wrote it (``pipeline.microbatches``), cannot work."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field, self._reason = field, reason

    def __reduce__(self) -> tuple[type["ConfigurationError"], tuple[str, str]]:
        """Arguments for pickle: the error may come from another process."""
        return type(self), (self.field, self._reason)

    @classmethod
    def unknown(cls, field: str, name: str, known: Iterable[str]) -> "ConfigurationError":
        """The error for a ``name`` of ``field`` that is not among ``known``; suggests the nearest."""
        known = sorted(known)
        # Names that differ in case alone are close.
        by_case = {word.lower(): word for word in known}
        near = difflib.get_close_matches(name.lower(), by_case, n=1)
        hint = f"did you mean {by_case[near[0]]!r}?" if near else f"one of {', '.join(known)}"
        return cls(field, f"unknown {name!r}. To fix: {hint}")


class PeerLost(TrainerError):  # noqa: N818 - the field's word, and the exit reason's name
    """Another rank died or hung; this one is healthy and the gang restarts from its checkpoint."""


class WaitedTooLong(PeerLost):
    """Ranks live that did not answer in time: the job cannot go on without them."""


class Stopped(TrainerError):  # noqa: N818
    """SIGTERM, or a stop directive, before training began: there is nothing to save."""


class CheckpointError(TrainerError):
    """A checkpoint cannot be written, or none of those on disk can be used."""


class CheckpointNotWritten(CheckpointError):  # noqa: N818
    """Storage refuses a checkpoint, e.g. a full disk: training can continue, and try again later."""


class DataError(TrainerError):
    """The user's data cannot be read; the error of the user's code is its cause."""

    shows_cause = True


class OutputClosed(TrainerError):  # noqa: N818
    """The reader of rank 0's standard output has closed it, e.g. ``| head``."""
