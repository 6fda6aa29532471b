"""Elastic gangs share a pool, give GPUs back when asked, and lose nothing when that fails."""

import pytest
from ballast_operator.kube.kinds import NODE
from ballast_policies.allocation.policy import SpaceSharing, Surplus
from ballast_policies.allocation.registry import POLICIES
from ballast_policies.protocol.cause import Cause

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation
from tests.operator.loops.simulated.world import Crash
from tests.support.examples import first_daily

ENDLESS = {"totalSteps": 100_000, "trainer": {"total": 100_000, "scales": True}}


def sizes(simulation: Simulation) -> dict[str, int]:
    return {name: len(simulation.pods(name)) for name in simulation.trainers}


def never_restarted(simulation: Simulation, *names: str) -> bool:
    return all(
        (simulation.status(name).launches, dict(simulation.status(name).restarts)) == (1, {})
        for name in names
    )


def four_gpus(**spec) -> Simulation:
    return Simulation(nodes={"a": ("fast", 2), "b": ("fast", 2)}, roundSeconds=30, **spec)


async def alone_on_four(**spec) -> Simulation:
    """A gang of 1 to 4 that has the whole pool."""
    simulation = four_gpus()
    simulation.add_job("one", stages=(1, 4), **{**ENDLESS, **spec})
    await simulation.until(lambda: simulation.state("one") == "Running")
    assert sizes(simulation) == {"one": 4}
    return simulation


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    first_daily(
        [
            name
            for name, row in POLICIES.builtin.items()
            # By completion time, one after the other is sooner on average.
            if row.space_sharing is not SpaceSharing.ALWAYS and row.surplus is not Surplus.COMPLETION_TIME
        ],
        5,
    ),
)
async def test_two_elastic_jobs_run_side_by_side_by_every_policy(name):
    """Neither waits for the other, and no GPU is idle that would make one of them faster."""
    simulation = four_gpus(objective={"policy": name})
    for job in ("one", "two"):
        simulation.add_job(job, stages=(2, 8), **ENDLESS)
    await simulation.until(lambda: all(simulation.state(job) == "Running" for job in ("one", "two")))
    assert sizes(simulation) == {"one": 2, "two": 2}
    for _ in range(70):
        await simulation.tick()
    assert sizes(simulation) == {"one": 2, "two": 2}
    assert never_restarted(simulation, "one", "two")


@pytest.mark.slow
async def test_by_completion_time_the_second_of_two_like_jobs_waits_where_turns_end_sooner():
    """Four GPUs are 1.6 times as fast as two: both ends come sooner, one after the other."""
    simulation = four_gpus(objective={"policy": "completion-time"})
    for job in ("one", "two"):
        simulation.add_job(job, stages=(2, 8), **ENDLESS)
    await simulation.until(lambda: max(sizes(simulation).values()) == 4)
    for _ in range(70):
        await simulation.tick()
    assert sorted(sizes(simulation).values()) == [0, 4]
    assert never_restarted(simulation, *(job for job, size in sizes(simulation).items() if size))


@pytest.mark.slow
async def test_one_ends_the_other_grows_a_third_comes_and_all_share_without_a_restart():
    """Every change is live, and the same pods continue."""
    simulation = four_gpus()
    simulation.add_job("one", stages=(1, 4), totalSteps=300, trainer={"total": 300})
    simulation.add_job("two", stages=(1, 4), **ENDLESS)
    await simulation.until(lambda: sizes(simulation) == {"one": 2, "two": 2})
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    await simulation.until(lambda: len(simulation.pods("two")) == 4)
    simulation.add_job("three", stages=(1, 4), **ENDLESS)
    await simulation.until(lambda: simulation.state("three") == "Running", ticks=10)
    assert sizes(simulation) == {"one": 0, "two": 2, "three": 2}
    assert never_restarted(simulation, "one", "two", "three")
    asked = simulation.status("two").repacks[-1]
    assert asked.asked and asked.pause_ms == 12.5
    await simulation.tick()
    said = simulation.status("two").last_decision
    assert said.chosen == "2 x fast of pool fast"
    assert "2 x fast in pool fast" in said.why
    assert "it may have 1 to 4 GPUs and has 2, at " in said.why
    assert said.next_best.startswith("4 x fast: ")
    assert "2 GPUs more; 3 x fast: " in said.next_best
    assert said.next_best.endswith("no faster")
    shrunk = simulation.status("two").condition("Shrunk")
    assert shrunk.is_true and "2 pods continue" in shrunk.message
    simulation.add_job("four", stages=(2, 2), **ENDLESS)
    await simulation.until(lambda: simulation.state("four") == "Running", ticks=10)
    assert sizes(simulation) == {"one": 0, "two": 1, "three": 1, "four": 2}
    assert never_restarted(simulation, "two", "three", "four")


@pytest.mark.slow
async def test_a_gang_that_gave_gpus_back_takes_them_again():
    """Unlike after a repack of its own: its model is as large as before."""
    simulation = await alone_on_four()
    simulation.add_job("two", stages=(2, 2), totalSteps=200, trainer={"total": 200})
    await simulation.until(lambda: simulation.state("two") == "Running")
    assert sizes(simulation) == {"one": 2, "two": 2}
    await simulation.until(lambda: sizes(simulation) == {"one": 4, "two": 0})
    assert never_restarted(simulation, "one")


@pytest.mark.slow
async def test_equal_gangs_do_not_pass_gpus_back_and_forth():
    """Three on four GPUs: one has two, and keeps them."""
    simulation = four_gpus()
    for name in ("one", "two", "three"):
        simulation.add_job(name, stages=(1, 4), **ENDLESS)
    await simulation.until(lambda: sum(sizes(simulation).values()) == 4)
    for _ in range(40):
        await simulation.tick()
    before = sizes(simulation)
    for _ in range(150):
        await simulation.tick()
        assert sizes(simulation) == before
    assert never_restarted(simulation, "one", "two", "three")


async def test_a_gang_with_a_fixed_size_keeps_it():
    """``grow: false``: the other one waits for its turn, as before."""
    simulation = await alone_on_four(grow=False)
    simulation.add_job("two", stages=(1, 1), **ENDLESS)
    for _ in range(10):
        await simulation.tick()
    assert sizes(simulation) == {"one": 4, "two": 0}


@pytest.mark.slow
async def test_a_trainer_that_does_not_shrink_is_stopped_with_a_checkpoint_and_restarts_smaller():
    """After the time that a shrink has; the waiting job gets its GPUs all the same."""
    simulation = await alone_on_four()
    simulation.trainers["one"].deaf = True
    simulation.add_job("two", stages=(2, 2), **ENDLESS)
    await simulation.until(lambda: simulation.state("two") == "Running", seconds=5.0)
    simulation.trainers["one"].deaf = False
    await simulation.until(lambda: simulation.state("one") == "Running", seconds=5.0)
    status = simulation.status("one")
    assert dict(status.restarts) == {Cause.SHRINK_TIMEOUT: 1}
    assert sizes(simulation) == {"one": 2, "two": 2}
    assert simulation.trainers["one"].resumed_from[-1] == simulation.trainers["one"].saved > 0


@pytest.mark.slow
async def test_a_trainer_that_never_shrinks_is_no_longer_asked_to():
    """Twice is enough: from then on its gang keeps what it is launched with, and takes turns."""
    simulation = await alone_on_four()
    simulation.trainers["one"].deaf = True
    simulation.add_job("two", stages=(1, 1), **ENDLESS)
    for _ in range(400):
        await simulation.tick(seconds=5.0)
    assert simulation.status("one").restarts[Cause.SHRINK_TIMEOUT] <= 2


@pytest.mark.slow
async def test_a_namespace_at_its_limit_shares_its_gpus_and_never_exceeds_the_limit():
    """Its new job starts once its older one has given GPUs back, although others are free."""
    simulation = four_gpus(tenants={"eachNamespace": {"maxGpus": 2}})
    simulation.add_job("one", stages=(1, 4), **ENDLESS)
    await simulation.until(lambda: simulation.state("one") == "Running")
    assert sizes(simulation) == {"one": 2}
    simulation.add_job("two", stages=(1, 4), **ENDLESS)
    for _ in range(60):
        await simulation.tick()
        held = [simulation.status(name).allocation for name in ("one", "two")]
        assert sum(len(one.pods) for one in held if one is not None) <= 2
    assert sizes(simulation) == {"one": 1, "two": 1}
    assert never_restarted(simulation, "one", "two")


@pytest.mark.slow
@pytest.mark.parametrize("point", range(8))
async def test_an_operator_that_dies_at_any_write_of_an_asked_shrink_is_succeeded_without_loss(point):
    """One launch each, no pod of a name twice, whatever write was the last."""
    simulation = await alone_on_four()
    start = simulation.world.writes

    def die(number: int) -> None:
        if number == start + point:
            raise Crash

    simulation.world.after_write = die
    simulation.add_job("two", stages=(2, 2), **ENDLESS)
    await simulation.until(lambda: sizes(simulation) == {"one": 2, "two": 2})
    assert simulation.restarts == 1
    await simulation.until(lambda: simulation.state("two") == "Running")
    assert never_restarted(simulation, "one", "two")
    assert all(len(found) == 1 for found in simulation.world.uids_of_pods.values())


@pytest.mark.slow
async def test_gangs_with_tensor_groups_shrink_and_grow_by_whole_groups():
    """Two ranks at each position stay or leave together."""
    simulation = Simulation(nodes={"a": ("fast", 6)}, roundSeconds=30)
    parallelism = {"tensor": 2, "gpusPerPod": 1}
    simulation.add_job("one", stages=(1, 3), parallelism=parallelism, **ENDLESS)
    await simulation.until(lambda: sizes(simulation) == {"one": 6})
    simulation.add_job("two", stages=(1, 1), **ENDLESS)
    await simulation.until(lambda: simulation.state("two") == "Running", ticks=30)
    assert sizes(simulation) == {"one": 4, "two": 1}
    simulation.world.put(NODE, node("b", "fast", 1))
    await simulation.until(lambda: sizes(simulation) == {"one": 6, "two": 1})
    assert never_restarted(simulation, "one", "two")


@pytest.mark.slow
async def test_a_team_has_the_gpus_of_its_weight_however_many_jobs_it_has():
    """By ``hierarchical``: one job of a team with weight 2 beside two jobs of a team with weight 1."""
    teams = {"vision": {"weight": 2}, "speech": {"weight": 1}}
    simulation = Simulation(
        nodes={"a": ("fast", 6)}, roundSeconds=30, objective={"policy": "hierarchical", "entities": teams}
    )
    for name, team in (("one", "speech"), ("two", "speech"), ("three", "vision")):
        simulation.add_job(name, stages=(1, 6), entity=team, **ENDLESS)
    await simulation.until(lambda: sizes(simulation) == {"one": 1, "two": 1, "three": 4})
    for _ in range(40):
        await simulation.tick()
    assert sizes(simulation) == {"one": 1, "two": 1, "three": 4}
