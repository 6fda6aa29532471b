"""How long a gang keeps its size after it has changed, before it may take more GPUs."""

SETTLING_SECONDS = 5.0
"""From a change of a gang's size to its next growth, at least."""

SETTLING_PAUSES = 20.0
"""The same, in pauses of such a change: growing costs no more than a twentieth of the time."""

FAILED_GROWTH_SECONDS = 60.0
"""From a growth that was given up to the next try; it doubles with each that fails after it."""

LONGEST_PAUSE_SECONDS = 600.0
"""Before a growth, whatever came before it."""


def seconds_before_growth(pause_seconds: float, failed: int = 0) -> float:
    """Seconds from a change of a gang's size to its next growth.

    Args:
        pause_seconds: how long training stands still for such a change.
        failed: growths that were given up since the last one that succeeded.
    """
    if failed:
        seconds = FAILED_GROWTH_SECONDS * 2.0 ** min(failed - 1, 10)
    else:
        seconds = max(SETTLING_SECONDS, SETTLING_PAUSES * pause_seconds)
    return min(seconds, LONGEST_PAUSE_SECONDS)
