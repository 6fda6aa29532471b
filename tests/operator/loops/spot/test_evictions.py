"""A pod of an elastic gang is evicted or deleted: the others take its layers, live, while its grace lasts."""

import datetime

import pytest
from ballast_operator.kube.kinds import JOB, NODE
from ballast_policies.contract import Directive

from tests.operator.loops.simulated.machines import evict
from tests.operator.loops.simulated.simulation import NAMESPACE
from tests.operator.loops.spot.test_notices import FOUR_NODES, elastic, node_of_rank
from tests.support.examples import first_daily, first_fast

GRACE = datetime.timedelta(seconds=30)
REASONS = ("EvictionByEvictionAPI", "PreemptionByScheduler", "DeletionByTaintManager", "")


def end_of_rank(simulation, *ranks, reason=REASONS[0]):
    """The pods of these ranks are evicted; when they are killed."""
    at, pods = simulation.now + GRACE, simulation.plan("a").pods
    for rank in ranks:
        evict(simulation.world, NAMESPACE, pods[rank], at, reason=reason)
    return at


def cordon(simulation, name, closed=True):
    simulation.world.patch(NODE, "", name, {"spec": {"unschedulable": closed}})


@pytest.mark.parametrize("reason", first_daily(REASONS))
async def test_a_gang_continues_without_a_pod_that_is_evicted_and_grows_back(reason):
    """Its ranks leave within the grace; when the drained node is open again the gang has its size again."""
    simulation = await elastic(FOUR_NODES, scales=True)
    drained = node_of_rank(simulation, 2)
    cordon(simulation, drained)
    at = end_of_rank(simulation, 2, reason=reason)
    await simulation.tick()
    told = simulation.plan("a")
    assert (told.directive, len(told.pods)) == (Directive.SHRINK, 3)
    assert told.deadline == pytest.approx(at.timestamp(), abs=1)
    await simulation.until(lambda: len(simulation.status("a").repacks) == 1, ticks=15)
    assert simulation.now < at
    assert simulation.never_restarted("a")
    cordon(simulation, drained, closed=False)
    await simulation.until(lambda: len(simulation.plan("a").pods) == 4, ticks=60)
    assert simulation.never_restarted("a")
    assert simulation.condition("a", "NodesStay").is_true


@pytest.mark.parametrize("gap", (0, 4))
@pytest.mark.parametrize("reason", first_daily(("", "EvictionByEvictionAPI")))
async def test_pods_that_are_evicted_one_after_the_other_all_leave_live(reason, gap):
    """As a drain does: the second may go while the first hands its layers over."""
    simulation = await elastic(FOUR_NODES)
    pods = simulation.plan("a").pods
    for rank in (3, 1):
        evict(simulation.world, NAMESPACE, pods[rank], simulation.now + GRACE, reason=reason)
        await simulation.ticks(gap)
    await simulation.until(lambda: len(simulation.plan("a").pods) == 2, ticks=25)
    await simulation.until(lambda: simulation.status("a").allocation.gpus == 2, ticks=25)
    assert simulation.never_restarted("a")
    assert simulation.plan("a").pods == (pods[0], pods[2])


@pytest.mark.parametrize(
    ("stages", "ranks"),
    [((4, 4), (2,)), ((3, 4), (1, 2)), ((1, 4), (0,)), ((1, 4), (0, 1, 2, 3))],
    ids=["one size", "too few stay", "rank 0", "all"],
)
async def test_a_gang_that_cannot_continue_saves_and_starts_again(stages, ranks):
    """Nothing is done twice."""
    simulation = await elastic(FOUR_NODES, stages=stages)
    at = end_of_rank(simulation, *ranks)
    trainer, before = simulation.trainers["a"], simulation.trainers["a"].step
    await simulation.until(lambda: simulation.status("a").launches == 2, ticks=60)
    assert simulation.now < at
    assert trainer.saved == trainer.step >= before
    await simulation.running("a", ticks=60)
    assert simulation.status("a").lost_steps == 0


@pytest.mark.slow
@pytest.mark.parametrize("reason", ("EvictionByEvictionAPI", ""))
async def test_a_trainer_that_does_not_hand_over_has_saved_before_the_pod_is_killed(reason):
    """A shrink may fail: half of the grace is kept for saving."""
    simulation = await elastic(FOUR_NODES, deaf=True)
    at = end_of_rank(simulation, 3, reason=reason)
    await simulation.until(lambda: simulation.status("a").launches == 2, ticks=60)
    assert simulation.now < at
    assert simulation.status("a").lost_steps == 0


@pytest.mark.parametrize("reason", ("EvictionByEvictionAPI", ""))
@pytest.mark.parametrize("point", first_fast(range(5)))
async def test_an_operator_that_dies_at_any_write_of_it_is_succeeded_without_loss(point, reason):
    """What is under way is read from the pods and the plan."""
    simulation = await elastic(FOUR_NODES)
    start = simulation.world.writes + 1  # the eviction is written by its author
    end_of_rank(simulation, 2, reason=reason)
    simulation.die_at(start + point)
    await simulation.until(lambda: simulation.status("a").repacks, ticks=25)
    assert simulation.never_restarted("a")


async def test_pods_of_a_job_that_is_deleted_make_it_no_smaller():
    """A garbage collector deletes pod after pod; there is nothing to save them for."""
    simulation = await elastic(FOUR_NODES)
    simulation.world.patch(JOB, NAMESPACE, "a", {"metadata": {"deletionTimestamp": "2026-01-01T00:00:00Z"}})
    end_of_rank(simulation, 3, reason="")
    await simulation.ticks(3)
    assert simulation.plan("a").directive is Directive.RUN


async def test_a_pod_that_the_cluster_deletes_on_a_dead_node_is_lost_at_once():
    """The taint manager's condition is no notice: nobody there can save, so no grace is waited for."""
    simulation = await elastic(FOUR_NODES, stages=(2, 4))
    dead = node_of_rank(simulation, 1)
    down = {"type": "Ready", "status": "Unknown"}
    simulation.world.patch(NODE, "", dead, {"status": {"conditions": [down]}})
    at = end_of_rank(simulation, 1, reason="DeletionByTaintManager")
    await simulation.until(lambda: simulation.status("a").launches == 2, ticks=25)
    assert simulation.now < at
    assert dict(simulation.status("a").restarts) == {"NodeLost": 1}
