"""Progress of a running simulation."""

import dataclasses
from collections.abc import Callable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SimulationProgress:
    """How far a simulation is.

    Attributes:
        seconds: of the simulated clock.
        done: measured jobs that are done.
        total: measured jobs in all.
        present: jobs that have arrived and are not done, measured or not.
        waiting: those of them that hold no GPU; without rounds, those that have not run yet.
    """

    seconds: float
    done: int
    total: int
    present: int
    waiting: int


OnProgress = Callable[[SimulationProgress], None]
"""Called at each iteration of the simulation loop."""
