"""Nodes are lost, deleted, tainted, cordoned, or carry other labels, for a while."""

from ballast_operator.kube.kinds import NODE

from tests.chaos.cluster import NODES, ChaosSimulation
from tests.chaos.kinds.registry import kind, until
from tests.operator.loops.simulated.machines import node


def _node(number: int) -> str:
    return sorted(NODES)[number % len(NODES)]


def _change_node(simulation: ChaosSimulation, number: int, longest: int, patch: dict) -> None:
    name = _node(number)
    if simulation.world.get(NODE, "", name) is not None:
        simulation.world.patch(NODE, "", name, patch)
        simulation.trouble.nodes[name] = until(simulation, number // 3, longest)


NOT_READY = {"status": {"conditions": [{"type": "Ready", "status": "Unknown"}]}}

TAINT = {"key": "maintenance", "effect": "NoSchedule"}


@kind("node lost")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 30, NOT_READY)


@kind("node flaps")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 2, NOT_READY)


@kind("node object deleted")
def _(simulation: ChaosSimulation, number: int) -> None:
    name = _node(number)
    simulation.world.drop(NODE, "", name)  # its pods run on
    simulation.trouble.nodes[name] = until(simulation, number // 3, 60)


@kind("node tainted")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 20, {"spec": {"taints": [TAINT]}})


@kind("node cordoned")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 20, {"spec": {"unschedulable": True}})


@kind("node relabelled")
def _(simulation: ChaosSimulation, number: int) -> None:
    _change_node(simulation, number, 20, {"metadata": {"labels": {"pool": "another"}}})


def restore_nodes(simulation: ChaosSimulation, *, all_of_them: bool = False) -> None:
    """Nodes whose time is over are as they were."""
    for name, end in list(simulation.trouble.nodes.items()):
        if all_of_them or simulation.number >= end:
            del simulation.trouble.nodes[name]
            simulation.world.put(NODE, node(name, *NODES[name]))
