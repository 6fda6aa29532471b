"""Gangs on one node and on several: two speeds, measured apart, and a restart where that pays."""

import pytest
from ballast_operator.kube.kinds import NODE

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation

ENDLESS = {"totalSteps": 100_000}
SLOW = {"total": 100_000, "pace": 1, "spread": 0.4}
"""On several nodes the trainer does two steps a second; on one, five."""


def stated(rate: float) -> list[dict]:
    return [{"gpuType": "fast", "stages": 4, "stepsPerSecond": rate}]


def spread_gang(job: dict | None = None, **spec) -> Simulation:
    """Four ranks on two nodes of two, while another job holds two GPUs of the node of four."""
    nodes = {"a": ("fast", 4), "b": ("fast", 2), "c": ("fast", 2)}
    simulation = Simulation(nodes=nodes, roundSeconds=30, **spec)
    simulation.add_job("first", stages=(4, 4), totalSteps=60, trainer={"total": 60, "pace": 1})
    known = {"throughput": stated(5.0)} if job is None else job
    simulation.add_job("four", stages=(4, 4), trainer=dict(SLOW), **known, **ENDLESS)
    return simulation


def decision(simulation: Simulation, name: str):
    return simulation.status(name).last_decision


def nodes_of(simulation: Simulation, name: str) -> set[str]:
    allocation = simulation.status(name).allocation
    return set() if allocation is None else set(allocation.nodes)


def speeds(simulation: Simulation, name: str):
    measured = simulation.allocator.decider.measurements.reported_by(("team", name))
    return {
        (str(where), where.total): round(estimate.steps_per_second, 1) for where, estimate in measured.items()
    }


@pytest.mark.slow
async def test_a_spread_gang_moves_to_one_node_that_comes_free_and_both_speeds_are_kept_apart():
    """It says where it is and what would hold it; one restart with a checkpoint; then it stays."""
    simulation = spread_gang()
    await simulation.until(lambda: simulation.state("four") == "Running")
    assert set(simulation.status("four").allocation.nodes) == {"b", "c"}
    for _ in range(10):
        await simulation.tick()
    assert speeds(simulation, "four") == {("fast over 2 nodes", 4): 2.0}
    condition = simulation.status("four").condition("Consolidated")
    assert (condition.reason, condition.is_true) == ("OnMoreNodes", False)
    assert condition.message == "it is on 2 nodes, 1 would hold it: 2 steps/s there, 5 on 1"
    await simulation.until(lambda: nodes_of(simulation, "four") == {"a"}, ticks=400)
    assert "moves from 2 nodes to 1 of pool fast" in decision(simulation, "four").why
    await simulation.until(lambda: simulation.state("four") == "Running")
    for _ in range(100):
        await simulation.tick()
    status = simulation.status("four")
    assert (status.launches, set(status.allocation.nodes)) == (2, {"a"})
    assert simulation.trainers["four"].resumed_from[-1] > 0
    assert speeds(simulation, "four") == {("fast over 2 nodes", 4): 2.0, ("fast", 4): 5.0}
    assert status.condition("Consolidated") is None


@pytest.mark.slow
async def test_a_spread_gang_stays_where_fewer_nodes_are_not_known_to_be_faster():
    """Nothing is stated, and no job of its kind has run on one node: no restart on a guess."""
    simulation = spread_gang({"model": {"name": "other"}})
    await simulation.until(lambda: simulation.state("first") == "Succeeded", ticks=400)
    for _ in range(120):
        await simulation.tick()
    assert simulation.status("four").launches == 1
    assert simulation.status("four").condition("Consolidated").message == "it is on 2 nodes, 1 would hold it"


@pytest.mark.slow
async def test_a_spread_gang_moves_where_another_job_of_its_kind_has_shown_what_one_node_is_worth():
    """Nothing is stated; the first job of the same kind has run on one node."""
    simulation = spread_gang({})
    await simulation.until(lambda: nodes_of(simulation, "four") == {"a"}, ticks=400)
    assert simulation.status("four").launches == 2


@pytest.mark.slow
async def test_a_spread_gang_stays_while_moves_are_used_up():
    """maxMovesPerHour holds for restarts that bring a gang together, too."""
    simulation = spread_gang(moves={"maxMovesPerHour": 0})
    await simulation.until(lambda: simulation.state("first") == "Succeeded", ticks=400)
    for _ in range(120):
        await simulation.tick()
    assert simulation.status("four").launches == 1


@pytest.mark.slow
async def test_a_growth_onto_another_node_that_made_the_gang_slower_is_undone_once_and_for_all():
    """Four ranks on two nodes are slower than two on one; when the first node has room, it grows there."""
    simulation = Simulation(nodes={"a": ("fast", 4)}, roundSeconds=30)
    simulation.add_job("wall", stages=(2, 2), totalSteps=300, trainer={"total": 300, "pace": 1})
    await simulation.until(lambda: simulation.state("wall") == "Running")
    trainer = {"total": 100_000, "pace": 1, "scales": True, "spread": 0.3}
    simulation.add_job("grows", stages=(2, 4), trainer=trainer, **ENDLESS)
    await simulation.until(lambda: simulation.state("grows") == "Running")
    simulation.world.put(NODE, node("b", "fast", 2))
    sizes = []
    for _ in range(250):
        await simulation.tick()
        gpus = simulation.status("grows").allocation.gpus
        sizes += [] if sizes[-1:] == [gpus] else [gpus]
    assert sizes in ([2, 4, 2], [4, 2])
    assert simulation.status("grows").launches == 1
    await simulation.until(lambda: simulation.state("wall") == "Succeeded", ticks=400)
    await simulation.until(lambda: simulation.status("grows").allocation.gpus == 4, ticks=400)
    assert nodes_of(simulation, "grows") == {"a"}
