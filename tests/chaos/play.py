"""Plays a sequence of faults, says what came of it, and shortens one that fails."""

import asyncio
import dataclasses
import traceback
from collections.abc import Callable, Sequence

from tests.chaos.cluster import JOBS, ChaosSimulation, Trouble
from tests.chaos.faults import Fault
from tests.chaos.kinds.jobs import set_suspended
from tests.chaos.kinds.nodes import restore_nodes
from tests.chaos.kinds.registry import KINDS

TICK_SECONDS = 3.0
PEACE_TICKS = 1500
"""Ticks in which every job has to end once nothing goes wrong any more."""


VERDICTS = {
    "stuck: ": "stuck",
    "alive at once": "doubled",
    "lost steps": "lost",
    "lost: ": "lost",
    "over capacity": "overCapacity",
    "GPUs, ": "overCapacity",
}
"""Words of a problem -> the key that counts it; any other is a bug."""


@dataclasses.dataclass(frozen=True, slots=True)
class Outcome:
    """What came of a sequence.

    Attributes:
        problem: empty: every job has succeeded and every law held.
        converged_seconds: of simulated time, from the last fault to the end of the last job.
    """

    problem: str
    converged_seconds: float

    @property
    def verdict(self) -> str:
        """What is wrong, as the key of the result that counts it; empty: nothing."""
        return verdict_of(self.problem)


def verdict_of(problem: str) -> str:
    """The key of the result that counts this problem; empty: there is none."""
    for words, key in VERDICTS.items():
        if words in problem:
            return key
    return "bugs" if problem else ""


def play(faults: Sequence[Fault], *, make: Callable[[], ChaosSimulation] = ChaosSimulation) -> Outcome:
    """Play the faults, then make peace and wait for every job."""
    return asyncio.run(_play(faults, make))


async def _play(faults: Sequence[Fault], make: Callable[[], ChaosSimulation]) -> Outcome:
    simulation = make()
    try:
        for fault in faults:
            for _ in range(fault.ticks):
                await _tick(simulation)
            KINDS[fault.kind](simulation, fault.number)
        return await _peace(simulation)
    except Exception:  # a law was broken, or a pass ended by a bug
        return Outcome(traceback.format_exc(limit=-6), 0.0)


async def _tick(simulation: ChaosSimulation) -> None:
    await simulation.pass_time(TICK_SECONDS)
    restore_nodes(simulation)
    for name, until in list(simulation.trouble.suspended.items()):
        if simulation.number >= until:
            del simulation.trouble.suspended[name]
            set_suspended(simulation, name, False)


async def _peace(simulation: ChaosSimulation) -> Outcome:
    restore_nodes(simulation, all_of_them=True)
    simulation.trouble = Trouble()
    simulation.world.after_write = lambda _: None
    for name in JOBS:
        set_suspended(simulation, name, False)
    for number in range(PEACE_TICKS):
        if all(simulation.state(name) == "Succeeded" for name in JOBS):
            return Outcome(_left_over(simulation), number * TICK_SECONDS)
        await simulation.pass_time(TICK_SECONDS)
    stuck = {name: simulation.state(name) for name in JOBS if simulation.state(name) != "Succeeded"}
    return Outcome(f"stuck: {stuck}", PEACE_TICKS * TICK_SECONDS)


def _left_over(simulation: ChaosSimulation) -> str:
    for name in JOBS:
        if simulation.status(name).allocation is not None:
            return f"{name} has succeeded and holds GPUs"
        if simulation.pods(name):
            return f"{name} has succeeded and has pods"
        resumed = simulation.trainers[name].resumed_from
        if resumed != sorted(resumed):
            return f"{name} lost steps: it resumed from {resumed}"
    return ""


def shortest(faults: Sequence[Fault], fails: Callable[[Sequence[Fault]], bool]) -> tuple[Fault, ...]:
    """The failing sequence without the faults that it fails without: no single one can be left out."""
    kept, size = list(faults), max(1, len(faults) // 2)
    while True:
        start = 0
        while start < len(kept):
            fewer = kept[:start] + kept[start + size :]
            if fewer != kept and fails(fewer):
                kept = fewer
            else:
                start += size
        if size == 1:
            return tuple(kept)
        size //= 2
