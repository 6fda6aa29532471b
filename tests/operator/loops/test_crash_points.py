"""The operator dies at any write, or an answer is lost: no step is lost, and nothing decided on old state."""

from typing import Any

import pytest
from ballast_operator.errors import Conflict, Unavailable
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, LEASE, NODE, POD, ROLE, ROLE_BINDING, SERVICE_ACCOUNT
from ballast_operator.reconcile.reconciler import Requeue
from ballast_policies.protocol.observed import Cause

from tests.operator.loops.simulated.machines import end_pod, node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.operator.loops.simulated.world import Crash
from tests.support.examples import thinned


def shrinking_cluster() -> Simulation:
    """One node with two GPUs: the first job takes both and gives one back, the second waits for it."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=600)
    simulation.add_job("first", trainer={"shrink_at": 20}, totalSteps=40)
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
        simulation.add_job("second", stages=(1, 1), totalSteps=8)
    await simulation.reached("Succeeded", *simulation.trainers, seconds=2.0)


@pytest.mark.slow
async def test_a_death_at_any_write_of_a_launch_or_a_shrink_costs_nothing():
    """Both jobs succeed on their first launch, with one repack, whatever write was the operator's last.

    One in three is tried each day, all are each night, as of growths, evictions and lost pods.
    Its successor is a fresh process or a follower whose caches lag behind, in turns.
    """
    reference = shrinking_cluster()
    await run_to_the_end(reference)
    assert reference.world.writes > 30
    for number in thinned(range(reference.world.writes)):
        simulation = shrinking_cluster()
        simulation.die_at(number)
        await run_to_the_end(simulation, followed=number % 2 == 1)
        assert simulation.restarts == 1, f"write {number} was never reached"
        first, second = simulation.status("first"), simulation.status("second")
        said = simulation.died_at
        assert (first.launches, second.launches) == (1, 1), said
        assert not first.restarts and not second.restarts, said
        assert [repack.released_pods for repack in first.repacks] == [("first-1-1",)], said
        assert all(len(uids) == 1 for uids in simulation.world.uids_of_pods.values()), said


@pytest.mark.slow
async def test_a_death_at_any_write_of_a_preemption_loses_no_step():
    """Two jobs on one GPU take turns; whichever dies in between, each resumes from what it saved."""

    def taking_turns() -> Simulation:
        simulation = Simulation(nodes={"a": ("fast", 1)}, roundSeconds=20, moves={"maxMovesPerHour": 100})
        for name in ("one", "two"):
            simulation.add_job(name, stages=(1, 1), totalSteps=120)
        return simulation

    reference = taking_turns()
    await reference.running("one", seconds=2.0)
    await reference.until(lambda: reference.state("one") == "Stopping", seconds=2.0)
    first = reference.world.writes - 3
    await reference.running("two", seconds=2.0)
    last = reference.world.writes
    await run_to_the_end(reference)
    assert last - first > 10
    for number in thinned(range(first, last)):
        simulation = taking_turns()
        simulation.die_at(number)
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
        simulation.add_job("one", stages=(2, 2), totalSteps=20)

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
    await reference.running("one")
    for number in thinned(range(reference.world.writes)):
        simulation = launched(number)
        await simulation.until(lambda simulation=simulation: simulation.state("one") == "Succeeded")
        assert (simulation.status("one").launches, simulation.status("one").restarts) == (1, {}), (
            f"write {number}"
        )


@pytest.mark.parametrize("pods", [("one-1-0",), ("one-1-0", "one-1-1")], ids=["launch", "growth"])
async def test_a_launch_or_growth_whose_answer_is_lost_stays_reserved_until_the_status_is_read(pods):
    """No other job counts on its GPUs; the next pass continues it, whatever the watch has told."""
    simulation = Simulation(nodes={"a": ("fast", 1)})
    simulation.add_job("one", stages=(1, len(pods)), totalSteps=100_000)
    if len(pods) > 1:
        await simulation.running("one")
        simulation.world.put(NODE, node("b", "fast", 1))

    def lose(number: int) -> None:
        held = simulation.status("one").allocation
        if held is not None and held.pods == pods:
            simulation.world.after_write = lambda _: None
            raise Unavailable(f"the answer to write {number} was lost")

    simulation.world.after_write = lose
    passes = simulation.reconciler.reconcile
    reserved = []

    async def noted(key):
        try:
            return await passes(key)
        except Unavailable:
            reserved.append(simulation.observer.findings.reservations[key].pods)
            raise

    simulation.reconciler.reconcile = noted
    await simulation.until(lambda: bool(reserved))
    assert reserved == [pods]
    assert [pod["metadata"]["name"] for pod in simulation.pods("one")] == list(pods)
    assert simulation.observer.findings.reservations == {}
    assert simulation.status("one").launches == 1


async def test_a_status_that_another_leader_has_written_meanwhile_is_not_overwritten():
    """What was decided on the one before is a conflict: its launches and what they hold would be lost."""
    simulation = Simulation(nodes={"a": ("fast", 1)})
    await simulation.run_job("one", stages=(1, 1), totalSteps=100_000)
    await simulation.look()
    simulation.world.patch(JOB, NAMESPACE, "one", {"status": {"launches": 7}})
    end_pod(simulation.world, NAMESPACE, "one-1-0", 137)
    simulation.caches.listed(POD, *await simulation.cluster.list(POD))
    with pytest.raises(Conflict):
        await simulation.reconciler.reconcile((NAMESPACE, "one"))
    status = simulation.status("one")
    assert (status.launches, status.allocation.ending) == (7, None)


async def test_gpus_are_not_freed_while_a_pod_exists_that_was_not_observed():
    """The answer to its creation was lost and the watch is late: it is found by a list before the release."""
    simulation = Simulation(nodes={"a": ("fast", 1)})
    simulation.add_job("one", stages=(1, 1))
    await simulation.until(lambda: bool(simulation.pods("one")))
    uid = simulation.pods("one")[0]["metadata"]["uid"]
    simulation.start_operator()  # it will know the job, and nothing of its pods
    status = simulation.status("one")
    ending = {"cause": "Preempted", "message": "", "since": "2026-01-01T00:00:00Z"}
    content = status.to_dict()
    content["allocation"]["ending"] = ending
    simulation.world.patch(JOB, NAMESPACE, "one", {"status": content})
    simulation.caches.wrote(JOB, simulation.item("one"))
    key = (NAMESPACE, "one")
    assert await simulation.reconciler.reconcile(key) == Requeue(0.0)
    assert simulation.status("one").allocation is not None
    await simulation.reconciler.reconcile(key)
    (pod,) = simulation.pods("one")
    assert pod["metadata"]["uid"] == uid and pod["metadata"]["deletionTimestamp"]
