"""The activity of this rank outside collectives: ranks that wait for it are told, and so is the user."""

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(slots=True)
class Activity:
    """Words of what the main thread does ``now``, a new tuple each time; None: it may wait for others."""

    now: tuple[object, ...] | None = None

    @contextlib.contextmanager
    def doing(self, *words: object) -> Iterator[None]:
        """The work inside is this rank's own."""
        before, self.now = self.now, words
        try:
            yield
        finally:
            self.now = before


ACTIVITY = Activity()
"""Of this process."""
