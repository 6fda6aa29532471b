"""Jobs with a deadline beside spot machines, under ``min-cost-slo``."""

import datetime

from tests.operator.loops.simulated.simulation import START, Simulation
from tests.operator.loops.spot.test_spot_use import add, cluster, pool_of

ROUND = 10.0


def deadline(seconds: float) -> str:
    return (START + datetime.timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")


def job(simulation: Simulation, name: str, steps: int, seconds: float) -> None:
    """One step a second on either pool; start-ups are taken for three minutes."""
    add(
        simulation,
        name,
        totalSteps=steps,
        trainer={"total": steps, "silent": True},
        deadline=deadline(seconds),
    )


async def test_a_job_waits_for_spot_machines_until_only_on_demand_ones_are_sure():
    """The spot node is too small for its gang; those on demand idle until the last moment."""
    simulation = cluster("min-cost-slo", nodes={"a": ("sure", 2), "b": ("spot", 1)})
    job(simulation, "one", 1000, 2000.0)
    await simulation.tick(seconds=ROUND)
    assert pool_of(simulation, "one") == ""
    assert "waits for spot machines" in simulation.status("one").last_decision.why
    await simulation.until(lambda: pool_of(simulation, "one") == "sure", seconds=ROUND)
    waited = (simulation.now - START).total_seconds()
    assert 500 < waited < 1000 - 180


async def test_a_job_goes_on_demand_at_the_last_moment_and_stays():
    """What is left just fits before the deadline: spot machines are not sure enough, cheap as they are."""
    simulation = cluster("min-cost-slo")
    job(simulation, "one", 3000, 3300.0)
    await simulation.until(lambda: pool_of(simulation, "one") == "sure")
    for _ in range(3):
        await simulation.tick(seconds=ROUND)
    assert pool_of(simulation, "one") == "sure"
