"""The activity of this rank outside collectives: ranks that wait for it are told, and so is the user."""

import contextlib
import dataclasses
from collections.abc import Iterator


@dataclasses.dataclass(slots=True)
class Activity:
    """Work of the main thread ``now``, in words, in which it waits for no rank; None: it may wait."""

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
