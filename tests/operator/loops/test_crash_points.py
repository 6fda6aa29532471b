"""The operator dies at every write of a launch, a shrink and a preemption; its successor continues.

The laws of :class:`~tests.operator.loops.simulated.world.World` hold at each write: no node over its GPUs, no
two launches of a job alive, no pod without a written intent, no release before the acknowledgement.
"""

from typing import Any

import pytest
from ballast_operator.errors import Conflict, Unavailable
from ballast_operator.kube.kinds import CONFIG_MAP, LEASE, ROLE, ROLE_BINDING, SERVICE_ACCOUNT
from ballast_policies.protocol.cause import Cause

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.operator.loops.simulated.world import Crash


def shrinking_cluster() -> Simulation:
    """One node with two GPUs: the first job takes both and gives one back, the second waits for it."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=600)
    simulation.add_job("first", trainer={"shrink_at": 20, "total": 80}, totalSteps=80)
    return simulation


async def run_to_the_end(simulation: Simulation, *, followed: bool = False) -> None:
    """``followed``: a second replica watches, a little behind, and takes over when the first dies."""
    tick = simulation.tick

    async def follow_and_tick(**how: Any) -> None:
        if simulation.world.writes % 3 == 0:
            await simulation.follow()
        await tick(**how)

    if followed:
        simulation.tick = follow_and_tick
    if "second" not in simulation.trainers and "first" in simulation.trainers:
        await simulation.until(lambda: simulation.status("first").allocation is not None, seconds=2.0)
        simulation.add_job("second", stages=(1, 1), trainer={"total": 20}, totalSteps=20)
    await simulation.until(
        lambda: all(simulation.state(name) == "Succeeded" for name in simulation.trainers), seconds=2.0
    )


async def number_of_writes() -> int:
    simulation = shrinking_cluster()
    await run_to_the_end(simulation)
    return simulation.world.writes


def die_after(number: int, simulation: Simulation) -> None:
    """Die when the write has landed; for the world that is the same as dying before the next one."""

    def die(write: int) -> None:
        if write == number:
            simulation.world.after_write = lambda _: None
            simulation.died_at = f"died after write {number}: {simulation.world.log[-1]}"
            raise Crash

    simulation.world.after_write = die


@pytest.mark.slow
async def test_a_death_at_any_write_of_a_launch_or_a_shrink_costs_nothing():
    """Both jobs succeed on their first launch, with one repack, whatever write was the operator's last.

    Its successor is a fresh process or a follower whose caches lag behind, in turns.
    """
    total = await number_of_writes()
    assert total > 30
    for number in range(total):
        simulation = shrinking_cluster()
        die_after(number, simulation)
        await run_to_the_end(simulation, followed=number % 2 == 1)
        assert simulation.restarts == 1, f"write {number} was never reached"
        first, second = simulation.status("first"), simulation.status("second")
        said = simulation.died_at
        assert (first.launches, second.launches) == (1, 1), said
        assert not first.restarts and not second.restarts, said
        assert [repack.released_pods for repack in first.repacks] == [("first-1-1",)], said
        assert all(len(uids) == 1 for uids in simulation.world.uids_of_pods.values()), said


@pytest.mark.slow
async def test_leaders_that_live_for_ten_writes_each_still_get_there():
    """One dies after the other, and the jobs do not notice."""
    simulation = shrinking_cluster()

    def die(write: int) -> None:
        if write % 10 == 9:
            raise Crash

    simulation.world.after_write = die
    await run_to_the_end(simulation)
    assert simulation.restarts >= 4
    assert simulation.status("first").launches == 1 and not simulation.status("first").restarts


@pytest.mark.slow
async def test_a_death_at_any_write_of_a_preemption_loses_no_step():
    """Two jobs on one GPU take turns; whichever dies in between, each resumes from what it saved."""

    def taking_turns() -> Simulation:
        simulation = Simulation(nodes={"a": ("fast", 1)}, roundSeconds=20, moves={"maxMovesPerHour": 100})
        for name in ("one", "two"):
            simulation.add_job(name, stages=(1, 1), totalSteps=120, trainer={"total": 120})
        return simulation

    reference = taking_turns()
    await reference.until(lambda: reference.state("one") == "Running", seconds=2.0)
    await reference.until(lambda: reference.state("one") == "Stopping", seconds=2.0)
    first = reference.world.writes - 3
    await reference.until(lambda: reference.state("two") == "Running", seconds=2.0)
    last = reference.world.writes
    await run_to_the_end(reference)
    assert last - first > 10
    for number in range(first, last):
        simulation = taking_turns()
        die_after(number, simulation)
        await run_to_the_end(simulation, followed=number % 2 == 0)
        assert simulation.restarts == 1
        for name in ("one", "two"):
            resumed = simulation.trainers[name].resumed_from
            assert resumed == sorted(resumed), simulation.died_at
            assert set(simulation.status(name).restarts) <= {Cause.PREEMPTED}, simulation.died_at


RIGHTS = (
    (SERVICE_ACCOUNT, "one-trainer"),
    (LEASE, "one"),
    (ROLE, "one-trainer"),
    (ROLE_BINDING, "one-trainer"),
)
"""What a trainer needs in order to read its plan and to report."""


@pytest.mark.slow
@pytest.mark.parametrize("error", [Crash, Unavailable, Conflict])
async def test_a_plan_is_written_once_its_pods_may_read_it(error):
    """A role is made beside the pods: whatever write of the launch fails or is the last, it is made good."""

    def launched(number: int | None = None) -> Simulation:
        simulation = Simulation(nodes={"a": ("fast", 2)})
        simulation.add_job("one", stages=(2, 2), totalSteps=20, trainer={"total": 20})

        def look(write: int) -> None:
            if simulation.world.get(CONFIG_MAP, NAMESPACE, "one-plan") is not None:
                lacking = [
                    kind for kind, name in RIGHTS if simulation.world.get(kind, NAMESPACE, name) is None
                ]
                assert not lacking, f"write {number}"
            if write == number:
                raise error(f"write {number}")

        simulation.world.after_write = look
        return simulation

    reference = launched()
    await reference.until(lambda: reference.state("one") == "Running")
    for number in range(reference.world.writes):
        simulation = launched(number)
        await simulation.until(lambda simulation=simulation: simulation.state("one") == "Succeeded")
        assert (simulation.status("one").launches, simulation.status("one").restarts) == (1, {}), (
            f"write {number}"
        )
