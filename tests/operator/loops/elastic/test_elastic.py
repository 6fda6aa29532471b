"""Elastic gangs take GPUs that come free, give them back when asked, and lose nothing when that fails."""

import pytest
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.kinds import NODE, POD
from ballast_policies.allocation.policy import SpaceSharing, Surplus
from ballast_policies.allocation.registry import POLICIES
from ballast_policies.contract.messages import ExitCode, ExitReason, TerminationMessage
from ballast_policies.contract.plan import Directive
from ballast_policies.protocol.observed import Cause

from tests.operator.loops.simulated.machines import end_pod, node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, template
from tests.support.examples import first_daily, first_fast, thinned

LONG = {"totalSteps": 100_000}
ENDLESS = {**LONG, "trainer": {"scales": True}}


def sizes(simulation: Simulation) -> dict[str, int]:
    return {name: len(simulation.pods(name)) for name in simulation.trainers}


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
    assert simulation.never_restarted("one", "two")


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
    assert simulation.never_restarted("one", "two", "three")
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
    assert simulation.never_restarted("two", "three", "four")


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
    await simulation.ticks(200, seconds=5.0)
    assert simulation.status("one").restarts[Cause.SHRINK_TIMEOUT] <= 2


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
    assert simulation.never_restarted("one", "two")


@pytest.mark.slow
async def test_gpus_that_come_free_in_another_pool_are_taken_by_one_restart_with_a_checkpoint():
    """Two share four fast GPUs while a third job has the others; then it ends, and one of them goes there."""
    nodes = {"fast": ("fast", 4), "slow-0": ("slow", 4), "slow-1": ("slow", 4)}
    simulation = Simulation(nodes=nodes, roundSeconds=30)
    await simulation.run_job("third", stages=(8, 8), gpuTypes=["slow"], totalSteps=60, trainer={"pace": 1})
    known = [
        {"gpuType": kind, "stages": stages, "stepsPerSecond": round(rate * times, 3)}
        for kind, times in (("fast", 1.0), ("slow", 0.9))
        for stages, rate in ((2, 4.35), (4, 7.58), (8, 13.2))  # what the trainer reports
    ]
    for name in ("one", "two"):
        trainer = {"scales": True, "pace": 1}
        simulation.add_job(name, stages=(2, 8), throughput=known, trainer=trainer, **LONG)
    await simulation.running("one", "two")
    await simulation.until(lambda: simulation.state("third") == "Succeeded")
    await simulation.ticks(26, seconds=5.0)
    chosen = [simulation.status(name).last_decision.chosen for name in ("one", "two")]
    assert sorted(chosen) == ["4 x fast of pool fast", "8 x slow of pool slow"]
    launches = {name: simulation.status(name).launches for name in ("one", "two")}
    assert sorted(launches.values()) == [1, 2]
    moved = max(launches, key=launches.get)
    assert simulation.trainers[moved].resumed_from[-1] > 0
    assert "after a restart of" in simulation.status(moved).last_decision.why


async def running_pair(**spec) -> Simulation:
    """A gang of two that would like to have four, on a pool of two."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=600)
    await simulation.run_job("one", stages=(1, 4), **{**LONG, "grow": True, **spec})
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
    assert simulation.never_restarted("one")
    assert simulation.trainers["one"].step > step
    await simulation.ticks(100)
    assert len(simulation.pods("one")) == 4
    assert simulation.condition("one", "Running").message == "4 ranks train on fast of pool fast"


@pytest.mark.slow
@pytest.mark.parametrize(
    "spec",
    [{"grow": False}, {"model": {"name": "gpt", "layers": 2}, "stages": (1, 2)}],
    ids=["not asked for", "no more stages than layers"],
)
async def test_a_gang_that_does_not_want_more_does_not_grow(spec):
    """``spec.grow`` and the pipeline's limits decide."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=600)
    await simulation.run_job("one", **{"stages": (1, 4), **LONG, "grow": True, **spec})
    simulation.world.put(NODE, node("b", "fast", 2))
    await simulation.ticks(20)
    assert len(simulation.pods("one")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("edit", [{"training": {"learningRate": 0.5}}, {"template": template(hostname="a")}])
async def test_a_gang_whose_recipe_has_changed_since_its_launch_does_not_grow(edit):
    """Newcomers would train by another one, or another image; more stages alone are no other recipe."""
    simulation = Simulation(nodes={"a": ("fast", 4)}, roundSeconds=600)
    await simulation.run_job("one", stages=(1, 1), **LONG, grow=True)
    pipeline = {"minStages": 1, "maxStages": 2, "microbatches": 8, "globalBatchSize": 16}
    simulation.change("one", pipeline=pipeline)
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    simulation.change("one", pipeline={**pipeline, "maxStages": 4}, **edit)
    await simulation.ticks(20, seconds=10.0)
    assert len(simulation.pods("one")) == 2
    await simulation.relaunched("one")
    await simulation.until(lambda: len(simulation.pods("one")) == 4)


@pytest.mark.slow
async def test_gpus_that_are_too_few_for_a_waiting_job_are_used_until_it_has_its_turn():
    """The gang gives them back as soon as they are enough for the other."""
    simulation = await running_pair()
    simulation.add_job("two", stages=(4, 4), **LONG)
    simulation.world.put(NODE, node("b", "fast", 2))
    await simulation.until(lambda: len(simulation.pods("one")) == 4)
    assert simulation.state("two") == "Waiting"
    simulation.world.put(NODE, node("c", "fast", 1))
    await simulation.running("two")
    assert len(simulation.pods("one")) == 1
    assert simulation.never_restarted("one")


@pytest.mark.slow
async def test_a_gang_that_grows_after_a_shrink_has_the_gpus_that_it_grows_onto():
    """Its new pods are on their way, and its plan is still that of the shrink: nobody else is given these."""
    simulation = await alone_on_four()
    await simulation.run_job("two", stages=(2, 2), **LONG)
    simulation.change("two", suspend=True)
    await simulation.until(lambda: bool(simulation.status("one").allocation.joining))
    assert simulation.plan("one").directive is Directive.SHRINK
    simulation.add_job("three", stages=(2, 2), **LONG)
    await simulation.look()
    await simulation.decide()
    assigned = simulation.observer.decided.assignments
    assert len(assigned[NAMESPACE, "one"].placement.nodes) == 4
    assert assigned[NAMESPACE, "three"].placement is None


@pytest.mark.slow
async def test_a_gang_that_has_repacked_does_not_grow_again():
    """Its model got smaller for good: what it released is for others."""
    simulation = await running_pair(trainer={"shrink_at": 30})
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
    assert simulation.never_restarted("one")
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
    simulation.add_job("two", stages=(4, 4), **LONG)
    await simulation.until(lambda: simulation.status("one").allocation.ending is not None)
    assert simulation.status("one").is_true("Grown")
    await simulation.running("two", ticks=400)
    await simulation.running("one", ticks=400)
    assert set(simulation.status("one").restarts) == {Cause.PREEMPTED}


@pytest.mark.parametrize("point", first_fast(thinned(range(9)), 2))
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
