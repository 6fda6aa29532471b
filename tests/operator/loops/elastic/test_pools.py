"""Elastic gangs on two pools: where the size that they reach is fastest, restarts where they pay."""

import pytest

from tests.operator.loops.simulated.simulation import Simulation

ENDLESS = {"totalSteps": 100_000, "trainer": {"total": 100_000, "scales": True, "pace": 1}}
SPEEDS = {2: 4.35, 4: 7.58, 8: 13.2}
"""Steps/s that the trainer reports at each size."""


def stated(**by_type: float) -> list[dict]:
    """``spec.throughput``: speed on each type over what the trainer reports."""
    return [
        {"gpuType": kind, "stages": stages, "stepsPerSecond": round(rate * times, 3)}
        for kind, times in by_type.items()
        for stages, rate in SPEEDS.items()
    ]


def where(simulation: Simulation) -> dict[str, str]:
    return {name: simulation.status(name).last_decision.chosen for name in simulation.trainers}


def two_pools(fast: int, slow: int, **spec) -> Simulation:
    nodes = {
        f"{pool}-{i}": (pool, 4) for pool, gpus in (("fast", fast), ("slow", slow)) for i in range(gpus // 4)
    }
    return Simulation(nodes=nodes, roundSeconds=30, **spec)


@pytest.mark.slow
async def test_gpus_that_come_free_in_another_pool_are_taken_by_one_restart_with_a_checkpoint():
    """Two share four fast GPUs while a third job has the others; then it ends, and one of them goes there."""
    simulation = two_pools(4, 8)
    await simulation.run_job(
        "third", stages=(8, 8), gpuTypes=["slow"], totalSteps=60, trainer={"total": 60, "pace": 1}
    )
    for name in ("one", "two"):
        simulation.add_job(name, stages=(2, 8), throughput=stated(fast=1.0, slow=0.9), **ENDLESS)
    await simulation.running("one", "two")
    await simulation.until(lambda: simulation.state("third") == "Succeeded")
    await simulation.ticks(130)
    chosen = where(simulation)
    assert sorted((chosen["one"], chosen["two"])) == ["4 x fast of pool fast", "8 x slow of pool slow"]
    launches = {name: simulation.status(name).launches for name in ("one", "two")}
    assert sorted(launches.values()) == [1, 2]
    moved = max(launches, key=launches.get)
    assert simulation.trainers[moved].resumed_from[-1] > 0
    assert "after a restart of" in simulation.status(moved).last_decision.why
