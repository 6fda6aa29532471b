"""A running gang takes GPUs that no other job can use, and loses nothing when that fails."""

import pytest
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.kinds import JOB, NODE, POD
from ballast_policies.contract import ExitCode, ExitReason, TerminationMessage
from ballast_policies.protocol.cause import Cause

from tests.operator.loops.simulated.machines import end_pod, node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

ENDLESS = {"totalSteps": 100_000}


async def running_pair(**spec) -> Simulation:
    """A gang of two that would like to have four, on a pool of two."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=600)
    await simulation.run_job("one", stages=(1, 4), **{**ENDLESS, "grow": True, **spec})
    assert len(simulation.pods("one")) == 2
    return simulation


def uids(simulation: Simulation) -> dict[str, str]:
    return {pod["metadata"]["name"]: pod["metadata"]["uid"] for pod in simulation.pods("one")}


@pytest.mark.slow
async def test_a_gang_grows_onto_a_node_that_comes_later():
    """New pods join, the old ones stay as they are, and the trainer continues in the same launch."""
    simulation = await running_pair()
    before, step = uids(simulation), simulation.trainers["one"].step
    simulation.world.put(NODE, node("b", "fast", 3))
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    status = simulation.status("one")
    assert status.allocation.nodes == ("a", "a", "b", "b")
    assert status.allocation.joining == ()
    assert before.items() < uids(simulation).items()
    assert list(uids(simulation)) == ["one-1-0", "one-1-1", "one-1-2", "one-1-3"]
    assert "one-1-2, one-1-3 joined; 4 ranks train" in status.condition("Grown").message
    assert (status.launches, dict(status.restarts)) == (1, {})
    assert simulation.trainers["one"].step > step
    await simulation.ticks(100)
    assert len(simulation.pods("one")) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [{"grow": False}, {"model": {"name": "gpt", "layers": 2}, "stages": (1, 2)}],
    ids=["not asked for", "no more stages than layers"],
)
async def test_a_gang_that_does_not_want_more_does_not_grow(spec):
    """``spec.grow`` and the pipeline's limits decide."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=600)
    await simulation.run_job("one", **{"stages": (1, 4), **ENDLESS, "grow": True, **spec})
    simulation.world.put(NODE, node("b", "fast", 2))
    await simulation.ticks(20)
    assert len(simulation.pods("one")) == 2


@pytest.mark.slow
async def test_a_gang_whose_recipe_has_changed_since_its_launch_does_not_grow():
    """Newcomers would train by another one; more stages alone are no other recipe."""
    simulation = Simulation(nodes={"a": ("fast", 4)}, roundSeconds=600)
    await simulation.run_job("one", stages=(1, 1), **ENDLESS, grow=True)
    pipeline = {"minStages": 1, "maxStages": 2, "microbatches": 8, "globalBatchSize": 16}
    simulation.change("one", pipeline=pipeline)
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    changed = {"pipeline": {**pipeline, "maxStages": 4}, "training": {"learningRate": 0.5}}
    simulation.world.patch(JOB, NAMESPACE, "one", {"spec": changed})
    await simulation.ticks(20, seconds=10.0)
    assert len(simulation.pods("one")) == 2


@pytest.mark.slow
async def test_gpus_that_are_too_few_for_a_waiting_job_are_used_until_it_has_its_turn():
    """The gang gives them back as soon as they are enough for the other."""
    simulation = await running_pair()
    simulation.add_job("two", stages=(4, 4), **ENDLESS)
    simulation.world.put(NODE, node("b", "fast", 2))
    await simulation.until(lambda: len(simulation.pods("one")) == 4)
    assert simulation.state("two") == "Waiting"
    simulation.world.put(NODE, node("c", "fast", 1))
    await simulation.running("two")
    assert len(simulation.pods("one")) == 1
    assert (simulation.status("one").launches, dict(simulation.status("one").restarts)) == (1, {})


@pytest.mark.slow
async def test_a_gang_that_has_repacked_does_not_grow_again():
    """Its model got smaller for good: what it released is for others."""
    simulation = await running_pair(trainer={"total": 100_000, "shrink_at": 30})
    await simulation.until(lambda: len(simulation.status("one").repacks) == 1)
    await simulation.ticks(100)
    assert len(simulation.pods("one")) == 1


@pytest.mark.slow
async def test_a_new_pod_that_fails_aborts_the_growth_and_not_the_gang():
    """Its pod goes, the others train on, the condition says why; after a pause it is tried again."""
    simulation = await running_pair()
    before = uids(simulation)
    simulation.world.put(NODE, node("b", "fast", 1))
    await simulation.until(lambda: simulation.world.get(POD, NAMESPACE, "one-1-2") is not None)
    message = TerminationMessage(reason=ExitReason.FAILED, message="no such library")
    end_pod(simulation.world, NAMESPACE, "one-1-2", ExitCode.ERROR, message)
    await simulation.until(lambda: simulation.condition("one", "Grown").reason == "GrowthGivenUp")
    await simulation.tick()
    status = simulation.status("one")
    assert "no such library" in status.condition("Grown").message
    assert status.allocation.nodes == ("a", "a")
    assert uids(simulation) == before
    assert (status.launches, dict(status.restarts)) == (1, {})
    await simulation.until(lambda: simulation.status("one").is_true("Grown"), seconds=5.0)
    assert before.items() < uids(simulation).items()


@pytest.mark.slow
async def test_new_pods_that_never_run_are_deleted():
    """All or none within the time that a launch has, too."""
    simulation = await running_pair()
    simulation.world.put(NODE, node("b", "fast", 1))
    await simulation.until(lambda: simulation.world.get(POD, NAMESPACE, "one-1-2") is not None)
    simulation.set_node_ready("b", False)
    await simulation.until(
        lambda: simulation.condition("one", "Grown").reason == JobReason.GROWTH_GIVEN_UP, seconds=5.0
    )
    assert "only 0 of 1 pods ran within 120 s" in simulation.condition("one", "Grown").message
    assert simulation.status("one").launches == 1


@pytest.mark.slow
async def test_a_growth_that_is_not_acknowledged_restarts_the_gang_from_its_checkpoint():
    """From the plan on the newcomers are ranks: nothing but a restart undoes that."""
    simulation = await running_pair()
    simulation.world.put(NODE, node("b", "fast", 1))
    await simulation.until(lambda: simulation.world.get(POD, NAMESPACE, "one-1-2") is not None)
    simulation.trainers["one"].deaf = True
    await simulation.until(
        lambda: simulation.status("one").restarts.get(Cause.GROW_TIMEOUT) == 1, seconds=20.0, ticks=40
    )
    simulation.trainers["one"].deaf = False
    await simulation.running("one")
    assert simulation.status("one").launches == 2


@pytest.mark.slow
async def test_a_gang_that_is_to_go_finishes_its_growth_first():
    """Ranks that wait for each other are not asked to save."""
    simulation = await running_pair()
    simulation.change_policy(roundSeconds=5)
    simulation.world.put(NODE, node("b", "fast", 2))
    await simulation.until(lambda: bool(simulation.status("one").allocation.joining))
    simulation.add_job("two", stages=(4, 4), **ENDLESS)
    await simulation.running("two", ticks=400)
    await simulation.running("one", ticks=400)
    assert set(simulation.status("one").restarts) == {Cause.PREEMPTED}


@pytest.mark.parametrize("point", range(9))
async def test_an_operator_that_dies_at_any_write_of_a_growth_is_succeeded_without_loss(point):
    """One launch, four ranks, no pod of a name twice, whatever write was the last."""
    simulation = await running_pair()
    start = simulation.world.writes
    simulation.die_at(start + point)
    simulation.world.put(NODE, node("b", "fast", 2))
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    assert simulation.restarts == 1
    status = simulation.status("one")
    assert (status.launches, dict(status.restarts), len(status.allocation.pods)) == (1, {}, 4)
    assert all(len(found) == 1 for found in simulation.world.uids_of_pods.values())
