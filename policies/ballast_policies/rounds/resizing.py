"""Changes of a gang's size: from the GPUs that it holds to those that a round gives it, and how often."""

from collections import Counter
from collections.abc import Sequence

from ballast_policies.rounds.values import Placement


def kept_ranks(held: Sequence[str], wanted: Sequence[str], together: int = 1) -> tuple[int, ...] | None:
    """Ranks that continue when a gang shrinks; None: ``wanted`` is no part of what it holds.

    Rank 0 stays, and ranks of one position of the pipeline stay or leave together.

    Args:
        held: node of each rank.
        wanted: nodes to stay on, in any order.
        together: ranks at each position.
    """
    left = Counter(wanted)
    kept: list[int] = []
    for first in range(0, len(held), together):
        position = Counter(held[first : first + together])
        if position <= left:
            left -= position
            kept += range(first, first + together)
    return tuple(kept) if kept and kept[0] == 0 and not left.total() else None


def extra_nodes(held: Sequence[str], wanted: Sequence[str]) -> tuple[str, ...] | None:
    """Node of each GPU that a gang takes in addition; None: ``wanted`` leaves out some that it holds."""
    return tuple(wanted[len(held) :]) if tuple(wanted[: len(held)]) == tuple(held) else None


def stays(held: Placement, wanted: Placement, together: int = 1) -> bool:
    """Whether the gang gets there without a restart: it shrinks, grows, or is left as it is.

    A gang in several pools keeps what it has.
    """
    if held.parts or wanted.parts:
        return held == wanted
    if held.pool != wanted.pool:
        return False
    smaller = kept_ranks(held.nodes, wanted.nodes, together)
    return smaller is not None or extra_nodes(held.nodes, wanted.nodes) is not None


SETTLING_SECONDS = 5.0
"""From a change of a gang's size to its next growth, at least."""

SETTLING_PAUSES = 20.0
"""The same, in pauses of such a change: growing costs no more than a twentieth of the time."""

FAILED_GROWTH_SECONDS = 60.0
"""From a growth that was given up to the next try; it doubles with each that fails after it."""

LONGEST_PAUSE_SECONDS = 600.0
"""Before a growth, whatever came before it."""


def resize_cooldown_seconds(pause_seconds: float, failed: int = 0) -> float:
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
