"""When gangs in several pools get their GPUs: beside others, before others, and after them."""

import pytest

from tests.operator.loops.mixed.two_pools import add_wide, parts_of, speeds, two_pools
from tests.operator.loops.simulated.machines import Trainer

BOTH = ["2 x fast of pool fast", "2 x slow of pool slow"]
SMALL = {"model": {"name": "small", "layers": 12}, "totalSteps": 100_000}


def add_small(simulation, name, **spec):
    simulation.add_job(name, stages=(2, 2), trainer={"pace": 1}, **{**SMALL, **spec})


async def test_gpus_that_another_job_needs_are_not_taken_for_a_second_part():
    """The waiting job has the slow pool; the other starts in the fast one alone."""
    simulation = two_pools()
    add_wide(simulation, stages=(2, 4), throughput=speeds(2, 4, slow=2.0))
    add_small(simulation, "other", gpuTypes=["slow"])
    await simulation.running("wide", "other")
    assert parts_of(simulation) == BOTH[:1]
    assert parts_of(simulation, "other") == BOTH[1:]


@pytest.mark.slow
async def test_a_gang_in_two_pools_gives_back_what_a_job_needs_and_grows_again_without_a_restart():
    """Its last ranks leave for the job, and come back when that is gone."""
    simulation, all_six = two_pools(slow=4), ["2 x fast of pool fast", "4 x slow of pool slow"]
    add_wide(simulation, stages=(2, 6), throughput=speeds(2, 4, 6, slow=3.0))
    await simulation.running("wide")
    assert parts_of(simulation) == all_six
    add_small(simulation, "small", gpuTypes=["slow"])
    await simulation.running("small")
    assert parts_of(simulation) == BOTH
    assert simulation.condition("wide", "Shrunk").reason == "GpusGivenBack"
    simulation.change("small", suspend=True)
    await simulation.until(lambda: len(simulation.plan("wide").ranks) == 6, seconds=5)
    await simulation.until(lambda: simulation.condition("wide", "Grown").is_true)
    assert parts_of(simulation) == all_six
    assert [rank.gpu_type for rank in simulation.plan("wide").ranks] == ["fast"] * 2 + ["slow"] * 4
    assert (simulation.status("wide").launches, simulation.status("wide").restarts) == (1, {})


@pytest.mark.slow
async def test_a_more_urgent_job_stops_a_gang_in_two_pools_at_the_end_of_a_round():
    """It saves, and runs again when it is its turn."""
    simulation = two_pools(roundSeconds=60, moves={"maxMovesPerHour": 3600})
    add_wide(simulation)
    await simulation.running("wide")
    add_small(simulation, "urgent", weight=20.0)
    await simulation.running("urgent", seconds=5)
    assert parts_of(simulation) == []
    assert simulation.condition("wide", "Admitted").message.count("waits for 4 GPUs of its pools") == 1
    await simulation.running("wide", seconds=10, ticks=900)


@pytest.mark.slow
async def test_a_gang_in_two_pools_moves_into_one_that_becomes_free(monkeypatch):
    """Four fast GPUs, at 4 steps/s, win more over the 2.5 that it reports than the restart costs."""
    report = Trainer._report
    slow = {"wide": 2.5}

    def at_its_speed(trainer, plan):
        found = report(trainer, plan)
        return found.replace(steps_per_second=slow.get(plan.job, found.steps_per_second))

    monkeypatch.setattr(Trainer, "_report", at_its_speed)
    simulation = two_pools(fast=4, roundSeconds=60)
    add_small(simulation, "first", gpuTypes=["fast"])
    await simulation.running("first")
    add_wide(simulation)
    await simulation.running("wide")
    assert parts_of(simulation) == BOTH
    simulation.change("first", suspend=True)
    await simulation.until(lambda: parts_of(simulation) == ["4 x fast of pool fast"], seconds=10, ticks=300)
    await simulation.running("wide")
    assert simulation.status("wide").lost_steps == 0


async def test_a_namespace_limit_counts_both_parts():
    simulation = two_pools(tenants={"eachNamespace": {"maxGpus": 3}})
    add_wide(simulation, stages=(2, 4), throughput=speeds(2, 4, slow=2.0))
    await simulation.ticks(5)
    held = simulation.status("wide").allocation
    assert held is not None
    assert held.gpus <= 3
