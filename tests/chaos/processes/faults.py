"""All that can go wrong with processes."""

from ballast_localcluster.rest import CallError

from tests.chaos.processes import control_faults, worker_faults
from tests.chaos.processes.episode import Episode
from tests.chaos.processes.kinds import KINDS


def apply(episode: Episode, what: str, number: int) -> bool:
    """Do it; False where the API server did not let it."""
    try:
        KINDS[what](episode, number)
    except CallError:
        return False
    return True


__all__ = ["KINDS", "apply", "control_faults", "worker_faults"]
