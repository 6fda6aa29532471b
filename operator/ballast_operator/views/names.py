"""Names of objects in a sentence of a condition or an Event."""

from collections.abc import Sequence

MOST_NAMES = 5


def some_of(names: Sequence[str], most: int = MOST_NAMES) -> str:
    """The first ``most`` names, and how many more there are."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
