"""Gangs whose start takes longer than a round, while others want their GPUs."""

import itertools

import pytest
from ballast_operator.kube.kinds import JOB
from hypothesis import given
from hypothesis import strategies as st

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.operator.loops.simulated.world import as_sent
from tests.operator.loops.spot.test_notices import ITN, mark
from tests.support.examples import examples

LONG = {"totalSteps": 100_000, "stages": (1, 1)}


def two_on_one_gpu(start_seconds: float, **policy: object) -> Simulation:
    simulation = Simulation(nodes={"n": ("fast", 1)}, **{"roundSeconds": 20, **policy})
    for name in ("a", "b"):
        simulation.add_job(name, **LONG, trainer={"start_seconds": start_seconds})
    return simulation


@pytest.mark.slow
@given(start=st.integers(0, 280), least=st.sampled_from([0, 30]))
@examples(20)
async def test_two_jobs_that_compete_both_train_however_long_they_start(start: int, least: int):
    """No launch ends before its first step, nor before its least time after that."""
    simulation = two_on_one_gpu(start, moves={"minRunSeconds": least, "maxMovesPerHour": 1000})
    trainers = [simulation.trainers[name] for name in ("a", "b")]
    await simulation.until(
        lambda: all(len(each.resumed_from) > 2 for each in trainers), ticks=8 * (start + least + 60)
    )
    for each in trainers:
        # 10 steps a second.
        gained = [later - before for before, later in itertools.pairwise(each.resumed_from)]
        assert all(steps > 0 and steps >= 10 * (least - 5) for steps in gained), (start, gained)
    assert not simulation.status("a").counted_restarts + simulation.status("b").counted_restarts


@pytest.mark.slow
async def test_a_gang_that_never_starts_ends_by_its_start_deadline_and_others_get_its_gpus():
    """Again and again: the other trains in the pauses, at last in turns of a round."""
    simulation = two_on_one_gpu(0, moves={"minRunSeconds": 30})
    simulation.trainers["a"].start_seconds = 1e9
    simulation.change("a", backoffLimit=1)
    await simulation.until(lambda: simulation.state("a") == "Failed", ticks=2000)
    assert "no acknowledgement of the plan within 300 s" in simulation.condition("a", "Failed").message
    await simulation.running("b")
    assert simulation.trainers["b"].step > 0


@pytest.mark.slow
async def test_what_a_gang_trained_until_it_is_stopped_is_no_start():
    simulation = two_on_one_gpu(30)
    await simulation.until(lambda: max(simulation.status(name).launches for name in "ab") > 2)
    for name in "ab":
        time, launches = simulation.status(name).gpu_time, len(simulation.trainers[name].resumed_from)
        assert time.startup <= 34 * launches < time.held


@pytest.mark.slow
async def test_a_gang_that_starts_leaves_a_node_that_goes():
    simulation = Simulation(nodes={"n": ("fast", 1), "m": ("fast", 1)}, roundSeconds=20)
    simulation.add_job("a", **LONG, trainer={"start_seconds": 200})
    await simulation.until(lambda: bool(simulation.nodes("a")))
    (node,) = simulation.nodes("a")
    mark(simulation, node, ITN)
    await simulation.until(lambda: simulation.nodes("a") == {"n", "m"} - {node}, ticks=140)


@pytest.mark.slow
async def test_a_gang_whose_first_step_is_dated_ahead_takes_turns_all_the_same():
    """By an operator whose clock was ahead, or by hand."""
    simulation = two_on_one_gpu(10)
    await simulation.running("a")
    item = as_sent(simulation.world.get(JOB, NAMESPACE, "a"))
    for condition in item["status"]["conditions"]:
        condition["lastTransitionTime"] = "2036-01-01T00:00:00Z"
    simulation.world.put(JOB, item)
    await simulation.until(lambda: simulation.trainers["b"].step > 0)
