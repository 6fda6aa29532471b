"""Nodes that say that they have more GPUs than a node can have."""

import pytest
from ballast_operator.kube.kinds import NODE

from tests.operator.loops.simulated.simulation import Simulation


@pytest.mark.parametrize("quantity", ["1e9", "9223372036854775807", "1025", "1Ki1", "9" * 30])
async def test_gangs_are_started_on_the_others_and_a_job_that_waits_names_them(quantity):
    """Two of them, whose sum no integer of the solver holds: the round is decided all the same."""
    nodes = {"wrong-0": ("fast", 2), "wrong-1": ("fast", 2), "fast-0": ("fast", 2)}
    simulation = Simulation(nodes=nodes)
    for name in ("wrong-0", "wrong-1"):
        simulation.world.patch(NODE, "", name, {"status": {"allocatable": {"nvidia.com/gpu": quantity}}})
    simulation.add_job("one")
    simulation.add_job("two")
    await simulation.until(lambda: simulation.state("one") == "Running")
    assert {pod["spec"]["nodeName"] for pod in simulation.pods("one")} == {"fast-0"}
    assert simulation.pods("two") == []
    if quantity != "1Ki1":  # no number: it counts as none, in the operator's log
        assert (
            f"said to have {quantity} of nvidia.com/gpu"
            in simulation.status("two").condition("Admitted").message
        )
