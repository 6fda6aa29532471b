"""The terminal that a command was started in: its signals, and the line that moves on it."""

import signal
import sys
import types
from collections.abc import Callable

ERASE = "\r\x1b[K"
"""Sequence that takes away the line that moves."""


def erasure() -> str:
    """The beginning of a message that takes the place of the line that moves on a terminal."""
    return ERASE if sys.stdout.isatty() and sys.stderr.isatty() else ""


def on_terminal(act: Callable[[int, types.FrameType | None], None]) -> None:
    """Let ``act`` handle Ctrl-C and a closed terminal, but for what the process was started to ignore.

    A shell starts so what ``nohup`` is to outlive, and a script what it puts in the background.
    """
    for number in (signal.SIGINT, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, act)
