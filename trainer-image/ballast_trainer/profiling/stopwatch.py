"""A stopwatch for changes of shape, whose pause is told by phases."""

import time


class Stopwatch:
    """Milliseconds since it was made, and of each phase, in the order of their first laps."""

    def __init__(self) -> None:
        self._began = self._lap_began = time.perf_counter()
        self.phases: dict[str, float] = {}

    def milliseconds(self) -> float:
        """Milliseconds until now."""
        return (time.perf_counter() - self._began) * 1000

    def lap(self, phase: str) -> None:
        """The time since the last lap, or since the start, belongs to ``phase``."""
        now = time.perf_counter()
        self.phases[phase] = self.phases.get(phase, 0.0) + (now - self._lap_began) * 1000
        self._lap_began = now
