"""Elastic gangs share a pool, give GPUs back when asked, and lose nothing when that fails."""

import pytest
from ballast_operator.kube.kinds import NODE
from ballast_policies.allocation.policy import SpaceSharing, Surplus
from ballast_policies.allocation.registry import POLICIES
from ballast_policies.protocol.cause import Cause

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation
from tests.support.examples import first_daily

ENDLESS = {"totalSteps": 100_000, "trainer": {"total": 100_000, "scales": True}}


def sizes(simulation: Simulation) -> dict[str, int]:
    return {name: len(simulation.pods(name)) for name in simulation.trainers}


def never_restarted(simulation: Simulation, *names: str) -> bool:
    return all(
        (simulation.status(name).launches, dict(simulation.status(name).restarts)) == (1, {})
        for name in names
    )


def four_gpus(**spec) -> Simulation:
    return Simulation(nodes={"a": ("fast", 2), "b": ("fast", 2)}, roundSeconds=30, **spec)


async def alone_on_four(**spec) -> Simulation:
    """A gang of 1 to 4 that has the whole pool."""
    simulation = four_gpus()
    await simulation.run_job("one", stages=(1, 4), **{**ENDLESS, **spec})
    assert sizes(simulation) == {"one": 4}
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    first_daily(
        [
            name
            for name, row in POLICIES.builtin.items()
            # By completion time, one after the other is sooner on average.
            if row.space_sharing is not SpaceSharing.ALWAYS and row.surplus is not Surplus.COMPLETION_TIME
        ],
        2,
    ),
)
async def test_two_elastic_jobs_run_side_by_side_by_every_policy(name):
    """Neither waits for the other, and no GPU is idle that would make one of them faster."""
    simulation = four_gpus(objective={"policy": name})
    for job in ("one", "two"):
        simulation.add_job(job, stages=(2, 8), **ENDLESS)
    await simulation.running("one", "two")
    assert sizes(simulation) == {"one": 2, "two": 2}
    await simulation.ticks(70)
    assert sizes(simulation) == {"one": 2, "two": 2}
    assert never_restarted(simulation, "one", "two")


@pytest.mark.slow
async def test_one_ends_the_other_grows_a_third_comes_and_all_share_without_a_restart():
    """Every change is live, and the same pods continue."""
    simulation = four_gpus()
    simulation.add_job("one", stages=(1, 4), totalSteps=300)
    simulation.add_job("two", stages=(1, 4), **ENDLESS)
    await simulation.until(lambda: sizes(simulation) == {"one": 2, "two": 2})
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    await simulation.until(lambda: len(simulation.pods("two")) == 4)
    simulation.add_job("three", stages=(1, 4), **ENDLESS)
    await simulation.running("three", ticks=10)
    assert sizes(simulation) == {"one": 0, "two": 2, "three": 2}
    assert never_restarted(simulation, "one", "two", "three")
    asked = simulation.status("two").repacks[-1]
    assert asked.asked and asked.pause_ms == 12.5
    await simulation.tick()
    said = simulation.status("two").last_decision
    assert said.chosen == "2 x fast of pool fast"
    assert "2 x fast in pool fast" in said.why
    assert "it may have 1 to 4 GPUs and has 2, at " in said.why
    assert said.next_best.startswith("4 x fast: ")
    assert "2 GPUs more; 3 x fast: " in said.next_best
    assert said.next_best.endswith("no faster")
    shrunk = simulation.condition("two", "Shrunk")
    assert shrunk.is_true and "2 pods continue" in shrunk.message
    simulation.add_job("four", stages=(2, 2), **ENDLESS)
    await simulation.running("four", ticks=10)
    assert sizes(simulation) == {"one": 0, "two": 1, "three": 1, "four": 2}
    assert never_restarted(simulation, "two", "three", "four")


async def test_a_gang_with_a_fixed_size_keeps_it():
    """``grow: false``: the other one waits for its turn, as before."""
    simulation = await alone_on_four(grow=False)
    simulation.add_job("two", stages=(1, 1), **ENDLESS)
    await simulation.ticks(10)
    assert sizes(simulation) == {"one": 4, "two": 0}


@pytest.mark.slow
async def test_a_trainer_that_does_not_shrink_is_stopped_with_a_checkpoint_and_restarts_smaller():
    """After the time that a shrink has; the waiting job gets its GPUs all the same."""
    simulation = await alone_on_four()
    simulation.trainers["one"].deaf = True
    simulation.add_job("two", stages=(2, 2), **ENDLESS)
    await simulation.running("two", seconds=5.0)
    simulation.trainers["one"].deaf = False
    await simulation.running("one", seconds=5.0)
    status = simulation.status("one")
    assert dict(status.restarts) == {Cause.SHRINK_TIMEOUT: 1}
    assert sizes(simulation) == {"one": 2, "two": 2}
    assert simulation.trainers["one"].resumed_from[-1] == simulation.trainers["one"].saved > 0


@pytest.mark.slow
async def test_a_trainer_that_never_shrinks_is_no_longer_asked_to():
    """Twice is enough: from then on its gang keeps what it is launched with, and takes turns."""
    simulation = await alone_on_four()
    simulation.trainers["one"].deaf = True
    simulation.add_job("two", stages=(1, 1), **ENDLESS)
    await simulation.ticks(400, seconds=5.0)
    assert simulation.status("one").restarts[Cause.SHRINK_TIMEOUT] <= 2


@pytest.mark.slow
@pytest.mark.parametrize("point", range(8))
async def test_an_operator_that_dies_at_any_write_of_an_asked_shrink_is_succeeded_without_loss(point):
    """One launch each, no pod of a name twice, whatever write was the last."""
    simulation = await alone_on_four()
    start = simulation.world.writes
    simulation.die_at(start + point)
    simulation.add_job("two", stages=(2, 2), **ENDLESS)
    await simulation.until(lambda: sizes(simulation) == {"one": 2, "two": 2})
    assert simulation.restarts == 1
    await simulation.running("two")
    assert never_restarted(simulation, "one", "two")
    assert all(len(found) == 1 for found in simulation.world.uids_of_pods.values())


@pytest.mark.slow
async def test_gangs_with_tensor_groups_shrink_and_grow_by_whole_groups():
    """Two ranks at each position stay or leave together."""
    simulation = Simulation(nodes={"a": ("fast", 6)}, roundSeconds=30)
    parallelism = {"tensor": 2, "gpusPerPod": 1}
    simulation.add_job("one", stages=(1, 3), parallelism=parallelism, **ENDLESS)
    await simulation.until(lambda: sizes(simulation) == {"one": 6})
    simulation.add_job("two", stages=(1, 1), **ENDLESS)
    await simulation.running("two", ticks=30)
    assert sizes(simulation) == {"one": 4, "two": 1}
    simulation.world.put(NODE, node("b", "fast", 1))
    await simulation.until(lambda: sizes(simulation) == {"one": 6, "two": 1})
    assert never_restarted(simulation, "one", "two")
