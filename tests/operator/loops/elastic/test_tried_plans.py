"""Jobs with ``planner`` that leave their schedule open, and that try its best plans in their first steps."""

import asyncio

import pytest
from ballast_operator.kube.kinds import JOB
from ballast_operator.steps.gang import TRIES_NONE
from ballast_operator.views import spec
from ballast_operator.views.planned_degrees import candidates as played
from ballast_operator.views.spec import read_spec, spec_as_edited
from ballast_policies.contract.messages import ExitCode, ExitReason, TerminationMessage
from ballast_policies.planning.schedules.registry import SCHEDULES

from tests.operator.loops.simulated.machines import end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

LAYER = {"repeat": 8, "forwardSeconds": 0.01, "backwardSeconds": 0.02, "heldBytes": 2e8, "outputBytes": 1e5}
MEASURED = (0.4, 0.3, None, 0.5)


def planner(**fields) -> dict:
    gpus = [{"gpuType": name, "memory": "700M"} for name in ("fast", "slow")]
    return {"profiles": [{"layers": [LAYER]}], "gpus": gpus, "bandwidth": 1e10, **fields}


async def running(tries=MEASURED, pipeline=None, policy=None, **fields) -> Simulation:
    """A job of four GPUs, or more."""
    simulation = Simulation(nodes={"a": ("fast", 4), "b": ("slow", 4)}, roundSeconds=30, **(policy or {}))
    sizes = {"minStages": 4, "maxStages": 4, "microbatches": 8, "globalBatchSize": 16}
    simulation.add_job(
        "one",
        trainer={"tries": tries},
        totalSteps=10_000_000,
        model={"name": "gpt", "layers": 8},
        repack={"enabled": False},
        pipeline=sizes | (pipeline or {}),
        throughput=[
            {"gpuType": name, "stages": 4, "stepsPerSecond": speed}
            for name, speed in (("fast", 5), ("slow", 1))
        ],
        planner=planner(**fields),
    )
    await simulation.running("one")
    return simulation


def degrees(simulation: Simulation):
    return simulation.status("one").allocation.degrees


async def test_a_schedule_that_is_left_open_is_the_fastest_that_fits():
    """The trainer has it, and stages for it; who states 1F1B, or may grow, has 1F1B."""
    simulation = await running()
    has, config = degrees(simulation), simulation.configuration("one")
    kind = SCHEDULES[has.schedule]
    assert has.schedule != "1F1B" and config.pipeline.schedule == has.schedule
    assert (config.pipeline.max_stages, len(has.layers)) == (4, 4 * kind.stages_on_a_rank())
    assert config.plan.layers == simulation.cut("one") == has.layers
    assert has.memory_bytes <= 700e6 and simulation.plan("one").candidates == ()
    assert has.schedule in simulation.condition("one", "Admitted").message
    stated = degrees(await running(pipeline={"schedule": "1F1B"}))
    assert stated.schedule == "1F1B" and has.step_seconds < 0.95 * stated.step_seconds
    assert degrees(await running(pipeline={"minStages": 2})).schedule == "1F1B"


async def test_the_best_plans_are_tried_and_the_fastest_goes_on():
    """Status and explain tell measured beside predicted; the same GPUs have it again, others try again."""
    simulation = await running(trial=4)
    candidates = simulation.plan("one").candidates
    asked, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
    first = degrees(simulation)
    assert [(one.schedule, one.layers) for one in candidates] == [
        (one.schedule, one.layers) for one in asked.candidates_on(simulation.status("one").allocation.by_pool)
    ]
    assert (first.schedule, first.layers) == (candidates[0].schedule, candidates[0].layers)
    await simulation.until(lambda: (trial := simulation.status("one").trial) and trial.kept is not None)
    trial = simulation.status("one").trial
    assert (trial.launch, trial.gpus, trial.kept) == (1, "4 x fast", 1)
    assert [one.step_seconds for one in trial.plans] == list(MEASURED)
    assert [one.plan.step_seconds for one in trial.plans] == [one.step_seconds for one in candidates]
    assert degrees(simulation) == trial.plans[1].plan != first
    assert f"  tried    launch 1, {trial.plans[1]}, goes on" in simulation.explained("one").splitlines()
    assert "not measured" in str(trial.plans[2]) and str(trial.plans[2]).endswith(": no room")
    await simulation.relaunched("one")
    assert degrees(simulation) == trial.plans[1].plan
    assert simulation.cut("one") == simulation.configuration("one").plan.layers == trial.plans[1].plan.layers
    assert simulation.configuration("one").pipeline.schedule == trial.plans[1].plan.schedule
    assert simulation.plan("one").candidates == ()
    assert "measured fastest of 4 in launch 1" in simulation.condition("one", "Admitted").message
    await simulation.suspended("one")
    simulation.change(
        "one",
        suspend=False,
        gpuTypes=["slow"],
        planner=planner(trial=4, gpus=[{"gpuType": "slow", "memory": "700M"}]),
    )
    await simulation.running("one")
    assert len(simulation.plan("one").candidates) == 4


async def test_schedules_are_played_while_the_event_loop_turns(monkeypatch):
    on_the_loop, in_threads = [], []

    async def in_a_thread(work, *arguments, **named):
        in_threads.append(work)
        found = work(*arguments, **named)
        in_threads.pop()
        return found

    def noted(*question):
        before = played.cache_info().misses
        found = played(*question)
        if played.cache_info().misses > before:
            on_the_loop.append(not in_threads)
        return found

    played.cache_clear()
    monkeypatch.setattr(spec, "candidates", noted)
    monkeypatch.setattr(asyncio, "to_thread", in_a_thread)
    simulation = await running(trial=3)
    assert (on_the_loop, len(simulation.plan("one").candidates)) == ([False], 3)


async def test_where_nothing_can_be_tried_it_is_said():
    """Four replicas of the whole model: there is no cut to move, and no pipeline for a schedule."""
    simulation = await running(trial=4, gpus=[{"gpuType": "fast"}])
    assert (degrees(simulation).data, simulation.plan("one").candidates) == (4, ())
    assert simulation.condition("one", "Admitted").message.endswith("predicted, the only one to try")


async def test_a_trial_is_begun_again_unless_it_failed():
    """What fails in it would fail the next launch, with the planner's best; a stop says nothing of it."""
    simulation = await running(tries=(0.5,), trial=3)
    await simulation.until(lambda: simulation.status("one").trial is not None)
    first = degrees(simulation)
    await simulation.relaunched("one")
    await simulation.until(lambda: simulation.status("one").trial is not None)
    assert degrees(simulation) == first and len(simulation.plan("one").candidates) == 3
    message = TerminationMessage(reason=ExitReason.FAILED, message="no memory", step=50)
    end_pod(simulation.world, NAMESPACE, "one-2-1", ExitCode.ERROR, message)
    await simulation.until(lambda: simulation.status("one").launches == 3)
    await simulation.running("one")
    assert degrees(simulation) == first and simulation.plan("one").candidates == ()
    assert (simulation.status("one").trial.launch, simulation.status("one").trial.kept) == (2, None)


async def test_what_was_tried_counts_for_the_planner_that_it_was_tried_with():
    """Also where a new operator has yet to plan, and where the planner is edited in a trial."""
    simulation = await running(tries=(0.5, 0.4), trial=3)
    await simulation.until(lambda: simulation.status("one").trial is not None)
    trial = simulation.status("one").trial
    candidates = simulation.plan("one").candidates
    assert [one.plan.memory_bytes for one in trial.plans] == [one.memory_bytes for one in candidates]
    assert 0 < candidates[0].memory_bytes <= 700e6
    simulation.start_operator()
    await simulation.ticks(5)
    assert simulation.status("one").trial.of == trial.of
    simulation.change("one", planner=planner(trial=3, bandwidth=2e10))
    simulation.trainers["one"].tries = (0.5, 0.4, 0.6)
    await simulation.until(lambda: simulation.status("one").trial.kept is not None)
    assert (simulation.status("one").trial.of, simulation.status("one").trial.kept) == (trial.of, 1)
    await simulation.relaunched("one")
    assert len(simulation.plan("one").candidates) == 3


async def test_a_plan_fits_the_pool_of_its_launch():
    """Its GPUs may have less memory than the planner states."""
    layer, pools = LAYER | {"activationBytes": 2e7}, []
    profiles = [{"layers": [layer]}]
    usual = degrees(await running(profiles=profiles))
    stated = degrees(await running(profiles=profiles, pipeline={"schedule": "1F1B"}))
    assert stated.memory_bytes < usual.memory_bytes
    between = round((stated.memory_bytes + usual.memory_bytes) / 2)
    for name in ("fast", "slow"):
        of = {"nodeSelector": {"pool": name}, "gpuType": name, "memoryPerGpu": str(between)}
        pools.append({"name": name, **of})
    simulation = await running(profiles=profiles, policy={"nodePools": pools}, trial=3)
    candidates = simulation.plan("one").candidates
    assert degrees(simulation).memory_bytes <= between and len(candidates) > 1
    assert all(one.memory_bytes <= between for one in candidates)


async def test_a_job_whose_schedule_is_no_longer_stated_is_planned_anew():
    """Though its planner has not changed; what else is edited waits for no plan."""
    simulation = await running(pipeline={"schedule": "1F1B"})
    item = simulation.world.get(JOB, NAMESPACE, "one")
    before, _ = read_spec(item)
    simulation.change("one", weight=2.0)
    assert spec_as_edited(simulation.world.get(JOB, NAMESPACE, "one"), before)[1]
    simulation.change("one", pipeline={"schedule": None})
    assert not spec_as_edited(simulation.world.get(JOB, NAMESPACE, "one"), before)[1]
    await simulation.relaunched("one")
    assert degrees(simulation).schedule != "1F1B"


@pytest.mark.parametrize("grow", [True, False])
async def test_cuts_are_tried_where_the_schedule_is_stated(grow):
    """Also where the gang may grow, which it does not meanwhile."""
    simulation = await running(
        tries=(0.5,), trial=3, pipeline={"schedule": "1F1B", "minStages": 2 if grow else 4}
    )
    candidates = simulation.plan("one").candidates
    assert {one.schedule for one in candidates} == {"1F1B"}
    assert len({(one.layers, one.repeated) for one in candidates}) == len(candidates) == 3
    assert {one.repeated for one in candidates} == ({0} if grow else {0, 2, 4})
    await simulation.until(lambda: simulation.status("one").trial is not None)
    assert not simulation.status("one").trial.kept


async def test_a_trainer_that_tries_no_plans_is_told_of():
    """One of an older release: status says so; the next launch, whose image may be newer, tries them."""
    simulation = await running(tries=(), trial=3)
    await simulation.until(lambda: simulation.status("one").trial is not None)
    trial = simulation.status("one").trial
    assert {one.reason for one in trial.plans} == {TRIES_NONE} and trial.kept is None
    await simulation.ticks(20)
    assert simulation.status("one").trial == trial
    assert degrees(simulation) == trial.plans[0].plan
    simulation.trainers["one"].tries = (0.5, 0.4, 0.6)
    await simulation.relaunched("one")
    await simulation.until(lambda: (trial := simulation.status("one").trial) and trial.kept is not None)
    assert (simulation.status("one").trial.launch, simulation.status("one").trial.kept) == (2, 1)


async def test_forwards_are_repeated_by_the_schedules_that_need_it():
    """Or where more room leaves another cut; the next launch repeats what the fastest did."""
    layer = LAYER | {"activationBytes": 3e7}
    simulation = await running(tries=(0.5, 0.4), profiles=[{"layers": [layer]}], trial=8)
    candidates = simulation.plan("one").candidates
    assert len({one.repeated for one in candidates if one.schedule == candidates[0].schedule}) > 1
    assert all(one.memory_bytes <= 700e6 for one in candidates)
    last = next(number for number, one in enumerate(candidates) if one.repeated != candidates[0].repeated)
    simulation.trainers["one"].tries = tuple(0.5 - 0.1 * (n == last) for n in range(len(candidates)))
    await simulation.until(lambda: (trial := simulation.status("one").trial) and trial.kept is not None)
    assert degrees(simulation).repeated == candidates[last].repeated != candidates[0].repeated
    await simulation.relaunched("one")
    training = simulation.configuration("one").training
    assert training.repeated == candidates[last].repeated
    assert str(simulation.status("one").trial.plans[last]).count("recomputed") == (training.repeated > 0)
