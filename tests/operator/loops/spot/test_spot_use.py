"""spec.spot of a job: which machines it may run on, under every policy, and why it waits."""

from typing import Any

import pytest
from ballast_operator.api.conditions import JobCondition, JobReason
from ballast_operator.kube.kinds import JOB, POLICY

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

SPEEDS = [{"gpuType": "v100", "stages": 2, "stepsPerSecond": 1.0}]


def cluster(policy: str = "min-cost", nodes: dict[str, Any] | None = None) -> Simulation:
    """Pools ``sure`` and ``spot`` of one GPU type; spot costs a third."""
    simulation = Simulation(nodes=nodes or {"a": ("sure", 2), "b": ("spot", 2)}, roundSeconds=10)
    item = simulation.world.get(POLICY, "", "default")
    item["spec"]["objective"] = {"policy": policy}
    for pool in item["spec"]["nodePools"]:
        spot = pool["name"] == "spot"
        price, kind = (1.0, "spot") if spot else (3.0, "onDemand")
        pool |= {"gpuType": "v100", "capacityType": kind, "pricePerGpuHour": price}
    simulation.world.put(POLICY, item)
    return simulation


def add(simulation: Simulation, name: str, **spec: Any) -> None:
    simulation.add_job(
        name, **{"trainer": {"total": 100_000}, "totalSteps": 100_000, "throughput": SPEEDS, **spec}
    )


def pool_of(simulation: Simulation, name: str) -> str:
    allocation = simulation.status(name).allocation
    return "" if allocation is None else allocation.pool


@pytest.mark.parametrize("policy", ["min-cost", "max-min-fairness", "fifo", "max-throughput"])
@pytest.mark.parametrize(("spot", "pool"), [("Forbid", "sure"), ("Require", "spot")])
async def test_the_job_runs_on_the_machines_that_it_may_use(policy: str, spot: str, pool: str):
    """Whatever they cost, and whatever the policy reads; explain names what was left out."""
    simulation = cluster(policy)
    add(simulation, "one", spot=spot)
    await simulation.until(lambda: simulation.state("one") == "Running")
    assert pool_of(simulation, "one") == pool
    other = "spot" if pool == "sure" else "sure"
    assert f"spec.spot is {spot}: not offered {other}" in simulation.status("one").last_decision.why


@pytest.mark.parametrize("policy", ["min-cost", "max-min-fairness", "fifo"])
async def test_a_job_that_may_use_both_leaves_the_place_that_the_other_needs(policy: str):
    """Both run, each whole, in whatever order they came."""
    for order in (("picky", "any"), ("any", "picky")):
        simulation = cluster(policy)
        for name in order:
            add(simulation, name, **({"spot": "Forbid"} if name == "picky" else {}))
        await simulation.until(
            lambda simulation=simulation: (
                [pool_of(simulation, name) for name in ("picky", "any")] == ["sure", "spot"]
            )
        )


@pytest.mark.parametrize(("spot", "pool"), [("Forbid", "spot"), ("Require", "sure")])
async def test_without_such_a_pool_the_job_waits_and_says_why(spot: str, pool: str):
    """It is placed once the field allows it."""
    simulation = cluster(nodes={"a": (pool, 2)})
    add(simulation, "one", spot=spot)
    await simulation.tick()
    found = simulation.status("one").condition(JobCondition.ADMITTED)
    assert (found.is_true, found.reason) == (False, JobReason.NO_MATCHING_CAPACITY_TYPE)
    assert f"spec.spot is {spot}" in found.message
    assert f": {pool}. To fix: set spec.spot to Allow" in found.message
    simulation.world.patch(JOB, NAMESPACE, "one", {"spec": {"spot": "Allow"}})
    await simulation.until(lambda: simulation.state("one") == "Running")


async def test_a_job_waits_for_its_machines_while_others_are_free():
    """A gang that is too large for the pools that it may use is refused with their sizes."""
    simulation = cluster(nodes={"a": ("sure", 1), "b": ("spot", 4)})
    add(simulation, "one", spot="Forbid")
    await simulation.tick()
    found = simulation.status("one").condition(JobCondition.ADMITTED)
    assert (found.is_true, found.reason) == (False, JobReason.EXCEEDS_CAPACITY)


@pytest.mark.slow
async def test_a_running_job_stays_until_its_next_launch():
    """As a change of the template does: nothing is stopped for it."""
    simulation = cluster()
    add(simulation, "one")
    await simulation.until(lambda: simulation.state("one") == "Running")
    assert pool_of(simulation, "one") == "spot"
    simulation.world.patch(JOB, NAMESPACE, "one", {"spec": {"spot": "Forbid"}})
    for _ in range(30):
        await simulation.tick()
    assert pool_of(simulation, "one") == "spot"
    simulation.world.patch(JOB, NAMESPACE, "one", {"spec": {"suspend": True}})
    await simulation.until(lambda: simulation.status("one").allocation is None)
    simulation.world.patch(JOB, NAMESPACE, "one", {"spec": {"suspend": False}})
    await simulation.until(lambda: simulation.state("one") == "Running")
    assert pool_of(simulation, "one") == "sure"
