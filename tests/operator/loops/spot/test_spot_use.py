"""spec.spot of a job: which machines it may run on, by each policy, beside a deadline, and why it waits."""

from typing import Any

import pytest
from ballast_operator.api.conditions import JobReason

from tests.operator.loops.simulated.simulation import START, Simulation, at, throughput
from tests.support.examples import first_daily


def cluster(policy: str = "min-cost", nodes: dict[str, Any] | None = None) -> Simulation:
    """Pools ``sure`` and ``spot`` of one GPU type; spot costs a third."""
    nodes = nodes or {"a": ("sure", 2), "b": ("spot", 2)}
    pools = {
        "sure": {"gpuType": "v100", "capacityType": "onDemand", "pricePerGpuHour": 3.0},
        "spot": {"gpuType": "v100", "capacityType": "spot", "pricePerGpuHour": 1.0},
    }
    pools = {name: pools[name] for name, _ in nodes.values()}
    return Simulation(nodes=nodes, pools=pools, roundSeconds=10, objective={"policy": policy})


def add(simulation: Simulation, name: str, **spec: Any) -> None:
    simulation.add_job(name, **{"totalSteps": 100_000, "throughput": throughput(v100=1.0), **spec})


@pytest.mark.parametrize("policy", first_daily(["min-cost", "max-min-fairness", "fifo"]))
@pytest.mark.parametrize(("spot", "pool"), [("Forbid", "sure"), ("Require", "spot")])
async def test_the_job_runs_on_the_machines_that_it_may_use(policy: str, spot: str, pool: str):
    """Whatever they cost, and whatever the policy reads; explain names what was left out."""
    simulation = cluster(policy)
    add(simulation, "one", spot=spot)
    await simulation.running("one")
    assert simulation.pool("one") == pool
    other = "spot" if pool == "sure" else "sure"
    assert f"spec.spot is {spot}: not offered {other}" in simulation.status("one").last_decision.why


@pytest.mark.parametrize("policy", first_daily(["min-cost", "max-min-fairness", "fifo"]))
async def test_a_job_that_may_use_both_leaves_the_place_that_the_other_needs(policy: str):
    """Both run, each whole, in whatever order they came."""
    for order in (("picky", "any"), ("any", "picky")):
        simulation = cluster(policy)
        for name in order:
            add(simulation, name, **({"spot": "Forbid"} if name == "picky" else {}))
        await simulation.until(
            lambda simulation=simulation: (
                [simulation.pool(name) for name in ("picky", "any")] == ["sure", "spot"]
            )
        )


@pytest.mark.parametrize(("spot", "pool"), [("Forbid", "spot"), ("Require", "sure")])
async def test_without_such_a_pool_the_job_waits_and_says_why(spot: str, pool: str):
    """It is placed once the field allows it."""
    simulation = cluster(nodes={"a": (pool, 2)})
    add(simulation, "one", spot=spot)
    await simulation.tick()
    await simulation.refused(
        "one",
        JobReason.NO_MATCHING_CAPACITY_TYPE,
        f"spec.spot is {spot}",
        f": {pool}. To fix: set spec.spot to Allow",
    )
    simulation.change("one", spot="Allow")
    await simulation.running("one")


async def test_a_job_waits_for_its_machines_while_others_are_free():
    """A gang that is too large for the pools that it may use is refused with their sizes."""
    simulation = cluster(nodes={"a": ("sure", 1), "b": ("spot", 4)})
    add(simulation, "one", spot="Forbid")
    await simulation.tick()
    await simulation.refused("one", JobReason.EXCEEDS_CAPACITY)


@pytest.mark.slow
async def test_a_running_job_stays_until_its_next_launch():
    """As a change of the template does: nothing is stopped for it."""
    simulation = cluster()
    add(simulation, "one")
    await simulation.running("one")
    assert simulation.pool("one") == "spot"
    simulation.change("one", spot="Forbid")
    await simulation.ticks(30)
    assert simulation.pool("one") == "spot"
    await simulation.relaunched("one")
    assert simulation.pool("one") == "sure"


@pytest.mark.slow
async def test_a_job_waits_for_spot_machines_until_only_on_demand_ones_are_sure():
    """The spot node is too small for its gang; those on demand idle until the last moment."""
    simulation = cluster("min-cost-slo", nodes={"a": ("sure", 2), "b": ("spot", 1)})
    add(simulation, "one", totalSteps=1000, trainer={"silent": True}, deadline=at(2000))
    await simulation.tick(seconds=10)
    assert simulation.pool("one") == ""
    assert "waits for spot machines" in simulation.status("one").last_decision.why
    await simulation.until(lambda: simulation.pool("one") == "sure", seconds=10)
    waited = (simulation.now - START).total_seconds()
    assert 500 < waited < 1000 - 180  # a start takes three minutes


async def test_a_job_goes_on_demand_at_the_last_moment_and_stays():
    """What is left just fits before the deadline: spot machines are not sure enough, cheap as they are."""
    simulation = cluster("min-cost-slo")
    add(simulation, "one", totalSteps=3000, trainer={"silent": True}, deadline=at(3300))
    await simulation.until(lambda: simulation.pool("one") == "sure")
    await simulation.ticks(3, seconds=10)
    assert simulation.pool("one") == "sure"
