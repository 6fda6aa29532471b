"""Specs with ``planner`` are read beside the event loop: their jobs wait in words, or go on as they are."""

import asyncio
import functools

import pytest
from ballast_operator.allocator.solver import Solver
from ballast_operator.api.training_job import PlannerConfig
from ballast_operator.kube.kinds import JOB
from ballast_operator.metrics import Metrics
from ballast_operator.observation.decoded import MOST_TRIES, DecodedJobs
from ballast_operator.settings import SolverSettings
from ballast_operator.tasks import keep_running
from ballast_operator.views.spec import BEING_PLANNED, read_spec, read_spec_text
from ballast_policies.contract.decode import decode

from tests.operator.loops.elastic.test_planned_degrees import PLANNED as GROWING
from tests.operator.loops.simulated import simulation as simulated
from tests.operator.loops.simulated.machines import end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.support.waiting import WAIT_SECONDS

LAYER = {"repeat": 8, "forwardSeconds": 0.01, "backwardSeconds": 0.02, "heldBytes": 1e8}
PLANNED = {
    "totalSteps": 100_000,
    "stages": (4, 4),
    "model": {"name": "gpt", "layers": 8},
    "repack": {"enabled": False},
    "planner": {"profiles": [{"layers": [LAYER]}], "gpus": [{"gpuType": "fast"}]},
}

EDITED = {**PLANNED["planner"], "bandwidth": 1e6}


class Elsewhere:
    """Answers when it is let, or at once; ``errors``: are raised first, one a question."""

    def __init__(self, *errors: Exception, at_once: bool = False) -> None:
        self.errors, self.asked = list(errors), list[str]()
        self.let = asyncio.Event()
        if at_once:
            self.let.set()

    async def read(self, name: str, text: str):
        self.asked.append(name)
        await self.let.wait()
        if self.errors:
            raise self.errors.pop(0)
        return read_spec_text((name, text))


@pytest.fixture
async def planned_by(monkeypatch):
    """A cluster whose operators have jobs planned by what is given."""
    tasks = []

    def started(elsewhere: Elsewhere, **cluster) -> Simulation:
        monkeypatch.setattr(simulated, "DecodedJobs", functools.partial(_decoding, elsewhere, tasks))
        return Simulation(**{"nodes": {"a": ("fast", 8)}, "roundSeconds": 30, **cluster})

    yield started
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _decoding(elsewhere: Elsewhere, tasks: list, caches) -> DecodedJobs:
    decoded = DecodedJobs(caches, elsewhere.read)
    planning = keep_running("planning", decoded.plan, metrics=Metrics(), sleep=lambda _: asyncio.sleep(0))
    tasks.append(asyncio.create_task(planning))
    return decoded


def admitted(simulation: Simulation) -> tuple[str, str]:
    """(reason, message) of the job ``one``."""
    found = simulation.condition("one", "Admitted")
    return ("", "") if found is None else (found.reason, found.message)


async def test_a_job_waits_until_its_degrees_are_planned_and_says_so(planned_by):
    """Others start meanwhile."""
    elsewhere = Elsewhere()
    simulation = planned_by(elsewhere)
    simulation.add_job("one", **PLANNED)
    await simulation.run_job("other", stages=(2, 2), totalSteps=100_000)
    assert admitted(simulation) == ("Pending", BEING_PLANNED)
    assert simulation.status("one").allocation is None
    elsewhere.let.set()
    await simulation.running("one")
    assert simulation.status("one").allocation.degrees is not None
    assert elsewhere.asked == ["one"]


async def test_a_running_job_goes_on_while_an_edit_or_a_new_operator_plans(planned_by):
    """Its degrees, size and launch stay; then the edit counts."""
    elsewhere = Elsewhere(at_once=True)
    simulation = planned_by(elsewhere)
    await simulation.run_job("one", **PLANNED)
    before, edited = simulation.status("one").allocation, decode(PlannerConfig, EDITED)
    for change in (lambda: simulation.change("one", planner=EDITED), simulation.start_operator):
        elsewhere.let.clear()
        change()
        await simulation.ticks(20)
        status = simulation.status("one")
        assert (status.launches, status.allocation.degrees) == (1, before.degrees)
        assert status.allocation.ending is None and simulation.state("one") == "Running"
        elsewhere.let.set()
        await simulation.until(lambda: spec_of(simulation).asked.planner == edited)
    await simulation.ticks(20)
    assert simulation.status("one").launches == 1


def spec_of(simulation: Simulation, name: str = "one"):
    """That of the job as the operator has it."""
    return simulation.observer.job((NAMESPACE, name)).spec


async def test_an_edit_on_which_no_plan_depends_counts_at_once(planned_by):
    """No plan is asked for, nor is one that is being made waited for: its edit counts once it is there."""
    elsewhere = Elsewhere(at_once=True)
    simulation = planned_by(elsewhere)
    await simulation.run_job("one", **PLANNED)
    elsewhere.let.clear()
    simulation.change("one", weight=7.0)
    await simulation.ticks(5)
    assert (spec_of(simulation).asked.weight, elsewhere.asked) == (7.0, ["one"])
    simulation.change("one", planner=EDITED)
    await simulation.ticks(5)
    simulation.change("one", suspend=True)
    await simulation.until(lambda: simulation.state("one") == "Suspended")
    elsewhere.let.set()
    simulation.change("one", suspend=False)
    await simulation.running("one")
    await simulation.until(lambda: spec_of(simulation).asked.planner.bandwidth == 1e6)
    assert (spec_of(simulation).asked.weight, spec_of(simulation).asked.suspend) == (7.0, False)


@pytest.mark.parametrize("after", ["joining", "growing", "shrinking", "abandoned"])
async def test_a_new_operator_finishes_a_change_of_size_before_it_has_planned(planned_by, after):
    """The ranks that join are told their stages, and the degrees of the status are those of the gang."""
    elsewhere = Elsewhere(at_once=True)
    simulation = planned_by(elsewhere, nodes={"a": ("fast", 4), "b": ("fast", 4)})
    simulation.add_job("two", stages=(4, 4), totalSteps=100)
    simulation.add_job("one", **GROWING)
    await simulation.running("one", "two")
    four = simulation.status("one").allocation.degrees

    def begun() -> bool:
        plan, allocation = simulation.plan("one"), simulation.status("one").allocation
        if after == "shrinking":
            return len(plan.pods) < len(allocation.pods)
        return bool(allocation.joining) and (after != "growing" or len(plan.ranks) == 8)

    if after == "shrinking":
        await simulation.until(lambda: (grown := simulation.condition("one", "Grown")) and grown.is_true)
        simulation.add_job("three", stages=(4, 4), totalSteps=100_000)
    await simulation.until(begun)
    elsewhere.let.clear()
    simulation.start_operator()
    if after == "abandoned":
        await simulation.until(lambda: simulation.pods("one")[2:])
        end_pod(simulation.world, NAMESPACE, simulation.pods("one")[-1]["metadata"]["name"], 1)
    await simulation.until(lambda: not begun())
    status, cut = simulation.status("one"), simulation.cut("one")
    assert len(cut) == status.allocation.gpus == (8 if after in ("joining", "growing") else 4)
    assert status.allocation.degrees.layers == cut
    assert (status.allocation.degrees.layers == four.layers) == (len(cut) == 4)
    assert simulation.never_restarted("one")


async def test_a_new_operator_keeps_a_gang_whose_edit_does_not_fit_its_degrees_while_it_plans(planned_by):
    """The model was changed for the next launch; what cannot be planned then stops the gang as ever."""
    elsewhere = Elsewhere(at_once=True)
    simulation = planned_by(elsewhere)
    await simulation.run_job("one", **PLANNED)
    fewer = {"profiles": [{"layers": [{**LAYER, "repeat": 6}]}], "gpus": [{"gpuType": "fast"}]}
    simulation.change("one", model={"name": "gpt", "layers": 6}, planner=fewer)
    await simulation.ticks(5)
    elsewhere.let.clear()
    simulation.start_operator()
    await simulation.ticks(20)
    status = simulation.status("one")
    assert (status.launches, simulation.state("one"), status.allocation.ending) == (1, "Running", None)
    elsewhere.errors += [TimeoutError()] * MOST_TRIES
    elsewhere.let.set()
    await simulation.until(lambda: simulation.status("one").allocation is None)
    assert "planning takes too long" in admitted(simulation)[1]


async def test_a_new_operator_keeps_a_gang_in_several_pools_that_it_has_not_planned_yet(planned_by):
    """The slow GPUs hold less than the fullest fast one takes."""
    elsewhere = Elsewhere(at_once=True)
    pools = {"fast": {"memoryPerGpu": "1G"}, "slow": {"memoryPerGpu": "260M"}}
    simulation = planned_by(elsewhere, nodes={"f": ("fast", 2), "s": ("slow", 2)}, pools=pools)
    gpus = [{"gpuType": "fast", "speed": 4.0, "memory": "1G"}, {"gpuType": "slow", "memory": "260M"}]
    simulation.add_job(
        "one", **{**PLANNED, "planner": {**PLANNED["planner"], "gpus": gpus}}, mixedPools="Allowed"
    )
    await simulation.running("one")
    before = simulation.status("one").allocation
    assert len(before.parts) == 2 and before.degrees.memory_bytes > 260e6
    for let in (elsewhere.let.clear, elsewhere.let.set):
        let()
        simulation.start_operator()
        await simulation.ticks(70)
        status = simulation.status("one")
        assert (status.launches, status.allocation.parts, status.allocation.ending) == (1, before.parts, None)


class InAProcess(Elsewhere):
    """As the operator has it."""

    def __init__(self, solver: Solver) -> None:
        super().__init__()
        self._solver = solver

    async def read(self, name: str, text: str):
        return await self._solver.answer(read_spec_text, (name, text))


@pytest.mark.processes
async def test_a_plan_of_the_process_is_the_one_that_is_made_here(planned_by):
    async with Solver(SolverSettings(limit_seconds=WAIT_SECONDS, start_seconds=WAIT_SECONDS)) as solver:
        simulation = planned_by(InAProcess(solver))
        simulation.add_job("one", **PLANNED)
        async with asyncio.timeout(WAIT_SECONDS):
            while simulation.state("one") != "Running":
                await simulation.tick()
                await asyncio.sleep(0.02)
        spec, _ = read_spec(simulation.world.get(JOB, NAMESPACE, "one"))
        assert simulation.status("one").allocation.degrees == spec.plans["fast"][4]


@pytest.mark.parametrize(
    ("errors", "said"),
    [
        ([TimeoutError()] * MOST_TRIES, "spec.planner: planning takes too long. To fix: "),
        ([ConnectionError("the process died")] * MOST_TRIES, "cannot be planned: the process died. To fix: "),
        ([LookupError("an answer of nobody")], "cannot be planned: an answer of nobody. To fix: "),
        ([ValueError("RecursionError: deep")], "cannot be planned: RecursionError: deep. To fix: "),
    ],
)
async def test_what_cannot_be_planned_is_told_on_the_job_alone(planned_by, errors, said):
    elsewhere = Elsewhere(*errors, at_once=True)
    simulation = planned_by(elsewhere)
    simulation.add_job("one", **PLANNED)
    await simulation.until(lambda: said in admitted(simulation)[1])
    assert admitted(simulation)[0] == "Misconfigured"
    await simulation.run_job("next", **PLANNED)


@pytest.mark.parametrize("error", [ConnectionError("the process died"), TimeoutError()], ids=repr)
async def test_a_process_that_died_or_was_late_once_is_asked_again(planned_by, error):
    elsewhere = Elsewhere(error, at_once=True)
    simulation = planned_by(elsewhere)
    await simulation.run_job("one", **PLANNED)
    assert elsewhere.asked == ["one"] * 2


async def test_no_job_is_refused_or_forgotten_while_no_process_starts(planned_by):
    """It is no job's fault, and passes: all are planned once one starts."""
    elsewhere = Elsewhere(*[OSError("no process starts")] * 1000)
    simulation = planned_by(elsewhere)
    simulation.add_job("one", **PLANNED)
    simulation.add_job("other", **{**PLANNED, "totalSteps": 50_000})
    elsewhere.let.set()
    why = ("Pending", f"{BEING_PLANNED}, which waits: no process starts")
    await simulation.until(lambda: admitted(simulation) == why)
    elsewhere.errors.clear()
    await simulation.running("one")
    await simulation.running("other")


async def test_jobs_that_have_ended_are_planned_after_those_that_wait(planned_by):
    """A new operator finds them all at once; the first is under way when the others come."""
    elsewhere = Elsewhere(at_once=True)
    simulation = planned_by(elsewhere)
    for name, steps in (("one", 10), ("two", 11)):
        simulation.add_job(name, **{**PLANNED, "totalSteps": steps})
        await simulation.until(lambda name=name: simulation.state(name) == "Succeeded")
    elsewhere.let.clear()
    elsewhere.asked.clear()
    simulation.start_operator()
    await simulation.ticks(3)
    simulation.add_job("three", **PLANNED)
    await simulation.ticks(3)
    elsewhere.let.set()
    await simulation.running("three")
    await simulation.until(lambda: len(elsewhere.asked) == 3)
    assert elsewhere.asked[1] == "three"
    assert [simulation.state(name) for name in ("one", "two")] == ["Succeeded"] * 2


async def two_that_measure(simulation):
    """Jobs ``one`` and ``two`` run, and their layers take other times than stated."""
    for name, steps in (("one", 10**6), ("two", 10**6 + 1)):
        simulation.add_job(name, **{**PLANNED, "totalSteps": steps}, trainer={"layers": (0.01,) * 8})
    await simulation.running("one", "two")
    return simulation


async def test_jobs_whose_layers_were_measured_are_planned_after_those_that_wait(planned_by):
    """Each goes on with the plan that it has; the first may be under way when the other comes."""
    elsewhere = Elsewhere(at_once=True)
    simulation = await two_that_measure(planned_by(elsewhere))
    elsewhere.let.clear()
    elsewhere.asked.clear()
    await simulation.until(lambda: all(simulation.status(name).measured_layers for name in ("one", "two")))
    simulation.add_job("three", **PLANNED)
    await simulation.ticks(3)
    elsewhere.let.set()
    await simulation.until(lambda: len(elsewhere.asked) == 3)
    assert "three" in elsewhere.asked[:2]
    await simulation.until(lambda: spec_of(simulation).plans["fast"][4].measured_on == ("fast",))
    assert [simulation.status(name).launches for name in ("one", "two")] == [1, 1]


async def test_a_new_operator_plans_jobs_that_go_on_by_measured_layers_after_those_that_wait(planned_by):
    """Their launches have degrees; a job that waits has none. The first may be under way when it comes."""
    elsewhere = Elsewhere(at_once=True)
    simulation = await two_that_measure(planned_by(elsewhere))
    await simulation.until(
        lambda: all(spec_of(simulation, name).question.measured for name in ("one", "two"))
    )
    elsewhere.let.clear()
    elsewhere.asked.clear()
    simulation.start_operator()
    await simulation.ticks(3)
    simulation.add_job("three", **PLANNED)
    await simulation.ticks(3)
    elsewhere.let.set()
    await simulation.until(lambda: len(elsewhere.asked) >= 3)
    assert "three" in elsewhere.asked[:2]
    assert [simulation.status(name).launches for name in ("one", "two")] == [1, 1]


async def test_jobs_that_measured_other_layers_share_what_their_plans_are_made_from(planned_by):
    """The layers that a planner states are most of a spec: with 96 of three degrees 0.4 MB."""
    simulation = planned_by(Elsewhere(at_once=True))
    for name, seconds in (("one", 0.01), ("two", 0.02)):
        simulation.add_job(name, **PLANNED, trainer={"layers": (seconds,) * 8})
    await simulation.running("one", "two")
    await simulation.until(
        lambda: all(spec_of(simulation, name).question.measured for name in ("one", "two"))
    )
    one, two = (spec_of(simulation, name) for name in ("one", "two"))
    assert one.question.measured != two.question.measured
    assert (
        len({id(planner) for spec in (one, two) for planner in (spec.asked.planner, spec.question.planner)})
        == 1
    )


@pytest.mark.parametrize("error", [TimeoutError(), ConnectionError(), RuntimeError("no solver")], ids=repr)
async def test_a_job_that_cannot_be_planned_by_what_was_measured_keeps_its_plan(planned_by, error):
    """As on a busy machine: nobody has edited it, and it goes on as it is, also with later edits."""
    elsewhere = Elsewhere(at_once=True)
    simulation = planned_by(elsewhere)
    await simulation.run_job("one", **PLANNED, trainer={"layers": (0.01,) * 8})
    elsewhere.errors += [error] * MOST_TRIES
    await simulation.until(lambda: len(elsewhere.asked) > 1)
    simulation.change("one", weight=7.0)
    await simulation.ticks(20)
    assert spec_of(simulation).asked.weight == 7.0
    assert (simulation.state("one"), simulation.status("one").launches) == ("Running", 1)


async def test_namespaces_take_turns(planned_by):
    """The first is under way when the others come."""
    elsewhere = Elsewhere()
    simulation = planned_by(elsewhere)
    for number in range(4):
        simulation.add_job(f"many-{number}", **{**PLANNED, "totalSteps": 100_000 + number})
    await simulation.ticks(3)
    other = simulated.job("other", **{**PLANNED, "totalSteps": 5})
    other["metadata"]["namespace"] = "another"
    simulation.world.put(JOB, other)
    await simulation.ticks(3)
    elsewhere.let.set()
    await simulation.until(lambda: len(elsewhere.asked) == 5)
    assert elsewhere.asked[:2] == ["many-0", "other"]


async def test_jobs_of_one_text_are_planned_once(planned_by):
    """The runs of an experiment wait for the first one's plan, and share it."""
    elsewhere = Elsewhere()
    simulation = planned_by(elsewhere)
    for name in ("one", "second", "third"):
        simulation.add_job(name, **PLANNED)
    await simulation.ticks(3)
    elsewhere.let.set()
    await simulation.running("one")
    await simulation.running("second")
    specs = [simulation.observer.job((NAMESPACE, name)).spec for name in ("one", "second", "third")]
    assert specs[0] is not None and all(spec is specs[0] for spec in specs)
    assert len(elsewhere.asked) == 1


async def test_a_job_that_is_edited_or_deleted_meanwhile_has_its_newest_plan_alone(planned_by):
    elsewhere = Elsewhere()
    simulation = planned_by(elsewhere)
    simulation.add_job("gone", **PLANNED)
    simulation.add_job("one", **PLANNED)
    await simulation.ticks(3)
    simulation.world.drop(JOB, NAMESPACE, "gone")
    simulation.change("one", planner={**PLANNED["planner"], "gpus": [{"gpuType": "slow"}]})
    await simulation.ticks(3)
    elsewhere.let.set()
    await simulation.until(lambda: admitted(simulation)[0] == "NoMatchingGpuType")
