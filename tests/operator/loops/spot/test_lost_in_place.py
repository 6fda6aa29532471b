"""A pod of a gang is lost whose ranks hold copies of each other's layers: the others go on in place."""

import datetime

import pytest
from ballast_operator.kube.kinds import NODE, POD
from ballast_operator.views.clock import show
from ballast_policies.contract.plan import Directive

from tests.operator.loops.simulated.machines import end_pod, evict
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.support.examples import first_daily, first_fast, thinned

FOUR_NODES = {f"n{i}": ("spot", 1) for i in range(4)}
KILLED = 137


async def gang(*, copies=1, stages=(2, 4), trainer=None):
    simulation = Simulation(nodes=FOUR_NODES)
    checkpoint = {"path": "/checkpoints", "inMemoryEverySteps": copies}
    trainer = {"scales": True, **(trainer or {})}
    await simulation.run_job("a", stages=stages, totalSteps=100_000, checkpoint=checkpoint, trainer=trainer)
    return simulation


def kill(simulation, pod):
    end_pod(simulation.world, NAMESPACE, pod, KILLED)


def delete(simulation, pod):
    simulation.world.drop(POD, NAMESPACE, pod)


def delete_soon(simulation, pod):
    """With less time than a save takes."""
    at = simulation.now + datetime.timedelta(seconds=2)
    evict(simulation.world, NAMESPACE, pod, at, reason="")


def force_out(simulation, pod):
    """As ``kubectl delete --force`` does: the object goes, and nobody waits for the processes."""
    metadata = {"deletionTimestamp": show(simulation.now), "deletionGracePeriodSeconds": 0}
    simulation.world.patch(POD, NAMESPACE, pod, {"metadata": metadata})


def take_node(simulation, pod):
    """Its node does not answer, and the others wait for the rank on it."""
    ready(simulation, simulation.world.get(POD, NAMESPACE, pod)["spec"]["nodeName"], "Unknown")
    simulation.trainers["a"].silent = True


def ready(simulation, node, status="True"):
    conditions = {"conditions": [{"type": "Ready", "status": status}]}
    simulation.world.patch(NODE, "", node, {"status": conditions})


@pytest.mark.parametrize("lost", first_fast([0, 2]))
@pytest.mark.parametrize(
    ("lose", "words"),
    [
        (kill, "ended with exit code 137"),
        (delete, "deleted by someone else"),
        (delete_soon, "by deletion of a pod"),
        (force_out, "delet"),
        (take_node, "is lost"),
    ],
)
async def test_a_gang_goes_on_without_a_lost_pod_and_grows_again(lose, words, lost):
    """Its launch goes on under a plan without it, which nobody counts as a restart; then a pod joins.

    The first pod, whose rank hands over what a change of size moves, is lost once it has ended alone.
    """
    simulation = await gang()
    pods = simulation.plan("a").pods
    lose(simulation, pods[lost])
    if lost == 0 and lose is delete_soon:
        await simulation.until(lambda: simulation.status("a").restarts, ticks=60)
        assert simulation.status("a").lost_steps == 0
        assert "rank 0 hosts the rendezvous" in simulation.condition("a", "Running").message
        return
    await simulation.until(lambda: simulation.plan("a").directive is Directive.SHRINK, ticks=60)
    told = simulation.plan("a")
    assert told.pods == tuple(pod for pod in pods if pod != pods[lost])
    assert words in told.reason
    simulation.trainers["a"].silent = False
    await simulation.until(lambda: simulation.status("a").repacks, ticks=20)
    assert words in simulation.status("a").repacks[-1].reason
    for node in FOUR_NODES:
        ready(simulation, node)
    await simulation.until(lambda: simulation.status("a").allocation.gpus == 4, ticks=120)
    await simulation.until(lambda: not simulation.status("a").allocation.joining, ticks=20)
    status = simulation.status("a")
    assert (status.launches, dict(status.restarts)) == (1, {})
    assert pods[lost] not in simulation.plan("a").pods


@pytest.mark.slow
async def test_a_launch_ends_where_the_others_do_not_go_on():
    """Within the limit of a shrink, and by the cause that a shrink has."""
    simulation = await gang(trainer={"deaf": True})
    kill(simulation, simulation.plan("a").pods[2])
    await simulation.until(lambda: simulation.plan("a").directive is Directive.SHRINK, ticks=5)
    assert simulation.status("a").launches == 1
    await simulation.until(lambda: simulation.status("a").restarts, ticks=90)
    assert dict(simulation.status("a").restarts) == {"ShrinkTimeout": 1}


@pytest.mark.parametrize("lost", first_fast([0, 2]))
@pytest.mark.parametrize("fields", [{"copies": 0}, {"stages": (4, 4)}], ids=["none", "size"])
async def test_a_launch_ends_where_none_can_go_on(lost, fields):
    """Without copies, or below the least size: as ever."""
    simulation = await gang(**fields)
    kill(simulation, simulation.plan("a").pods[lost])
    await simulation.until(lambda: simulation.status("a").restarts, ticks=20)
    assert dict(simulation.status("a").restarts) == {"PodLost": 1}


@pytest.mark.slow
async def test_a_pod_that_is_lost_while_the_gang_grows_back_ends_the_growth_alone():
    """The new pod is given up, the gang goes on with the two that are left, and then grows."""
    simulation = await gang()
    pods = simulation.plan("a").pods
    kill(simulation, pods[2])
    await simulation.until(lambda: simulation.status("a").allocation.joining, ticks=120)
    kill(simulation, pods[3])
    await simulation.until(lambda: len(simulation.status("a").repacks) == 2, ticks=30)
    assert simulation.plan("a").pods == pods[:2]
    assert "ended with exit code 137" in simulation.condition("a", "Grown").message
    assert (simulation.status("a").launches, dict(simulation.status("a").restarts)) == (1, {})


@pytest.mark.parametrize("second", [0, 3])
async def test_a_second_pod_may_be_lost_before_the_others_go_on_without_the_first(second):
    """The plan without the first is followed by one without both, which they read as they wait."""
    simulation = await gang()
    pods = simulation.plan("a").pods
    simulation.trainers["a"].silent = True
    kill(simulation, pods[2])
    await simulation.until(lambda: simulation.plan("a").directive is Directive.SHRINK, ticks=20)
    kill(simulation, pods[second])
    left = tuple(pod for pod in pods if pod not in (pods[2], pods[second]))
    await simulation.until(lambda: simulation.plan("a").pods == left, ticks=20)
    simulation.trainers["a"].silent = False
    await simulation.until(lambda: simulation.status("a").repacks, ticks=20)
    assert set(simulation.status("a").repacks[-1].released_pods) == {pods[2], pods[second]}
    assert (simulation.status("a").launches, dict(simulation.status("a").restarts)) == (1, {})


@pytest.mark.slow
@pytest.mark.parametrize("lost", first_daily([0, 2]))
async def test_a_death_of_the_operator_at_any_write_between_a_loss_and_the_growth_costs_nothing(lost):
    """The launch, its ranks and their steps stay, whatever write was the operator's last."""

    async def lose_and_grow(simulation):
        before = simulation.world.writes
        kill(simulation, simulation.plan("a").pods[lost])
        await simulation.until(lambda: simulation.status("a").repacks, ticks=60)
        await simulation.until(lambda: len(simulation.plan("a").pods) == 4, ticks=120)
        return simulation.world.writes - before

    for number in thinned(range(await lose_and_grow(await gang()))):
        simulation = await gang()
        simulation.die_at(simulation.world.writes + number)
        await lose_and_grow(simulation)
        assert simulation.restarts == 1, f"write {number} was never reached"
        status = simulation.status("a")
        assert (status.launches, dict(status.restarts), status.lost_steps) == (1, {}, 0), number
