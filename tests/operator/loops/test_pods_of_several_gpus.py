"""Jobs whose pods have several GPUs: launched, repacked and grown by whole pods, refused where none fits."""

from ballast_operator.kube.kinds import NODE, POD

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

PAIRS = {"parallelism": {"gpusPerPod": 2}}
ENDLESS = {"totalSteps": 100_000}


def gpus(pod) -> str:
    return pod["spec"]["containers"][0]["resources"]["limits"]["nvidia.com/gpu"]


async def test_two_pods_of_two_repack_to_one_and_its_gpus_are_free_for_another_job():
    """Four ranks in two pods, named by pod and local rank; one pod leaves, its two GPUs are used again."""
    simulation = Simulation(nodes={"a": ("fast", 2), "b": ("fast", 2)}, roundSeconds=600)
    trainer = {"shrink_at": 50}
    await simulation.run_job("wide", stages=(2, 4), trainer=trainer, **ENDLESS, **PAIRS)
    allocation = simulation.status("wide").allocation
    assert (allocation.gpus, allocation.gpus_per_pod) == (4, 2)
    assert (allocation.pods, allocation.nodes) == (("wide-1-0", "wide-1-1"), ("a", "b"))
    assert [gpus(pod) for pod in simulation.pods("wide")] == ["2", "2"]
    assert [rank.process for rank in simulation.plan("wide").ranks] == [
        "wide-1-0",
        "wide-1-0/1",
        "wide-1-1",
        "wide-1-1/1",
    ]
    await simulation.run_job("next", stages=(2, 2), **ENDLESS, **PAIRS)
    status = simulation.status("wide")
    assert (status.allocation.gpus, status.allocation.pods) == (2, ("wide-1-0",))
    (repacked,) = status.repacks
    assert (repacked.released_pods, repacked.gpus) == (("wide-1-1",), 2)
    assert [survivor.name for survivor in repacked.survivors] == ["wide-1-0"]
    assert (status.launches, dict(status.restarts)) == (1, {})
    assert [rank.process for rank in simulation.plan("wide").ranks] == ["wide-1-0", "wide-1-0/1"]


async def test_a_gang_grows_by_whole_pods():
    """A node with three GPUs comes: one pod of two joins, the third GPU stays free."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=600)
    await simulation.run_job("one", stages=(1, 6), grow=True, **ENDLESS, **PAIRS)
    simulation.world.put(NODE, node("b", "fast", 3))
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    status = simulation.status("one")
    assert (status.allocation.pods, status.allocation.gpus) == (("one-1-0", "one-1-1"), 4)
    assert "one-1-1 joined; 4 ranks train" in status.condition("Grown").message
    assert len(simulation.plan("one").ranks) == 4


async def test_a_pod_that_no_node_can_hold_is_refused_with_the_reason():
    """Four GPUs are there, but no two pods of three; a job of pods of two is placed beside it."""
    simulation = Simulation(nodes={"a": ("fast", 2), "b": ("fast", 2)}, roundSeconds=600)
    threes = {"parallelism": {"gpusPerPod": 3}}
    simulation.add_job("wide", stages=(3, 3), **ENDLESS, **threes)
    await simulation.run_job("fits", stages=(2, 2), **ENDLESS, **PAIRS)
    await simulation.refused(
        "wide",
        "ExceedsCapacity",
        "needs 3 GPUs of one pool in pods of gpusPerPod=3, each on one node",
        "have room for: fast 0",
    )


async def test_a_gang_is_placed_when_a_node_has_room_for_its_pod():
    """Two jobs of one GPU are on different nodes, so that a pod of two waits until one of them has ended."""
    simulation = Simulation(nodes={"a": ("fast", 1), "b": ("fast", 1)}, roundSeconds=600)
    simulation.add_job("short", stages=(1, 1), totalSteps=100)
    simulation.add_job("long", stages=(1, 1), **ENDLESS)
    await simulation.until(lambda: {simulation.state(n) for n in ("short", "long")} == {"Running"})
    for name in ("a", "b"):
        simulation.world.patch(NODE, "", name, {"status": {"allocatable": {"nvidia.com/gpu": "2"}}})
    simulation.add_job("pair", stages=(2, 2), **ENDLESS, **PAIRS)
    await simulation.tick()
    await simulation.tick()
    waiting = simulation.condition("pair", "Admitted").message
    assert "in 1 pod of 2: 2 of 4 fast free in pool fast, room for 0 pods" in waiting
    await simulation.running("pair")
    assert simulation.state("short") == "Succeeded"
    assert [gpus(pod) for pod in simulation.pods("pair")] == ["2"]


async def test_a_changed_number_of_gpus_per_pod_holds_from_the_next_launch():
    """The gang that runs keeps its pods; the next launch has the new ones."""
    simulation = Simulation(nodes={"a": ("fast", 4)}, roundSeconds=60)
    await simulation.run_job("one", stages=(4, 4), **ENDLESS, **PAIRS)
    simulation.change("one", parallelism={"gpusPerPod": 4})
    await simulation.ticks(5)
    assert len(simulation.pods("one")) == 2
    simulation.world.drop(POD, NAMESPACE, "one-1-1")
    await simulation.until(lambda: simulation.status("one").launches == 2, seconds=5.0)
    await simulation.running("one")
    allocation = simulation.status("one").allocation
    assert (allocation.pods, allocation.gpus, allocation.gpus_per_pod) == (("one-2-0",), 4, 4)
    assert [gpus(pod) for pod in simulation.pods("one")] == ["4"]
