"""Gangs on one node and on several: two speeds, measured apart, and a restart where that pays."""

import pytest
from ballast_operator.kube.kinds import NODE

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation, throughput

pytestmark = pytest.mark.slow

ENDLESS = {"totalSteps": 100_000}
SLOW = {"pace": 1, "spread": 0.4}
"""On several nodes the trainer does two steps a second; on one, five."""


def spread_gang(job: dict | None = None, **spec) -> Simulation:
    """Four ranks on two nodes of two, while another job holds two GPUs of the node of four."""
    nodes = {"a": ("fast", 4), "b": ("fast", 2), "c": ("fast", 2)}
    simulation = Simulation(nodes=nodes, roundSeconds=30, **spec)
    simulation.add_job("first", stages=(4, 4), totalSteps=60, trainer={"pace": 1})
    known = {"throughput": throughput(4, fast=5.0)} if job is None else job
    simulation.add_job("four", stages=(4, 4), trainer=dict(SLOW), **known, **ENDLESS)
    return simulation


def decision(simulation: Simulation, name: str):
    return simulation.status(name).last_decision


def speeds(simulation: Simulation, name: str):
    measured = simulation.allocator.decider.measurements.reported_by(("team", name))
    return {
        (str(where), where.total): round(estimate.steps_per_second, 1) for where, estimate in measured.items()
    }


async def test_a_spread_gang_moves_to_one_node_that_comes_free_and_both_speeds_are_kept_apart():
    """It says where it is and what would hold it; one restart with a checkpoint; then it stays."""
    simulation = spread_gang()
    await simulation.running("four")
    assert set(simulation.status("four").allocation.nodes) == {"b", "c"}
    await simulation.ticks(10)
    assert speeds(simulation, "four") == {("fast over 2 nodes", 4): 2.0}
    condition = simulation.condition("four", "Consolidated")
    assert (condition.reason, condition.is_true) == ("OnMoreNodes", False)
    assert condition.message == "it is on 2 nodes, 1 would hold it: 2 steps/s there, 5 on 1"
    await simulation.until(lambda: simulation.nodes("four") == {"a"}, ticks=400)
    assert "moves from 2 nodes to 1 of pool fast" in decision(simulation, "four").why
    await simulation.running("four")
    await simulation.ticks(100)
    status = simulation.status("four")
    assert (status.launches, set(status.allocation.nodes)) == (2, {"a"})
    assert simulation.trainers["four"].resumed_from[-1] > 0
    assert speeds(simulation, "four") == {("fast over 2 nodes", 4): 2.0, ("fast", 4): 5.0}
    assert status.condition("Consolidated") is None


async def test_a_spread_gang_moves_where_another_job_of_its_kind_has_shown_what_one_node_is_worth():
    """Nothing is stated; the first job of the same kind has run on one node."""
    simulation = spread_gang({})
    await simulation.until(lambda: simulation.nodes("four") == {"a"}, ticks=400)
    assert simulation.status("four").launches == 2


async def test_a_spread_gang_compares_with_one_node_as_its_job_states():
    """A fifth of the speed over two nodes: measured at two steps a second there, it is given ten on one."""
    known = throughput(4, fast=5.0)
    known[0]["spread"] = [{"nodes": 2, "stepsPerSecond": 1.0}]
    simulation = spread_gang({"throughput": known})
    await simulation.until(lambda: simulation.condition("four", "Consolidated") is not None, ticks=100)
    message = simulation.condition("four", "Consolidated").message
    assert message == "it is on 2 nodes, 1 would hold it: 2 steps/s there, 10 on 1"


async def test_a_growth_onto_another_node_that_made_the_gang_slower_is_undone_once_and_for_all():
    """Four ranks on two nodes are slower than two on one; when the first node has room, it grows there."""
    simulation = Simulation(nodes={"a": ("fast", 4)}, roundSeconds=30)
    await simulation.run_job("wall", stages=(2, 2), totalSteps=300, trainer={"pace": 1})
    trainer = {"pace": 1, "scales": True, "spread": 0.3}
    await simulation.run_job("grows", stages=(2, 4), trainer=trainer, **ENDLESS)
    simulation.world.put(NODE, node("b", "fast", 2))
    sizes = []
    for _ in range(250):
        await simulation.tick()
        gpus = simulation.status("grows").allocation.gpus
        sizes += [] if sizes[-1:] == [gpus] else [gpus]
    assert sizes == [4, 2]
    assert simulation.status("grows").launches == 1
    await simulation.until(lambda: simulation.state("wall") == "Succeeded", ticks=400)
    await simulation.until(lambda: simulation.status("grows").allocation.gpus == 4, ticks=400)
    assert simulation.nodes("grows") == {"a"}
