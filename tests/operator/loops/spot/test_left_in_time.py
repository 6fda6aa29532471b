"""Whatever a gang is in the middle of: pods are off a node before it goes, by SIGKILL if need be."""

import datetime

import pytest
from ballast_operator.kube.kinds import CONFIG_MAP, NODE, POD
from ballast_operator.views.clock import show
from ballast_policies.contract.messages import plan_config_map_name
from ballast_policies.contract.plan import Directive

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.operator.loops.spot.test_notices import FOUR_NODES, ITN, elastic, mark, node_of_rank
from tests.support.examples import first_daily

USUAL_GRACE = 30


def announce(simulation, name, seconds):
    """The node goes in ``seconds``; when that is."""
    at = simulation.now + datetime.timedelta(seconds=seconds)
    mark(simulation, name, ITN, annotations={"ballast.dev/leaves-at": show(at)})
    return at


def watched_kills(simulation):
    """Pod -> when it is killed at the latest, of the running pods that the operator deletes from now on."""
    kills, delete = {}, simulation.cluster.delete

    async def watched(kind, namespace, name, **how):
        pod = simulation.world.get(kind, namespace, name)
        if kind is POD and pod is not None and pod["status"]["phase"] == "Running":
            grace = how.get("grace_seconds")
            grace = USUAL_GRACE if grace is None else grace
            kills[name] = simulation.now + datetime.timedelta(seconds=grace)
        return await delete(kind, namespace, name, **how)

    simulation.cluster.delete = watched
    return kills


async def is_left(simulation, going, at):
    """Every pod on the nodes ``going`` has ended, or has been killed, before ``at``: those that have been."""
    kills = watched_kills(simulation)
    there = {
        pod["metadata"]["name"] for pod in simulation.pods("a") if pod["spec"].get("nodeName") in set(going)
    }
    assert there
    await simulation.until(lambda: not simulation.nodes("a") & set(going), ticks=130)
    assert simulation.now < at
    killed = there & set(kills)
    assert all(kills[name] < at for name in killed)
    return killed


def suspend(simulation):
    simulation.change("a", suspend=True)


async def launching(stages=(4, 4)):
    """Its ranks meet, import and load: rank 0 has acknowledged nothing, and reads no plan meanwhile."""
    simulation = Simulation(nodes=FOUR_NODES)
    simulation.add_job("a", stages=stages, totalSteps=100_000, trainer={"silent": True})
    await simulation.until(lambda: simulation.world.get(CONFIG_MAP, NAMESPACE, plan_config_map_name("a")))
    assert simulation.plan("a").directive is Directive.RUN
    return simulation


async def launching_elastic():
    """The same where a shrink would do, once it trains."""
    return await launching(stages=(1, 4))


async def shrinking():
    """A shrink that its trainer has proposed is never acknowledged, and then no save is."""
    simulation = await elastic(FOUR_NODES, saves=False, shrink_at=100, shrink_to=3)
    simulation.trainers["a"].deaf = True
    await simulation.until(lambda: simulation.plan("a").directive is Directive.SHRINK)
    return simulation


async def growing():
    """New ranks are in the plan, and the others wait for them in vain."""
    nodes = {f"n{i}": ("spot", 1) for i in range(3)}
    simulation = await elastic(nodes, saves=False, scales=True)
    simulation.trainers["a"].deaf = True
    simulation.world.put(NODE, node("n3", "spot", 1))
    await simulation.until(lambda: simulation.plan("a").directive is Directive.GROW)
    return simulation


async def saving():
    """It is being suspended, and the save takes longer than the node lasts."""
    simulation = await elastic(FOUR_NODES, saves=False)
    suspend(simulation)
    await simulation.until(lambda: simulation.plan("a").directive is Directive.CHECKPOINT_AND_STOP)
    return simulation


async def training():
    """It trains, and when the time comes it neither shrinks nor saves."""
    return await elastic(FOUR_NODES, saves=False, deaf=True)


MIDDLES = (launching, launching_elastic, shrinking, growing, saving, training)


@pytest.mark.slow
@pytest.mark.parametrize("seconds", first_daily([30, 120]))
@pytest.mark.parametrize("middle", MIDDLES, ids=[middle.__name__ for middle in MIDDLES])
async def test_a_trainer_that_answers_nothing_is_off_the_node_before_it_goes(middle, seconds):
    """No time-out of a launch, a shrink, a growth or a save is waited for past the notice."""
    simulation = await middle()
    going = node_of_rank(simulation, 1)
    assert await is_left(simulation, [going], announce(simulation, going, seconds))


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [30, 5])
async def test_several_nodes_at_once_are_left_in_time(seconds):
    """The whole gang's, rank 0's included."""
    simulation = await training()
    at = [announce(simulation, name, seconds) for name in FOUR_NODES]
    assert len(await is_left(simulation, list(FOUR_NODES), at[0])) == 4


async def test_a_launch_that_has_not_begun_is_not_asked_to_save():
    """There is nothing to save: its pods are deleted as soon as it ends."""
    simulation = await launching()
    announce(simulation, "n1", 30)
    await simulation.until(lambda: simulation.status("a").restarts, ticks=20)
    await simulation.until(lambda: not simulation.pods("a"), ticks=3)
    assert simulation.plan("a").directive is Directive.RUN


@pytest.mark.parametrize("stages", [(1, 4), (4, 4)])
async def test_five_seconds_are_enough_to_save(stages):
    """No shrink is tried: the trainer saves at once, and no step is lost."""
    simulation = await elastic(FOUR_NODES, stages=stages)
    going = node_of_rank(simulation, 2)
    trainer = simulation.trainers["a"]
    await is_left(simulation, [going], announce(simulation, going, 5))
    assert trainer.saved == trainer.step
    assert simulation.status("a").restarts == {"NodeLeaving": 1}


@pytest.mark.slow
async def test_a_pod_keeps_its_own_grace_where_its_node_stays():
    """Only pods on the node that goes are hurried."""
    simulation = await training()
    going, hurried = node_of_rank(simulation, 1), simulation.plan("a").pods[1]
    kills = watched_kills(simulation)
    announce(simulation, going, 30)
    await simulation.until(lambda: kills, ticks=40)
    graces = {name: (end - simulation.now).total_seconds() for name, end in kills.items()}
    assert graces.pop(hurried) <= 5
    assert set(graces.values()) == {USUAL_GRACE}


async def test_a_node_that_outlasts_its_notice_costs_no_step():
    """The time has passed and the node still stands: the trainer has all the time to save."""
    simulation = await elastic(FOUR_NODES, stages=(4, 4))
    kills = watched_kills(simulation)
    announce(simulation, "n1", -60)
    trainer = simulation.trainers["a"]
    await simulation.until(lambda: not simulation.pods("a"), ticks=10)
    assert trainer.saved == trainer.step
    assert not kills


@pytest.mark.slow
async def test_the_time_of_a_second_node_counts_from_its_own_notice():
    """Not from the first one's: else it would be over before it was given."""
    simulation = await elastic(FOUR_NODES, stages=(4, 4))
    mark(simulation, "n0", ITN)
    await simulation.ticks(40)
    mark(simulation, "n1", {"key": "cloud.google.com/impending-node-termination", "effect": "NoSchedule"})
    await simulation.tick()
    leaving, seen = simulation.status("a").allocation.leaving, simulation.now
    assert leaving.nodes == ("n0", "n1")
    assert leaving.at == seen + datetime.timedelta(seconds=30)
    await simulation.tick()
    assert simulation.status("a").allocation.leaving == leaving
    mark(simulation, "n1")
    await simulation.tick()
    assert simulation.status("a").allocation.leaving.at == seen + datetime.timedelta(seconds=120 - 40)


@pytest.mark.slow
async def test_a_notice_that_is_taken_back_during_a_save_takes_its_bound_back():
    """The save that was asked for has its usual time again, and the pods their own grace."""
    simulation = await saving()
    announce(simulation, "n1", 30)
    await simulation.tick()
    assert simulation.status("a").allocation.leaving is not None
    mark(simulation, "n1")
    kills = watched_kills(simulation)
    await simulation.ticks(35)
    assert simulation.status("a").allocation.leaving is None
    assert not kills
    simulation.trainers["a"].saves = True
    await simulation.until(lambda: not simulation.pods("a"), ticks=5)
    assert simulation.trainers["a"].saved == simulation.trainers["a"].step


@pytest.mark.slow
async def test_a_notice_that_is_taken_back_during_a_shrink_costs_no_restart():
    """The shrink is finished, and the gang grows again."""
    simulation = await elastic(FOUR_NODES, scales=True, deaf=True)
    going = node_of_rank(simulation, 3)
    announce(simulation, going, 120)
    await simulation.until(lambda: simulation.plan("a").directive is Directive.SHRINK, ticks=5)
    mark(simulation, going)
    await simulation.tick()
    simulation.trainers["a"].deaf = False
    await simulation.until(lambda: simulation.status("a").repacks, ticks=10)
    await simulation.until(lambda: len(simulation.plan("a").ranks) == 4, ticks=120)
    assert simulation.status("a").restarts == {}
