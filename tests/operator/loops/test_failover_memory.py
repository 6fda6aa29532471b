"""What an operator's death leaves to its successor: accounts, moves and measured speeds."""

import pytest
from ballast_operator.allocator.saved_state import STATE_NAME
from ballast_operator.kube.kinds import CONFIG_MAP, JOB

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, job


def crowded() -> Simulation:
    """Three jobs for the GPUs of one, rounds of ten seconds: the others are owed time."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)}, roundSeconds=10, moves={"maxMovesPerHour": 3600})
    for name in ("one", "two", "three"):
        simulation.add_job(name, totalSteps=100_000)
    return simulation


@pytest.mark.slow
async def test_a_successor_knows_what_each_job_is_owed_and_how_fast_it_is():
    """At its first decision: the accounts of the last round, the moves of the hour, the speeds."""
    simulation = crowded()
    for _ in range(65):
        await simulation.tick()
    simulation.asked_to_decide()
    await simulation.tick()
    allocator = simulation.allocator
    await allocator.save()
    memory, jobs = allocator.decider.memory.accounts, dict(allocator.decider.measurements.jobs)
    kinds = {kind: dict(speeds) for kind, speeds in allocator.decider.measurements.kinds.items()}
    assert jobs and kinds and memory.moves
    assert len({sum(row.values()) for row in memory.account.received.values()}) > 1
    simulation.start_operator()
    await simulation._operate()
    found = simulation.allocator
    assert found.decider.measurements.jobs.keys() == jobs.keys()
    for key, known in jobs.items():
        for where, estimate in known.speeds.items():
            speed = found.decider.measurements.jobs[key].speeds[where].steps_per_second
            assert speed == pytest.approx(estimate.steps_per_second)
    assert {kind: set(speeds) for kind, speeds in found.decider.measurements.kinds.items()} == {
        kind: set(speeds) for kind, speeds in kinds.items()
    }
    assert found.decider.memory.accounts.moves == memory.moves
    for name, row in memory.account.received.items():
        assert found.decider.memory.accounts.account.received[name] == pytest.approx(row)
        assert found.decider.memory.accounts.account.promised[name] == pytest.approx(
            memory.account.promised[name]
        )


@pytest.mark.slow
async def test_a_killed_operator_loses_at_most_a_round():
    """Without a clean shutdown: what was saved as the last round began is extended over the time between."""
    simulation = crowded()
    for _ in range(68):
        await simulation.tick()
    before = simulation.allocator.decider.memory.accounts
    simulation.start_operator()
    await simulation.tick()
    after = simulation.allocator.decider.memory.accounts
    for name, row in before.account.promised.items():
        owed = sum(row.values()) - sum(before.account.received[name].values())
        now = sum(after.account.promised[name].values()) - sum(after.account.received[name].values())
        assert now == pytest.approx(owed, abs=10.0)
    assert after.moves == before.moves


@pytest.mark.slow
async def test_time_without_an_operator_counts_as_promised_and_received():
    """Two minutes without one: the gang that trained has had them, the others are owed their part."""
    simulation = crowded()
    for _ in range(41):
        await simulation.tick()
    before = simulation.allocator.decider.memory.accounts
    await simulation.tick(seconds=120.0, operator=False)
    (running,) = [name for name in simulation.trainers if simulation.pods(name)]
    simulation.start_operator()
    await simulation.tick()
    after = simulation.allocator.decider.memory.accounts
    key = f"{NAMESPACE}/{running}"
    assert sum(after.account.received[key].values()) > 0.3 * sum(before.account.received[key].values()) + 100
    for name in set(before.shares) - {key}:
        gained = sum(after.account.promised[name].values()) - sum(before.account.promised[name].values())
        assert gained == pytest.approx(121 / 3, abs=10)


@pytest.mark.slow
async def test_a_job_created_again_under_an_old_name_inherits_nothing():
    """While no operator ran: the account belonged to another job."""
    simulation = crowded()
    for _ in range(41):
        await simulation.tick()
    simulation.world.drop(JOB, NAMESPACE, "three")
    again = job("three", totalSteps=100_000)
    again["metadata"]["creationTimestamp"] = "2026-01-01T00:02:00Z"
    simulation.world.put(JOB, again)
    simulation.start_operator()
    await simulation.tick(seconds=120.0)
    memory = simulation.allocator.decider.memory.accounts
    assert sum(memory.account.promised.get(f"{NAMESPACE}/three", {}).values()) == pytest.approx(0.0, abs=1.0)
    assert sum(memory.account.promised[f"{NAMESPACE}/two"].values()) > 10


@pytest.mark.slow
async def test_the_state_is_written_once_a_round():
    """However many decisions a round has."""
    simulation = crowded()
    for _ in range(95):
        await simulation.tick()
    writes = [entry for entry in simulation.world.log if STATE_NAME in entry]
    assert 9 <= len(writes) <= 11
    assert simulation.world.get(CONFIG_MAP, "ballast-system", STATE_NAME) is not None
