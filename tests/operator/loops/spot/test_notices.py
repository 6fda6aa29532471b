"""A node or a pod announces that it goes: the gang moves before it does, live where its sizes allow."""

import datetime

import pytest
from ballast_operator.kube.kept_fields import CONDITIONS, TAINTS
from ballast_operator.kube.kinds import JOB, NODE, POD
from ballast_operator.views.clock import show
from ballast_policies.contract.plan import Directive

from tests.operator.loops.simulated.machines import evict
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.support.examples import first_daily, first_fast, thinned

ITN = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}


def mark(simulation, name, *taints, conditions=(), annotations=None):
    ready = {"type": "Ready", "status": "True"}
    simulation.world.patch(
        NODE,
        "",
        name,
        {
            "metadata": {"annotations": annotations or {}},
            "spec": {"taints": list(taints)},
            "status": {"conditions": [ready, *conditions]},
        },
    )


def node_of_rank(simulation, number):
    pod = simulation.world.get(POD, NAMESPACE, simulation.plan("a").pods[number])
    return pod["spec"]["nodeName"]


async def elastic(nodes, *, stages=(1, 4), **trainer):
    """A gang of four ranks that trains, and may have any size in ``stages``."""
    simulation = Simulation(nodes=nodes)
    await simulation.run_job("a", stages=stages, totalSteps=100_000, trainer=trainer)
    return simulation


FOUR_NODES = {f"n{i}": ("spot", 1) for i in range(4)}


def marks():
    for kind in TAINTS:
        yield {"key": kind.name + "x" * kind.name.endswith("/"), "effect": "NoSchedule"}, None, kind.seconds
    for kind in CONDITIONS:
        reason = (*kind.reasons, "Any")[0] + "Scheduled"
        yield None, {"type": kind.name, "status": "True", "reason": reason}, kind.seconds


@pytest.mark.parametrize(("found", "condition", "seconds"), first_fast(marks(), 3))
async def test_every_handlers_mark_makes_the_gang_shrink_live(found, condition, seconds):
    """No restart, no step lost: the ranks on the node leave, and the plan tells until when."""
    simulation = await elastic(FOUR_NODES)
    going = node_of_rank(simulation, 2)
    mark(simulation, going, *([found] if found else []), conditions=[condition] if condition else [])
    await simulation.tick()
    told = simulation.plan("a")
    assert told.directive is Directive.SHRINK
    assert told.deadline - simulation.now.timestamp() == seconds
    await simulation.until(lambda: simulation.status("a").repacks, ticks=20)
    assert going not in simulation.nodes("a")
    status = simulation.status("a")
    assert (status.launches, status.restarts, status.lost_steps) == (1, {}, 0)
    assert status.repacks[-1].asked
    assert status.condition("NodesStay").is_true


async def test_a_controller_that_undoes_the_status_delays_no_move_off_a_node_that_goes():
    """What it changes is put right after pauses, longer than the node stays; GPUs that go do not wait."""
    simulation = await elastic(FOUR_NODES)
    for _ in range(40):
        simulation.world.patch(JOB, NAMESPACE, "a", {"status": {"conditions": []}})
        await simulation.tick()
    assert simulation.observer.findings.contested((NAMESPACE, "a"))
    mark(simulation, going := node_of_rank(simulation, 2), ITN)
    for _ in range(15):
        simulation.world.patch(JOB, NAMESPACE, "a", {"status": {"conditions": []}})
        await simulation.tick()
    assert going not in simulation.nodes("a")
    assert simulation.status("a").launches == 1


async def test_a_controller_that_undoes_the_status_leaves_a_gang_the_time_to_save():
    """When a notice was seen is written at once, since its time counts from then."""
    simulation = await elastic(FOUR_NODES, stages=(4, 4))
    for _ in range(72):
        simulation.world.patch(JOB, NAMESPACE, "a", {"status": {"conditions": []}})
        await simulation.tick()
    mark(simulation, "n0", ITN)
    trainer, at = simulation.trainers["a"], simulation.now + datetime.timedelta(seconds=120)
    await simulation.tick()
    assert simulation.status("a").allocation.leaving.nodes == ("n0",)
    await simulation.until(lambda: not simulation.pods("a"), ticks=120)
    assert simulation.now < at and trainer.saved == trainer.step
    assert simulation.status("a").restarts == {"NodeLeaving": 1}


@pytest.mark.parametrize(
    ("found", "condition"),
    [
        ({"key": "cloud.google.com/gke-spot", "value": "true", "effect": "NoSchedule"}, None),
        ({"key": "kubernetes.azure.com/scalesetpriority", "value": "spot", "effect": "NoSchedule"}, None),
        (None, {"type": "VMEventScheduled", "status": "True", "reason": "FreezeScheduled"}),
        (None, {"type": "PreemptScheduled", "status": "False"}),
        (None, {"type": "MemoryPressure", "status": "True"}),
    ],
)
async def test_a_mark_that_says_nothing_of_the_end_changes_nothing(found, condition):
    """Spot nodes carry taints for life, and a virtual machine that is frozen for seconds comes back."""
    simulation = await elastic(FOUR_NODES)
    mark(simulation, "n3", *([found] if found else []), conditions=[condition] if condition else [])
    await simulation.ticks(5)
    assert len(simulation.pods("a")) == 4
    assert simulation.condition("a", "NodesStay") is None


@pytest.mark.parametrize("seconds", first_daily([30, 120]))
async def test_a_gang_of_one_size_saves_and_moves_to_free_nodes_at_once(seconds):
    """It cannot shrink, others are free: it does not wait for the last moment, and loses no step."""
    simulation = await elastic({f"n{i}": ("spot", 1) for i in range(6)}, stages=(4, 4))
    at = simulation.now + datetime.timedelta(seconds=seconds)
    going = node_of_rank(simulation, 1)
    mark(simulation, going, ITN, annotations={"ballast.dev/leaves-at": show(at)})
    await simulation.until(lambda: simulation.status("a").launches == 2, ticks=seconds // 3)
    await simulation.running("a", ticks=20)
    assert simulation.now < at
    status = simulation.status("a")
    assert status.restarts == {"NodeLeaving": 1}
    assert status.lost_steps == 0
    assert going not in simulation.nodes("a")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", first_daily([30, 120]))
async def test_a_gang_without_another_place_trains_until_there_is_just_the_time_to_save(seconds):
    """Half of the notice is used, half is left for the checkpoint; then it waits, with nothing lost."""
    simulation = await elastic(FOUR_NODES, stages=(4, 4))
    started = simulation.now
    at = started + datetime.timedelta(seconds=seconds)
    mark(simulation, "n0", ITN, annotations={"ballast.dev/leaves-at": show(at)})
    await simulation.ticks(seconds // 2 - 2)
    assert simulation.state("a") == "Running"
    assert "n0 goes at" in simulation.condition("a", "NodesStay").message
    trainer = simulation.trainers["a"]
    await simulation.until(lambda: not simulation.pods("a"), ticks=8)
    assert trainer.saved == trainer.step
    assert simulation.now < at
    assert simulation.status("a").restarts == {"NodeLeaving": 1}
    await simulation.tick()
    assert simulation.state("a") == "Waiting"


async def test_a_gang_that_loses_the_node_of_rank_0_saves_and_restarts_smaller():
    """Rank 0 hosts the rendezvous and cannot be handed over: three GPUs are left, the job has them."""
    simulation = await elastic(FOUR_NODES)
    going = node_of_rank(simulation, 0)
    mark(simulation, going, ITN)
    await simulation.until(lambda: simulation.status("a").launches == 2, ticks=20)
    await simulation.running("a", ticks=20)
    assert len(simulation.pods("a")) == 3
    assert simulation.status("a").restarts == {"NodeLeaving": 1}
    assert simulation.status("a").lost_steps == 0


@pytest.mark.slow
async def test_losses_of_nodes_never_use_up_the_jobs_own_restarts():
    """Ten notices in a row, with a backoffLimit of 0: the job still runs."""
    simulation = Simulation(nodes={"n0": ("spot", 2), "n1": ("spot", 2)})
    simulation.add_job("a", backoffLimit=0, totalSteps=100_000)
    for number in range(10):
        await simulation.running("a", ticks=60)
        (on,) = simulation.nodes("a")
        other = "n0" if on == "n1" else "n1"
        mark(simulation, other)
        mark(simulation, on, ITN)
        await simulation.until(lambda done=number + 2: simulation.status("a").launches == done, ticks=60)
    assert simulation.status("a").restarts == {"NodeLeaving": 10}
    assert simulation.status("a").lost_steps == 0


@pytest.mark.slow
async def test_a_notice_that_is_taken_back_changes_nothing_more():
    """An inelastic gang with nowhere to go trains on, and its condition says that all is well again."""
    simulation = await elastic(FOUR_NODES, stages=(4, 4))
    mark(simulation, "n0", ITN)
    await simulation.ticks(10)
    mark(simulation, "n0")
    await simulation.ticks(30, seconds=5.0)
    status = simulation.status("a")
    assert (status.launches, status.restarts) == (1, {})
    assert status.condition("NodesStay").is_true
    assert status.allocation.leaving is None


@pytest.mark.slow
async def test_an_operator_that_starts_again_knows_when_the_node_goes():
    """The time of a notice without one counts from when it was first seen, by whichever operator."""
    simulation = await elastic(FOUR_NODES, stages=(4, 4))
    mark(simulation, "n0", ITN)
    await simulation.tick()
    at = simulation.status("a").allocation.leaving.at
    simulation.start_operator()
    await simulation.ticks(20)
    assert simulation.status("a").allocation.leaving.at == at


async def test_whole_positions_leave_together():
    """With two ranks at each position a gang cannot keep one of them: it shrinks by both."""
    nodes = {f"n{i}": ("spot", 1) for i in range(8)}
    simulation = Simulation(nodes=nodes)
    await simulation.run_job("a", stages=(1, 4), totalSteps=100_000, parallelism={"data": 2})
    mark(simulation, node_of_rank(simulation, 5), ITN)
    await simulation.until(lambda: len(simulation.plan("a").ranks) == 6, ticks=10)
    assert simulation.status("a").restarts == {}


async def test_a_script_is_stopped_before_its_node_goes_and_started_elsewhere():
    """It cannot change its size; without the client it gets SIGTERM while the node still stands."""
    simulation = Simulation(nodes={"n0": ("spot", 2), "n1": ("spot", 2)})
    simulation.add_script("a", totalSteps=100_000)
    await simulation.running("a")
    (on,) = simulation.nodes("a")
    mark(simulation, on, ITN)
    await simulation.until(lambda: simulation.nodes("a") == {"n0", "n1"} - {on}, ticks=30)
    assert simulation.status("a").restarts == {"NodeLeaving": 1}


async def node_deleted(simulation, number, *, silent=False):
    """The Node object under a rank goes; its pods run on, unless ``silent``, until they are deleted, too."""
    going = node_of_rank(simulation, number)
    item = simulation.world.get(NODE, "", going)
    pods = [pod["metadata"]["name"] for pod in simulation.pods("a") if pod["spec"]["nodeName"] == going]
    simulation.world.drop(NODE, "", going)
    simulation.trainers["a"].silent = silent
    for _ in range(60):
        await simulation.tick()
        yield item
    for pod in pods:
        simulation.world.drop(POD, NAMESPACE, pod)
    simulation.trainers["a"].silent = False


@pytest.mark.parametrize("silent", first_fast([False, True]))
@pytest.mark.parametrize("copies", first_fast([0, 1]))
@pytest.mark.parametrize("number", [0, 2])
@pytest.mark.parametrize("stages", [(1, 4), (4, 4)], ids=["elastic", "rigid"])
async def test_the_deletion_of_a_node_object_is_a_notice(stages, number, copies, silent):
    """Pods there run on until Kubernetes deletes them: ranks that train leave first, and no step is lost."""
    simulation = Simulation(nodes={**FOUR_NODES, "n4": ("spot", 1)})
    checkpoint = {"path": "/checkpoints", "inMemoryEverySteps": copies}
    await simulation.run_job("a", stages=stages, totalSteps=1_000_000, checkpoint=checkpoint)
    told = set()
    async for _ in node_deleted(simulation, number, silent=silent):
        status = simulation.status("a")
        told |= {c.message for c in status.conditions if c.type == "NodesStay"}
        plan = simulation.plan("a")
        if copies and plan.directive is Directive.SHRINK:
            simulation.trainers["a"].silent = False  # those that are left have what they need
        # While rank 0 trains, it leads every change of size.
        assert silent or plan.launch != 1 or plan.pods[0] == "a-1-0"
    await simulation.until(lambda: simulation.state("a") == "Running", ticks=60)
    status = simulation.status("a")
    assert any("by deletion of its Node object" in text for text in told)
    assert set(status.restarts) <= {"NodeLeaving", "NodeLost"}
    if not silent:
        assert status.lost_steps == 0
        assert status.launches == (1 if stages == (1, 4) and (number or copies) else 2)


async def test_a_node_that_registers_again_has_been_no_loss():
    """A kubelet that is started again makes its Node object anew: the gang trains on, told that it stays."""
    simulation = Simulation(nodes=FOUR_NODES)
    await simulation.run_job("a", stages=(4, 4), totalSteps=1_000_000)
    item = await anext(node_deleted(simulation, 2))
    assert not simulation.status("a").is_true("NodesStay")
    simulation.world.put(NODE, item)
    await simulation.ticks(60)
    status = simulation.status("a")
    assert (status.launches, dict(status.restarts)) == (1, {})
    assert status.is_true("NodesStay")


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
@pytest.mark.parametrize("point", first_fast(thinned(range(5))))
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
