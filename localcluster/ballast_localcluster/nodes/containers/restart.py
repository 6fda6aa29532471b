"""Restarts of ended containers, and the pauses before them."""

import dataclasses

FIRST_BACKOFF_SECONDS = 1.0
LAST_BACKOFF_SECONDS = 30.0
CALM_SECONDS = 60.0
"""kubelet waits 10 s to 5 min and forgets after 10 min; here all three are ten times shorter."""


def restarts(policy: str, exit_code: int) -> bool:
    """What ``restartPolicy`` says about a process that ended with ``exit_code``."""
    return policy == "Always" or (policy == "OnFailure" and exit_code != 0)


@dataclasses.dataclass(slots=True)
class Backoff:
    """Waiting times that double from the first to the last, and start over after a calm run."""

    _next: float = 0.0

    def seconds(self, ran_seconds: float) -> float:
        """How long to wait after a run of ``ran_seconds``; the first restart does not wait."""
        if ran_seconds >= CALM_SECONDS:
            self._next = 0.0
        wait = self._next
        self._next = min(max(FIRST_BACKOFF_SECONDS, 2 * wait), LAST_BACKOFF_SECONDS)
        return wait
