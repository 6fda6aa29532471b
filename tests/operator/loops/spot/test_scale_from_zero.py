"""Pools whose nodes do not exist yet: gangs are placed there, and an autoscaler makes nodes for the pods."""

import pytest
from ballast_operator.api.conditions import PolicyReason
from ballast_operator.kube.kinds import NODE
from ballast_operator.views.clock import show
from ballast_operator.views.node_constraints import read_requirements

from tests.operator.loops.simulated.autoscaler import Autoscaler
from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation, throughput

SPOT_IS_FASTER = throughput(spot=9.0, slow=1.0)


def cluster(nodes=None, *, most=2, gpus=2, seconds=60.0, pools=("spot",), **autoscaler):
    spot = {"maxNodes": most, "gpusPerNode": gpus, "startSeconds": seconds, "pricePerGpuHour": 1.0}
    simulation = Simulation(nodes=nodes or {}, pools={pool: {} for pool in pools} | {"spot": spot})
    return simulation, Autoscaler(simulation, gpus=gpus, **autoscaler)


async def test_a_gang_starts_on_nodes_that_did_not_exist_when_it_was_made():
    """Its pods wait, unpinned, with the pool's labels; once they run the status has the real nodes.

    Figures count none that is still to come: nobody is told that its GPUs are idle.
    """
    simulation, autoscaler = cluster()

    def gpus(*figures: str) -> set[float | None]:
        labels, registry = {"pool": "spot", "gpu_type": "spot"}, simulation.metrics.registry
        return {registry.get_sample_value(f"ballast_gpus_{figure}", labels) for figure in figures}

    simulation.add_job("a", stages=(4, 4), totalSteps=100_000)
    await autoscaler.until(lambda: simulation.status("a").allocation is not None)
    await simulation.tick(decides=True)
    assert gpus("capacity", "allocated") == {0.0}
    assert simulation.policy_condition("Valid")["reason"] == PolicyReason.VALID
    assert set(simulation.status("a").allocation.nodes) == {"spot/new-0", "spot/new-1"}
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert set(simulation.status("a").allocation.nodes) == {"new-0", "new-1"}
    assert (simulation.status("a").launches, simulation.status("a").restarts) == (1, {})
    assert autoscaler.made == 2
    await simulation.tick(decides=True)
    assert gpus("capacity", "allocated") == {4.0}
    waited = simulation.status("a").pool_costs
    assert sum(entry.gpu_seconds for entry in waited) < 4 * 10  # nothing is paid for nodes that do not exist


@pytest.mark.slow
async def test_after_the_job_nothing_of_ours_keeps_the_nodes():
    """Its pods have ended: an autoscaler may remove the nodes, and the next job makes them come again."""
    simulation, autoscaler = cluster()
    simulation.add_job("a", stages=(4, 4))
    await autoscaler.until(lambda: simulation.state("a") == "Succeeded")
    assert simulation.pods("a") == []
    for number in range(2):
        simulation.world.drop(NODE, "", f"new-{number}")
    simulation.add_job("b", stages=(4, 4))
    await autoscaler.until(lambda: simulation.state("b") == "Succeeded")
    assert autoscaler.made == 4


async def test_nodes_that_exist_come_first():
    """A node costs money and minutes: none is asked for while there is room."""
    simulation, autoscaler = cluster({"old": ("spot", 2)}, most=3)
    simulation.add_job("a")
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert simulation.status("a").allocation.nodes == ("old", "old")
    assert autoscaler.made == 0


@pytest.mark.slow
@pytest.mark.parametrize("karpenter", [True, False])
async def test_a_second_gang_gets_nodes_of_its_own_beside_those_of_the_first(karpenter):
    """It is kept off them by name, but not where Karpenter makes them: that passes over such pods."""
    simulation, autoscaler = cluster(karpenter=karpenter)
    old = node("old", "spot", 2)
    old["metadata"]["creationTimestamp"] = show(simulation.now)
    if karpenter:
        old["metadata"]["labels"]["karpenter.sh/nodepool"] = "spot"
    simulation.world.put(NODE, old)
    simulation.add_job("b", totalSteps=100_000)
    await autoscaler.until(lambda: simulation.state("b") == "Running")
    simulation.add_job("a", totalSteps=100_000)
    await autoscaler.until(lambda: simulation.pods("a"))
    allowed = {read_requirements(pod).allow("old", {"pool": "spot"}) for pod in simulation.pods("a")}
    assert allowed == {karpenter}
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert simulation.status("a").allocation.nodes == ("new-0", "new-0")


@pytest.mark.slow
async def test_pods_that_join_are_kept_off_nodes_that_came_for_others_since_the_launch():
    """A growth asks for new nodes later than its gang did: those between belong to others as well."""
    simulation, autoscaler = cluster({"old": ("spot", 2)}, most=1)
    simulation.add_job("a", stages=(1, 4), totalSteps=100_000, trainer={"scales": True})
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    late = node("late", "spot", 2)
    late["metadata"]["creationTimestamp"] = show(simulation.now)
    simulation.world.put(NODE, late)
    simulation.add_job("b", totalSteps=100_000)
    await autoscaler.until(lambda: simulation.state("b") == "Running")
    assert simulation.nodes("b") == {"late"}
    with simulation.changed_pools() as pools:
        pools["spot"]["maxNodes"] = 3
    await autoscaler.until(lambda: len(simulation.pods("a")) == 4)
    joining = [pod for pod in simulation.pods("a") if not pod["spec"].get("nodeName")]
    assert [read_requirements(pod).allow("late", {"pool": "spot"}) for pod in joining] == [False] * 2


@pytest.mark.slow
async def test_two_gangs_whose_pods_are_bound_in_turn_both_run():
    """Each has a pod on each node then: the nodes that come suffice for all, and the status has the truth."""
    simulation, autoscaler = cluster(interleaves=True)
    for name in "ab":
        simulation.add_job(name, totalSteps=100_000)
    await autoscaler.until(lambda: {simulation.state(name) for name in "ab"} == {"Running"})
    for name in "ab":
        status = simulation.status(name)
        assert sorted(status.allocation.nodes) == ["new-0", "new-1"]
        assert (status.launches, status.restarts) == (1, {})


@pytest.mark.slow
async def test_two_gangs_that_hold_half_of_a_node_each_do_not_wait_for_each_other_without_end():
    """Only one of two nodes comes: both are taken back in time, and then one has the node for itself."""
    simulation, autoscaler = cluster(interleaves=True, stock=1, seconds=60)
    for name in "ab":
        simulation.add_job(name, totalSteps=100_000)
    bound = lambda name: [pod for pod in simulation.pods(name) if pod["spec"].get("nodeName")]  # noqa: E731
    await autoscaler.until(lambda: len(bound("a")) == len(bound("b")) == 1)
    running = lambda: [name for name in "ab" if simulation.state(name) == "Running"]  # noqa: E731
    await autoscaler.until(lambda: len(running()) == 1, ticks=400)
    (one,) = running()
    assert simulation.status(one).allocation.nodes == ("new-0", "new-0")
    assert set(simulation.status(one).restarts) == {"NotBound"}


@pytest.mark.slow
async def test_a_pool_never_has_more_nodes_than_it_may():
    """Three jobs of two GPUs, two nodes at most: the third waits, and says so."""
    simulation, autoscaler = cluster()
    for name in "abc":
        simulation.add_job(name, totalSteps=100_000)
    running = lambda: sorted(simulation.state(name) for name in "abc")  # noqa: E731
    await autoscaler.until(lambda: running() == ["Running", "Running", "Waiting"])
    for _ in range(20):
        await autoscaler.tick()
    assert autoscaler.made == 2
    assert running() == ["Running", "Running", "Waiting"]


@pytest.mark.slow
async def test_nodes_that_do_not_come_are_given_up_for_the_next_choice():
    """The cloud has none: after the time that a node takes the gang is taken back, and runs elsewhere."""
    simulation, autoscaler = cluster({"slow-0": ("slow", 2)}, pools=("spot", "slow"), stock=0, seconds=60)
    simulation.add_job("a", throughput=SPOT_IS_FASTER, totalSteps=100_000)
    simulation.add_job("filler", gpuTypes=["slow"], totalSteps=60)
    await autoscaler.until(lambda: simulation.pool("a") == "spot")
    await autoscaler.until(lambda: "NotBound" in simulation.status("a").restarts, ticks=200)
    await autoscaler.until(lambda: not simulation.pods("a"), ticks=10)
    await autoscaler.until(lambda: simulation.state("a") == "Running", ticks=300)
    assert simulation.status("a").allocation.nodes == ("slow-0", "slow-0")
    assert simulation.status("a").restarts == {"NotBound": 1}


async def test_a_gang_does_not_wait_for_nodes_that_its_pool_may_not_have_any_more():
    """``maxNodes`` is taken back, and the job runs elsewhere, long before the time that a node takes."""
    simulation, autoscaler = cluster({"slow-0": ("slow", 2)}, pools=("spot", "slow"), stock=0, seconds=80_000)
    simulation.add_job("a", throughput=SPOT_IS_FASTER, totalSteps=100_000)
    await autoscaler.until(lambda: bool(simulation.pods("a")) and simulation.pool("a") == "spot")
    with simulation.changed_pools() as pools:
        del pools["spot"]["maxNodes"], pools["spot"]["gpusPerNode"]
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert simulation.pool("a") == "slow"


@pytest.mark.slow
@pytest.mark.parametrize("stages", [(1, 4), (4, 4)])
async def test_gpus_are_asked_for_at_the_notice_and_not_after_the_loss(stages):
    """The node that goes still stands when the autoscaler sees pods that wait for another one."""
    simulation, autoscaler = cluster(seconds=60)
    trainer = {"scales": True}
    simulation.add_job("a", stages=stages, totalSteps=100_000, trainer=trainer)
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    await autoscaler.until(lambda: len(simulation.pods("a")) == 4, ticks=300)
    going = simulation.pods("a")[-1]["spec"]["nodeName"]
    taints = [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]
    simulation.world.patch(NODE, "", going, {"spec": {"taints": taints}})
    before = autoscaler.made
    await autoscaler.until(lambda: autoscaler.made > before, ticks=60)
    assert simulation.world.get(NODE, "", going) is not None
    await autoscaler.until(
        lambda: (
            going not in {pod["spec"].get("nodeName") for pod in simulation.pods("a")}
            and len(simulation.pods("a")) == 4
            and simulation.state("a") == "Running"
            and not simulation.status("a").allocation.joining
        ),
        ticks=200,
    )
    assert simulation.status("a").lost_steps == 0
    assert simulation.status("a").launches == (1 if stages == (1, 4) else 2)


@pytest.mark.slow
async def test_a_node_that_has_come_for_one_gang_is_not_given_to_another():
    """Between the node and the binding of its pods there is time for a decision."""
    simulation, autoscaler = cluster(most=1)
    simulation.add_job("a", totalSteps=100_000)
    await autoscaler.until(lambda: simulation.pods("a"))
    made = node("new-0", "spot", 2)
    made["metadata"]["creationTimestamp"] = show(simulation.now)
    simulation.world.put(NODE, made)
    simulation.add_job("b", totalSteps=100_000)
    for _ in range(5):
        await simulation.tick()  # kube-scheduler is slow
    assert simulation.state("b") == "Waiting"
    autoscaler.made = 1
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert simulation.status("a").allocation.nodes == ("new-0", "new-0")


@pytest.mark.slow
async def test_an_operator_that_dies_while_nodes_come_makes_nothing_twice():
    """Everything is in the status: the next one waits for the same pods."""
    simulation, autoscaler = cluster()
    simulation.add_job("a", stages=(4, 4), totalSteps=100_000)
    await autoscaler.until(lambda: simulation.pods("a"))
    for _ in range(12):
        simulation.start_operator()
        for _ in range(4):
            await autoscaler.tick()
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert (simulation.status("a").launches, autoscaler.made) == (1, 2)
