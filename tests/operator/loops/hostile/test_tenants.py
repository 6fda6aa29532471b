"""A namespace at its limit: who runs, who waits, and what both are told, over a cluster in memory."""

from ballast_operator.kube.kinds import POLICY

from tests.operator.loops.simulated.simulation import Simulation


async def test_a_namespace_never_holds_more_gpus_than_its_limit():
    """Four GPUs are there, two may be held: the second job says so, and runs when the first is done."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)}, tenants={"namespaces": {"team": {"maxGpus": 2}}})
    simulation.add_job("one")
    await simulation.until(lambda: simulation.state("one") == "Running")
    simulation.add_job("two")
    await simulation.until(lambda: bool(simulation.status("two").conditions))
    condition = simulation.status("two").condition("Admitted")
    assert condition.reason == "NamespaceLimit" and "tenants.namespaces.team.maxGpus=2" in condition.message
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.pods("two") == []
    await simulation.until(lambda: simulation.state("two") == "Succeeded")


async def test_a_limit_that_is_lowered_stops_nothing():
    """The gang keeps its GPUs; a limit that is lifted lets the next job in at once."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    simulation.add_job("one")
    await simulation.until(lambda: simulation.state("one") == "Running")
    limits = {"eachNamespace": {"maxGpus": 1}}
    simulation.world.patch(POLICY, "", "default", {"spec": {"tenants": limits}})
    simulation.add_job("two")
    await simulation.until(lambda: bool(simulation.status("two").conditions))
    assert simulation.state("one") == "Running" and simulation.state("two") == "Waiting"
    simulation.world.patch(POLICY, "", "default", {"spec": {"tenants": None}})
    await simulation.until(lambda: simulation.state("two") == "Running")
    assert simulation.status("one").launches == 1


async def test_a_namespace_never_holds_more_gpus_of_a_type_than_its_limit():
    """It gets the other type; where a job wants no other it waits and says so, and is then served."""
    limits = {"namespaces": {"team": {"maxGpusByType": {"fast": 2, "old": 1}}}}
    simulation = Simulation(nodes={"fast-0": ("fast", 4), "slow-0": ("slow", 4)}, tenants=limits)
    simulation.add_job("one", gpuTypes=["fast"])
    await simulation.until(lambda: simulation.state("one") == "Running")
    simulation.add_job("two")
    simulation.add_job("three", gpuTypes=["fast"])
    await simulation.until(lambda: simulation.state("two") == "Running")
    assert {pod["spec"]["nodeName"] for pod in simulation.pods("two")} == {"slow-0"}
    condition = simulation.status("three").condition("Admitted")
    assert condition.reason == "NamespaceLimit" and "may have 2 fast at a time" in condition.message
    assert "tenants.namespaces.team.maxGpusByType" in condition.message
    valid = next(
        c for c in simulation.world.get(POLICY, "", "default")["status"]["conditions"] if c["type"] == "Valid"
    )
    assert "tenants limit old by maxGpusByType" in valid["message"]
    await simulation.until(lambda: simulation.state("three") == "Running")
    assert simulation.state("one") == "Succeeded"
