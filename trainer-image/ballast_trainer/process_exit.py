"""The end of the process: exit code, termination message, and the message on standard error."""

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from ballast_policies.contract.messages import ExitCode, ExitReason, TerminationMessage

from ballast_trainer.errors import ConfigurationError, PeerLost, Stopped
from ballast_trainer.terminal import erasure

_CODES = {
    ExitReason.FINISHED: ExitCode.OK,
    ExitReason.RELEASED: ExitCode.OK,
    ExitReason.STOPPED: ExitCode.STOPPED,
    ExitReason.STOPPED_UNSAVED: ExitCode.STOPPED,
    ExitReason.PEER_LOST: ExitCode.PEER_LOST,
    ExitReason.CONFIGURATION: ExitCode.USAGE,
    ExitReason.FAILED: ExitCode.ERROR,
}
PIPES = Path("/dev/fd")
"""Folder of the termination logs of ranks whose parent reads them, and says for all why they failed."""

_PR_SET_PDEATHSIG = 1
_MESSAGE_CHARACTERS, _MESSAGE_BYTES = 2000, 4096
"""Kubernetes keeps no more bytes of a termination message."""


def reason_of(error: BaseException) -> ExitReason:
    """The exit reason of a process that raised ``error``."""
    if isinstance(error, ConfigurationError):
        return ExitReason.CONFIGURATION
    if isinstance(error, PeerLost):
        return ExitReason.PEER_LOST
    if isinstance(error, Stopped):
        return ExitReason.STOPPED
    return ExitReason.FAILED


def end(reason: ExitReason, message: str, *, step: int | None = None, log: Path | None = None) -> ExitCode:
    """Write the termination message (``log``) after ``step`` steps, and stderr; returns the exit code."""
    if log is not None:
        # An error's text may have halves of characters, of a file's name in another encoding.
        text = message[:_MESSAGE_CHARACTERS].encode(errors="replace").decode()
        write_message(log, json_of(TerminationMessage(reason=reason, message=text, step=step)))
    code = _CODES[reason]
    said_by_parent = reason is ExitReason.FAILED and log is not None and log.is_relative_to(PIPES)
    if code is not ExitCode.OK and not said_by_parent:
        print_error(f"{reason}: {message}")
    return code


def json_of(message: TerminationMessage) -> str:
    """The termination message with its text cut to what Kubernetes keeps, so that it can be read back."""
    while len(found := message.to_json()) > _MESSAGE_BYTES:  # ASCII: an escaped character is up to 12 bytes
        kept = len(message.message) * _MESSAGE_BYTES // len(found)
        message = message.replace(message=message.message[:kept])
    return found


def write_message(log: Path, text: str) -> None:
    """Write a termination message; one that cannot be written is told."""
    try:
        log.write_text(text)
    except OSError as error:
        print_error(f"cannot write {log}: {error}")


def print_error(text: str) -> None:
    """A line of the command on standard error, where that is still open."""
    with contextlib.suppress(OSError):
        print(f"{erasure()}ballast-train: {text}", file=sys.stderr, flush=True)  # noqa: T201 - it is ending


def leave(code: int) -> NoReturn:
    """End the process at once: threads of gloo and of the store may still hold sockets of ended ranks."""
    with contextlib.suppress(OSError):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(code)


def end_on_lost_peer(log: Path | None = None) -> Callable[[str], None]:
    """The callback of a heartbeat: ends the process at once, even while its main thread waits."""

    def lost(message: str) -> None:
        os._exit(end(ExitReason.PEER_LOST, message, log=log))

    return lost


def end_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have Linux send this fork a signal as soon as process ``parent``, which forked it, is gone."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        os._exit(128 + number)
