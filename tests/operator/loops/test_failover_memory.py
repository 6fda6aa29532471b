"""What an operator's death leaves to its successor: accounts, moves and measured speeds."""

import base64
import dataclasses

import pytest
from ballast_operator.allocator.saved_state import STATE_KEY, STATE_NAME, decode, encode
from ballast_operator.kube.kinds import CONFIG_MAP, JOB

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, job

pytestmark = pytest.mark.slow


def crowded() -> Simulation:
    """Three jobs for the GPUs of one, rounds of ten seconds: the others are owed time."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)}, roundSeconds=10, moves={"maxMovesPerHour": 3600})
    for name in ("one", "two", "three"):
        simulation.add_job(name, totalSteps=100_000)
    return simulation


async def test_a_killed_operator_loses_at_most_a_round():
    """Without a clean shutdown: what was saved as the last round began is extended over the time between."""
    simulation = crowded()
    await simulation.ticks(68)
    before = simulation.allocator.decider.memory.accounts
    simulation.start_operator()
    await simulation.tick()
    after = simulation.allocator.decider.memory.accounts
    for name, row in before.promised.items():
        owed = sum(row.values()) - sum(before.received[name].values())
        now = sum(after.promised[name].values()) - sum(after.received[name].values())
        assert now == pytest.approx(owed, abs=10.0)
    assert after.moves == before.moves


async def test_time_without_an_operator_counts_as_promised_and_received():
    """Two minutes without one: the gang that trained has had them, the others are owed their part."""
    simulation = crowded()
    await simulation.ticks(41)
    await simulation.until(lambda: any(simulation.state(name) == "Running" for name in simulation.trainers))
    before = simulation.allocator.decider.memory.accounts
    await simulation.tick(seconds=120.0, operator=False)
    (running,) = [name for name in simulation.trainers if simulation.pods(name)]
    simulation.start_operator()
    await simulation.tick()
    after = simulation.allocator.decider.memory.accounts
    key = f"{NAMESPACE}/{running}"
    assert sum(after.received[key].values()) > 0.3 * sum(before.received[key].values()) + 100
    for name in set(before.shares) - {key}:
        gained = sum(after.promised[name].values()) - sum(before.promised[name].values())
        assert gained == pytest.approx(121 / 3, abs=10)


@pytest.mark.parametrize("change", ["restored", "deleted"])
async def test_accounts_of_a_backup_are_gone_on_with(change):
    """By an operator that runs on; where there are none any more, it keeps its own."""
    simulation = crowded()
    await simulation.ticks(41)
    key, name = f"{NAMESPACE}/three", ("ballast-system", STATE_NAME)
    item, before = simulation.world.get(CONFIG_MAP, *name), simulation.allocator.decider.memory.accounts
    if change == "restored":
        state = decode(base64.b64decode(item["binaryData"][STATE_KEY]))
        memory = dataclasses.replace(state.memory, promised={key: {"fast": 5000.0}})
        state = dataclasses.replace(state, memory=memory)
        content = {"binaryData": {STATE_KEY: base64.b64encode(encode(state)).decode()}}
        simulation.world.put(CONFIG_MAP, {**item, **content})
    else:
        simulation.world.drop(CONFIG_MAP, *name)
    await simulation.ticks(25)
    promised = sum(simulation.allocator.decider.memory.accounts.promised[key].values())
    least = 4000.0 if change == "restored" else sum(before.promised[key].values())
    assert promised > least
    saved = decode(base64.b64decode(simulation.world.get(CONFIG_MAP, *name)["binaryData"][STATE_KEY]))
    assert sum(saved.memory.promised[key].values()) > least


@pytest.mark.parametrize("operator_runs", [True, False])
async def test_a_job_created_again_under_an_old_name_inherits_nothing(operator_runs):
    """While no operator ran, or within a decision's time: account and speeds belonged to another job."""
    simulation, key = crowded(), (NAMESPACE, "three")
    await simulation.ticks(41)
    decider = simulation.allocator.decider
    assert sum(decider.memory.accounts.promised["/".join(key)].values()) > 10
    assert decider.measurements.reported_by(key)
    simulation.world.drop(JOB, *key)
    again = job("three", totalSteps=100_000)
    again["metadata"]["creationTimestamp"] = "2026-01-01T00:02:00Z"
    simulation.world.put(JOB, again)
    if not operator_runs:
        simulation.start_operator()
    await simulation.tick(decides=True, seconds=1.0 if operator_runs else 120.0)
    decider = simulation.allocator.decider
    memory = decider.memory.accounts
    assert sum(memory.promised.get("/".join(key), {}).values()) == pytest.approx(0.0, abs=1.0)
    assert sum(memory.promised[f"{NAMESPACE}/two"].values()) > 10
    assert not decider.measurements.reported_by(key)


async def test_the_state_is_written_once_a_round():
    """However many decisions a round has."""
    simulation = crowded()
    await simulation.ticks(95)
    writes = [entry for entry in simulation.world.log if STATE_NAME in entry]
    assert 9 <= len(writes) <= 11
    assert simulation.world.get(CONFIG_MAP, "ballast-system", STATE_NAME) is not None
