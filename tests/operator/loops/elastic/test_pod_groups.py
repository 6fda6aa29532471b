"""The PodGroup of a gang, where the API server has them."""

import pytest
from ballast_operator.kube.kinds import NODE, POD_GROUP

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, template

pytestmark = pytest.mark.slow

ENDLESS = {"totalSteps": 100_000}


def least(simulation: Simulation, name: str) -> int:
    found = simulation.world.get(POD_GROUP, NAMESPACE, name)
    return 0 if found is None else found["spec"]["schedulingPolicy"]["gang"]["minCount"]


def groups(simulation: Simulation, name: str) -> list[str]:
    return [(pod["spec"].get("schedulingGroup") or {}).get("podGroupName") for pod in simulation.pods(name)]


async def test_the_pod_group_follows_growth_and_shrink():
    """Each pod names it; its least count is that of the pods that the gang is to have."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=60)
    simulation.reconciler.has_pod_groups = True
    await simulation.run_job("one", stages=(1, 4), grow=True, **ENDLESS)
    assert (groups(simulation, "one"), least(simulation, "one")) == (["one"] * 2, 2)
    simulation.world.put(NODE, node("b", "fast", 2))
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    assert (groups(simulation, "one"), least(simulation, "one")) == (["one"] * 4, 4)
    await simulation.run_job("two", stages=(2, 2), **ENDLESS)
    assert (groups(simulation, "one"), least(simulation, "one")) == (["one"] * 2, 2)


async def test_a_pod_group_has_the_priority_class_of_its_pods():
    """It cannot be changed: a launch of another class has another group, and one that runs keeps its own."""
    simulation = Simulation(nodes={"a": ("fast", 2)}, roundSeconds=60)
    simulation.reconciler.has_pod_groups = True
    urgent = template(priorityClassName="urgent")
    await simulation.run_job("one", stages=(1, 2), grow=True, template=urgent, **ENDLESS)
    assert groups(simulation, "one") == ["one.urgent"] * 2
    simulation.change("one", template={"spec": {"priorityClassName": "low"}})
    await simulation.run_job("two", stages=(1, 1), **ENDLESS)
    assert groups(simulation, "one") == ["one.urgent"]
    found = simulation.world.get(POD_GROUP, NAMESPACE, "one.urgent")["spec"]
    assert found == {"schedulingPolicy": {"gang": {"minCount": 1}}, "priorityClassName": "urgent"}


async def test_a_launch_from_before_stays_without_a_pod_group():
    """Its pods are in none, so that a group would wait for them for ever; the next launch has one."""
    simulation = Simulation(nodes={"a": ("fast", 1)}, roundSeconds=60)
    await simulation.run_job("one", stages=(1, 2), grow=True, **ENDLESS)
    simulation.reconciler.has_pod_groups = True
    simulation.world.put(NODE, node("b", "fast", 1))
    await simulation.until(lambda: simulation.status("one").is_true("Grown"))
    assert (groups(simulation, "one"), least(simulation, "one")) == ([None] * 2, 0)
