"""When gangs in several pools get their GPUs: beside others, before others, and after them."""

import pytest
from ballast_operator.kube.kinds import JOB

from tests.operator.loops.mixed.two_pools import add_wide, parts_of, plan_of, speeds, two_pools
from tests.operator.loops.simulated.machines import Trainer
from tests.operator.loops.simulated.simulation import NAMESPACE
from tests.support.examples import first_daily

BOTH = ["2 x fast of pool fast", "2 x slow of pool slow"]
SMALL = {"model": {"name": "small", "layers": 12}, "totalSteps": 100_000}


def add_small(simulation, name, **spec):
    simulation.add_job(name, stages=(2, 2), trainer={"total": 100_000, "pace": 1}, **{**SMALL, **spec})


async def test_a_second_pool_is_taken_where_it_is_worth_it():
    """Two slow GPUs of half the speed make two fast ones 1.2 times as fast; of a quarter, they do not."""
    for slow, expected in ((2.0, BOTH), (1.0, BOTH[:1])):
        simulation = two_pools()
        add_wide(simulation, stages=(2, 4), throughput=speeds(2, 4, slow=slow))
        await simulation.until(lambda at=simulation: at.state("wide") == "Running")
        assert parts_of(simulation) == expected


async def test_gpus_that_another_job_needs_are_not_taken_for_a_second_part():
    """The waiting job has the slow pool; the other starts in the fast one alone."""
    simulation = two_pools()
    add_wide(simulation, stages=(2, 4), throughput=speeds(2, 4, slow=2.0))
    add_small(simulation, "other", gpuTypes=["slow"])
    await simulation.until(lambda: simulation.state("wide") == simulation.state("other") == "Running")
    assert parts_of(simulation) == BOTH[:1]
    assert parts_of(simulation, "other") == BOTH[1:]


async def test_a_gang_in_two_pools_gives_back_what_a_job_needs_and_grows_again_without_a_restart():
    """Its last ranks leave for the job, and come back when that is gone."""
    simulation, all_six = two_pools(slow=4), ["2 x fast of pool fast", "4 x slow of pool slow"]
    add_wide(simulation, stages=(2, 6), throughput=speeds(2, 4, 6, slow=3.0))
    await simulation.until(lambda: simulation.state("wide") == "Running")
    assert parts_of(simulation) == all_six
    add_small(simulation, "small", gpuTypes=["slow"])
    await simulation.until(lambda: simulation.state("small") == "Running")
    assert parts_of(simulation) == BOTH
    assert simulation.status("wide").condition("Shrunk").reason == "GpusGivenBack"
    simulation.world.patch(JOB, NAMESPACE, "small", {"spec": {"suspend": True}})
    await simulation.until(lambda: len(plan_of(simulation).ranks) == 6, seconds=5)
    await simulation.until(lambda: simulation.status("wide").condition("Grown").is_true)
    assert parts_of(simulation) == all_six
    assert [rank.gpu_type for rank in plan_of(simulation).ranks] == ["fast"] * 2 + ["slow"] * 4
    assert (simulation.status("wide").launches, simulation.status("wide").restarts) == (1, {})


@pytest.mark.slow
async def test_jobs_and_a_gang_that_needs_both_pools_take_turns():
    """Each has about the time that the policy gives it: half."""
    simulation = two_pools(roundSeconds=60, moves={"maxMovesPerHour": 3600})
    add_wide(simulation)
    for name, kind in (("left", "fast"), ("right", "slow")):
        add_small(simulation, name, gpuTypes=[kind])
    seconds = dict.fromkeys(("wide", "left", "right"), 0)
    for _ in range(200):
        await simulation.tick(seconds=10)
        for name in seconds:
            seconds[name] += simulation.state(name) == "Running"
    total = 200
    assert all(total / 4 < ran < total * 3 / 4 for ran in seconds.values()), seconds


@pytest.mark.slow
async def test_a_more_urgent_job_stops_a_gang_in_two_pools_at_the_end_of_a_round():
    """It saves, and runs again when it is its turn."""
    simulation = two_pools(roundSeconds=60, moves={"maxMovesPerHour": 3600})
    add_wide(simulation)
    await simulation.until(lambda: simulation.state("wide") == "Running")
    add_small(simulation, "urgent", weight=20.0)
    await simulation.until(lambda: simulation.state("urgent") == "Running", seconds=5)
    assert parts_of(simulation) == []
    assert simulation.status("wide").condition("Admitted").message.count("waits for 4 GPUs of its pools") == 1
    await simulation.until(lambda: simulation.state("wide") == "Running", seconds=10, ticks=900)


@pytest.mark.slow
async def test_a_gang_in_two_pools_stays_while_nobody_needs_its_gpus():
    simulation = two_pools(roundSeconds=60)
    add_wide(simulation)
    await simulation.until(lambda: simulation.state("wide") == "Running")
    for _ in range(40):
        await simulation.tick(seconds=20)
    assert simulation.status("wide").launches == 1


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
    await simulation.until(lambda: simulation.state("first") == "Running")
    add_wide(simulation)
    await simulation.until(lambda: simulation.state("wide") == "Running")
    assert parts_of(simulation) == BOTH
    simulation.world.patch(JOB, NAMESPACE, "first", {"spec": {"suspend": True}})
    await simulation.until(lambda: parts_of(simulation) == ["4 x fast of pool fast"], seconds=10, ticks=300)
    await simulation.until(lambda: simulation.state("wide") == "Running")
    assert simulation.status("wide").lost_steps == 0


async def test_a_namespace_limit_counts_both_parts():
    simulation = two_pools(tenants={"eachNamespace": {"maxGpus": 3}})
    add_wide(simulation, stages=(2, 4), throughput=speeds(2, 4, slow=2.0))
    for _ in range(5):
        await simulation.tick()
    held = simulation.status("wide").allocation
    assert held is not None
    assert held.gpus <= 3


@pytest.mark.slow
@pytest.mark.parametrize("seed", first_daily(range(2)))
async def test_no_node_has_more_gpus_given_than_it_has(seed):
    """Jobs of all kinds come and go; that no node has too many pods the simulation checks at every moment."""
    simulation = two_pools(fast=3 + seed, slow=2 + seed, roundSeconds=30, moves={"maxMovesPerHour": 3600})
    for number in range(3):
        add_wide(simulation, f"wide-{number}", stages=(2 + number % 2 * 3, 6))
        add_small(simulation, f"small-{number}")
    for number in range(50):
        await simulation.tick(seconds=5)
        if number % 10 == 0:
            name = f"small-{number // 10 % 3}"
            suspend = (number // 10 + seed) % 3 == 0
            simulation.world.patch(JOB, NAMESPACE, name, {"spec": {"suspend": suspend}})
    held = {}
    for item in simulation.world.items(JOB):
        allocation = simulation.status(item["metadata"]["name"]).allocation
        for node in allocation.nodes if allocation is not None and allocation.ending is None else ():
            held[node] = held.get(node, 0) + 1
    assert held.get("fast-0", 0) <= 3 + seed
    assert held.get("slow-0", 0) <= 2 + seed
