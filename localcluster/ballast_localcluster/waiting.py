"""Waiting for a condition, with a time limit that has a name.

``BALLAST_PATIENCE`` multiplies every limit, for machines that are slow or busy.
"""

import contextlib
import enum
import math
import os
import time
from collections.abc import Callable
from typing import TypeVar

from ballast_localcluster.errors import LocalClusterError

_POLL_SECONDS = 0.05

Found = TypeVar("Found")


class Limit(enum.Enum):
    """Time limits, in seconds, on a busy two-core machine."""

    API_SERVER_READY = 90.0
    CONTROLLERS_READY = 60.0
    KINDS_ESTABLISHED = 30.0
    NODES_READY = 60.0
    STOPPED = 30.0
    REMOVED = 600.0
    """Images of real nodes are gigabytes."""

    @property
    def seconds(self) -> float:
        """The limit, times the patience of this environment."""
        return float(self.value) * patience()


def patience() -> float:
    """The factor from ``BALLAST_PATIENCE``; 1 where it is not set. Raises LocalClusterError: it is none."""
    text = os.environ.get("BALLAST_PATIENCE") or "1"
    with contextlib.suppress(ValueError):
        if 0 < (factor := float(text)) < math.inf:
            return factor
    raise LocalClusterError(f"BALLAST_PATIENCE={text} is no factor of time. To fix: a number above 0")


def wait_until(look: Callable[[], Found], what: str, limit: Limit) -> Found:
    """Call ``look`` repeatedly until its result is true, and return it.

    Exceptions of ``look`` are raised; ``what``: is waited for, for the message.

    Raises:
        TimeoutError: the limit has passed.
    """
    deadline = time.monotonic() + limit.seconds
    while True:
        if result := look():
            return result
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {limit.seconds:g} s for {what}; the last look found {result!r}")
        time.sleep(_POLL_SECONDS)
