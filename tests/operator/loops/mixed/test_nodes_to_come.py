"""A gang in two pools whose second part is on nodes that an autoscaler makes."""

from ballast_operator.kube.kinds import NODE

from tests.operator.loops.mixed.two_pools import add_wide, layers_of, parts_of, plan_of, two_pools
from tests.operator.loops.simulated.autoscaler import Autoscaler

TO_COME = {"maxNodes": 1, "gpusPerNode": 2, "startSeconds": 60.0}


def scaled_from_zero(**autoscaler):
    """A fast node of two GPUs, and a slow pool that has none yet and may have one of two."""
    simulation = two_pools(pools={"slow": TO_COME})
    simulation.world.drop(NODE, "", "slow-0")
    return simulation, Autoscaler(simulation, pool="slow", **autoscaler)


async def test_a_part_waits_for_the_nodes_of_its_own_pool():
    """Its pods ask for the pool's labels, those of the other part are on their node; then it is a gang in
    two pools as any other, and the status has the real nodes.
    """
    simulation, autoscaler = scaled_from_zero()
    add_wide(simulation)
    await autoscaler.until(lambda: len(simulation.pods("wide")) == 4)
    nodes = simulation.status("wide").allocation.nodes
    assert sorted(nodes) == ["fast-0", "fast-0", "slow/new-0", "slow/new-0"]
    waiting = [pod for pod in simulation.pods("wide") if pod["spec"].get("nodeSelector")]
    assert [pod["spec"]["nodeSelector"] for pod in waiting] == [{"pool": "slow"}] * 2
    await autoscaler.until(lambda: simulation.state("wide") == "Running")
    assert parts_of(simulation) == ["2 x fast of pool fast", "2 x slow of pool slow"]
    assert sorted(simulation.status("wide").allocation.nodes) == ["fast-0", "fast-0", "new-0", "new-0"]
    assert layers_of(simulation) == [5, 5, 1, 1]
    assert [rank.gpu_type for rank in plan_of(simulation).ranks] == ["fast", "fast", "slow", "slow"]
    assert (simulation.status("wide").launches, autoscaler.made) == (1, 1)


async def test_only_nodes_that_exist_are_paid_while_the_others_are_awaited():
    """The two fast GPUs are held and cost; the slow ones do not exist."""
    simulation, autoscaler = scaled_from_zero(stock=0)
    add_wide(simulation)
    await autoscaler.until(lambda: simulation.status("wide").allocation is not None)
    allocation = simulation.status("wide").allocation
    assert [(part.pool, part.gpus) for part in allocation.on_nodes_by_pool] == [("fast", 2)]
    assert allocation.pools_to_grow == ("slow",)


async def test_nodes_that_do_not_come_are_given_up_and_tried_again():
    """The cloud has none: the gang is taken back in time, and starts once one is to be had."""
    simulation, autoscaler = scaled_from_zero(stock=0)
    add_wide(simulation)
    await autoscaler.until(lambda: "NotBound" in simulation.status("wide").restarts, ticks=300)
    autoscaler.stock = 1
    await autoscaler.until(lambda: simulation.state("wide") == "Running", ticks=300)
    assert parts_of(simulation) == ["2 x fast of pool fast", "2 x slow of pool slow"]
