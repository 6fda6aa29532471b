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
async def test_a_third_job_starts_on_the_slower_gpus_where_eight_of_them_beat_its_part_of_the_fast_ones():
    """The two that run keep their four fast ones each; nothing idles."""
    simulation = two_pools(8, 8)
    for name in ("one", "two", "three"):
        simulation.add_job(name, stages=(2, 8), throughput=stated(fast=1.0, slow=0.5), **ENDLESS)
        await simulation.until(lambda name=name: simulation.state(name) == "Running")
    for _ in range(100):
        await simulation.tick()
    assert where(simulation) == {
        "one": "4 x fast of pool fast",
        "two": "4 x fast of pool fast",
        "three": "8 x slow of pool slow",
    }
    assert all(simulation.status(name).launches == 1 for name in ("one", "two", "three"))


@pytest.mark.slow
async def test_gpus_that_come_free_in_another_pool_are_taken_by_one_restart_with_a_checkpoint():
    """Two share four fast GPUs while a third job has the others; then it ends, and one of them goes there."""
    simulation = two_pools(4, 8)
    simulation.add_job(
        "third", stages=(8, 8), gpuTypes=["slow"], totalSteps=60, trainer={"total": 60, "pace": 1}
    )
    await simulation.until(lambda: simulation.state("third") == "Running")
    for name in ("one", "two"):
        simulation.add_job(name, stages=(2, 8), throughput=stated(fast=1.0, slow=0.9), **ENDLESS)
    await simulation.until(lambda: all(simulation.state(name) == "Running" for name in ("one", "two")))
    await simulation.until(lambda: simulation.state("third") == "Succeeded")
    for _ in range(130):
        await simulation.tick()
    chosen = where(simulation)
    assert sorted((chosen["one"], chosen["two"])) == ["4 x fast of pool fast", "8 x slow of pool slow"]
    launches = {name: simulation.status(name).launches for name in ("one", "two")}
    assert sorted(launches.values()) == [1, 2]
    moved = max(launches, key=launches.get)
    assert simulation.trainers[moved].resumed_from[-1] > 0
    assert "after a restart of" in simulation.status(moved).last_decision.why


@pytest.mark.slow
async def test_gpus_that_are_far_slower_stay_idle():
    """Two on four fast GPUs each would lose by the slow ones; they do not take turns there either."""
    simulation = two_pools(8, 4)
    for name in ("one", "two"):
        simulation.add_job(name, stages=(2, 8), throughput=stated(fast=1.0, slow=0.3), **ENDLESS)
    await simulation.until(lambda: all(simulation.state(name) == "Running" for name in ("one", "two")))
    for _ in range(100):
        await simulation.tick()
    assert set(where(simulation).values()) == {"4 x fast of pool fast"}
    assert all(simulation.status(name).launches == 1 for name in ("one", "two"))
