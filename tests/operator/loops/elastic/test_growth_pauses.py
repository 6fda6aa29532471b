"""When a gang may grow once more: soon after a growth that succeeded, later and later after failed ones."""

import itertools
import random

import pytest
from ballast_operator.kube.kinds import NODE
from ballast_policies.contract.messages import ExitCode, ExitReason, TerminationMessage
from ballast_policies.rounds.memory import (
    FAILED_GROWTH_SECONDS,
    LONGEST_PAUSE_SECONDS,
    SETTLING_PAUSES,
    SETTLING_SECONDS,
)

from tests.operator.loops.simulated.machines import end_pod, node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.support.examples import first_daily

pytestmark = pytest.mark.slow

ENDLESS = {"totalSteps": 100_000, "grow": True}
TO_JOIN_SECONDS = 6
"""Ticks from a decision until the new pods train."""


async def one_gang(*, most: int, pause_ms: float | None = None, **nodes: tuple[str, int]) -> Simulation:
    """A gang of 1 to ``most`` on the nodes; the round is an hour: no change waits for its end."""
    simulation = Simulation(nodes={"a": ("fast", 1), **nodes}, roundSeconds=3600)
    trainer = {"scales": True, "growth_pause_ms": pause_ms}
    await simulation.run_job("one", stages=(1, most), trainer=trainer, **ENDLESS)
    return simulation


def size(simulation: Simulation) -> int:
    return simulation.status("one").allocation.gpus


@pytest.mark.parametrize("seed", first_daily(range(4)))
async def test_gpus_that_come_free_one_after_the_other_are_all_taken_soon(seed):
    """Whatever lies between them, the gang has the last one when it has settled; nothing restarts."""
    chance = random.Random(seed)
    simulation = await one_gang(most=4, pause_ms=chance.choice((None, 100.0, 900.0)))
    for number in range(3):
        simulation.world.put(NODE, node(f"late-{number}", "fast", 1))
        await simulation.ticks(chance.choice((0, 1, 3, 8, 30)))
    await simulation.until(
        lambda: size(simulation) == 4 and not simulation.status("one").allocation.joining,
        ticks=int(SETTLING_PAUSES) + 2 * TO_JOIN_SECONDS,
    )
    assert simulation.never_restarted("one")


async def test_a_gang_whose_changes_take_long_settles_for_longer():
    """Changes of its size cost it a twentieth of its time, by the pause that its trainer reports."""
    simulation = await one_gang(most=4, pause_ms=3000.0)
    simulation.world.put(NODE, node("b", "fast", 1))
    await simulation.until(lambda: size(simulation) == 2)
    simulation.world.put(NODE, node("c", "fast", 1))
    ticks = await simulation.until(lambda: size(simulation) == 3)
    assert ticks >= 20 * 3


async def test_growths_that_fail_are_tried_less_and_less_often_and_the_gang_trains_on():
    """A node on which no pod starts costs a few tries an hour; once it works the gang grows."""
    simulation = await one_gang(most=2)
    simulation.world.put(NODE, node("b", "fast", 1))
    broken, tries = TerminationMessage(reason=ExitReason.FAILED, message="no driver"), []
    for _ in range(360):
        await simulation.tick(seconds=10.0)
        for pod in simulation.pods("one")[1:]:
            end_pod(simulation.world, NAMESPACE, pod["metadata"]["name"], ExitCode.ERROR, broken)
            tries.append(simulation.now.timestamp())
    pauses = [after - before for before, after in itertools.pairwise(tries)]
    assert pauses == sorted(pauses)
    assert pauses[0] >= FAILED_GROWTH_SECONDS and pauses[-1] >= LONGEST_PAUSE_SECONDS
    assert simulation.never_restarted("one")
    await simulation.until(lambda: size(simulation) == 2, seconds=10.0, ticks=int(LONGEST_PAUSE_SECONDS / 5))
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    assert simulation.status("one").allocation.failed_growths == 0


@pytest.mark.parametrize("every", first_daily([7, 3, 17]))
async def test_gpus_that_are_offered_and_wanted_back_again_and_again_do_not_wear_a_gang_out(every):
    """A short job that comes and goes gets its GPUs each time; the gang settles before each growth."""
    simulation = await one_gang(most=2, pause_ms=100.0, b=("fast", 1))
    await simulation.until(lambda: size(simulation) == 2)
    growths, before, ticks = 0, 2, 90
    for tick in range(ticks):
        if tick % every == 0:
            simulation.add_job(f"short-{tick}", totalSteps=10, stages=(1, 1))
        await simulation.tick()
        growths += size(simulation) > before
        before = size(simulation)
    assert growths <= ticks / SETTLING_SECONDS + 1
    assert simulation.never_restarted("one")
    await simulation.reached("Succeeded", *(name for name in simulation.trainers if name != "one"))
    await simulation.until(lambda: size(simulation) == 2)


async def test_no_decision_is_made_for_a_gang_that_waits_where_no_gpu_is_free():
    """The end of a pause is a time to decide only where something can come of it."""
    simulation = await one_gang(most=4)
    simulation.world.put(NODE, node("b", "fast", 1))
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    await simulation.ticks(3)
    before = simulation.decisions
    await simulation.ticks(40)
    assert simulation.decisions == before
