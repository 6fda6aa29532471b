"""A job for which a decision raises is left out of it, and everybody else is decided on as without it."""

import copy
import datetime
import logging
from collections.abc import Callable
from typing import Any

import pytest
from ballast_operator.allocator import advice
from ballast_operator.allocator.problem import admission, capacity, snapshot
from ballast_operator.kube.kinds import JOB
from ballast_policies.scheduling import assignments, decision, measurements

from tests.operator.loops.simulated.simulation import NAMESPACE, InProcessSolver, Simulation
from tests.operator.loops.test_sharing import one_job, sharing_cluster
from tests.support.examples import first_daily

pytestmark = pytest.mark.slow

ENDLESS = {"totalSteps": 100_000}
JOBS = 40
GPUS = 20

PLACES: dict[str, tuple[Any, str, Callable[..., Any]]] = {
    "its pools": (capacity, "_pool_now", lambda *of: of[3].pods),
    "whether it takes part": (snapshot, "wants_gpus", lambda view, _: view.name),
    "its gang's size": (admission, "most_gpus", lambda view: view.name),
    "its admission": (admission, "_admit_one", lambda _, __, view, *___: view.name),
    "its speed": (measurements, "job_id", lambda key: key[1]),
    "its snapshot": (snapshot, "cluster_job", lambda one, *_: one.view.name),
    "the tenants": (snapshot, "admit_tenants", lambda _, admitted, *__: [one.view.name for one in admitted]),
    "the shares": (
        InProcessSolver,
        "solve",
        lambda _, __, problem, **___: [job.name for job in problem.jobs],
    ),
    "the round": (decision, "decide_round", lambda asked: [job.name for job in asked.jobs]),
    "its assignment": (assignments, "_next_best", lambda _, job, *__, **___: job.name),
    "its conditions": (advice, "deadline_advice", lambda _, job, *__: job.name),
}
"""Where a decision raises: a function, and what it was called with."""

OF_RUNNING_GANGS = {"its pools"}


def break_for(monkeypatch: pytest.MonkeyPatch, place: str, *names: str) -> None:
    """What is called there raises for these jobs."""
    owner, attribute, called_with = PLACES[place]
    works = getattr(owner, attribute)

    def raises(*args: Any, **kwargs: Any) -> Any:
        given = str(called_with(*args, **kwargs))
        for name in names:
            if name in given:
                raise KeyError("no such thing")
        return works(*args, **kwargs)

    monkeypatch.setattr(owner, attribute, raises)


FULL: list[Simulation] = []
"""Filled once: tests take copies."""


async def full_cluster() -> Simulation:
    """Gangs on all GPUs, and as many jobs that wait; an operator has just begun to lead."""
    if not FULL:
        nodes = {f"n{i}": ("fast", 4) for i in range(GPUS // 4)}
        filled = Simulation(nodes=nodes, roundSeconds=60, moves={"minRunSeconds": 5_000})
        for number in range(JOBS):
            filled.add_job(f"j{number:02}", stages=(1, 1), **ENDLESS)
        await filled.until(lambda: len(in_state(filled, "Running")) == GPUS)
        FULL.append(filled)
    simulation = Simulation(nodes={})
    simulation.world.objects = {key: copy.deepcopy(item) for key, item in FULL[0].world.objects.items()}
    simulation.world.version, simulation.now = FULL[0].world.version, FULL[0].now
    simulation.trainers = copy.deepcopy(FULL[0].trainers)
    await simulation.tick()
    return simulation


WITHOUT: dict[tuple[str, ...], tuple[dict[str, Any], int]] = {}


async def decided_without(*names: str) -> tuple[dict[str, Any], int]:
    """(what is decided without any error, how many gangs run then), with these jobs deleted."""
    if names not in WITHOUT:
        simulation = await full_cluster()
        for name in names:
            simulation.world.drop(JOB, NAMESPACE, name)
        WITHOUT[names] = await decided(simulation), len(in_state(simulation, "Running"))
    return WITHOUT[names]


def in_state(simulation: Simulation, state: str) -> list[str]:
    names = [item["metadata"]["name"] for item in simulation.world.items(JOB)]
    return [name for name in names if simulation.state(name) == state]


async def decided(simulation: Simulation) -> dict[str, Any]:
    """Job -> (action, placement) of a decision at the next round's beginning."""
    await simulation.tick(decides=True, seconds=61)
    return {
        key[1]: (one.action, one.placement and one.placement.nodes)
        for key, one in simulation.observer.decided.assignments.items()
        if simulation.world.get(JOB, *key) is not None
    }


def bugs(simulation: Simulation) -> float:
    reason = {"reason": "Bug"}
    return simulation.metrics.registry.get_sample_value("ballast_reconcile_errors_total", reason) or 0.0


@pytest.mark.parametrize("place", first_daily(PLACES, 5))
async def test_a_running_gang_keeps_its_gpus_and_the_others_are_decided_on(place, monkeypatch, caplog):
    """Its pods stay and its GPUs are nobody's, it is told why, and it takes part once the error is gone."""
    simulation = await full_cluster()
    bad, gone, *_ = in_state(simulation, "Running")
    expected, running = await decided_without(gone)
    simulation.world.drop(JOB, NAMESPACE, gone)
    pods = [pod["metadata"]["uid"] for pod in simulation.pods(bad)]
    with monkeypatch.context() as patched:
        break_for(patched, place, bad)
        found = await decided(simulation)
        await decided(simulation)
        assert len(in_state(simulation, "Running")) == running
        condition = simulation.condition(bad, "Decided")
        assert (condition.is_true, condition.reason) == (False, "InternalError")
        assert "it keeps its GPUs as they are: KeyError: 'no such thing'. To fix: " in condition.message
        assert bugs(simulation) >= 2
    assert {name: at for name, at in found.items() if name != bad} == {
        name: at for name, at in expected.items() if name != bad
    }
    assert len([r for r in caplog.records if r.levelno == logging.ERROR and r.exc_info]) == 1
    await decided(simulation)
    assert simulation.condition(bad, "Decided") is None
    assert [pod["metadata"]["uid"] for pod in simulation.pods(bad)] == pods
    assert simulation.status(bad).launches == 1


@pytest.mark.parametrize("place", first_daily([p for p in PLACES if p not in OF_RUNNING_GANGS], 3))
async def test_a_waiting_job_waits_and_the_others_are_decided_on(place, monkeypatch):
    """The GPUs that it would get are another's, and its condition Admitted names the error."""
    simulation = await full_cluster()
    bad, gone = in_state(simulation, "Waiting")[0], in_state(simulation, "Running")[0]
    expected, _ = await decided_without(gone, bad)
    simulation.world.drop(JOB, NAMESPACE, gone)
    with monkeypatch.context() as patched:
        break_for(patched, place, bad)
        found = await decided(simulation)
        condition = simulation.condition(bad, "Admitted")
        assert (condition.is_true, condition.reason) == (False, "InternalError")
        assert "it waits: KeyError: 'no such thing'" in condition.message
    assert {name: at for name, at in found.items() if name != bad} == expected
    await decided(simulation)
    await simulation.refused(bad, "WaitingForCapacity")


@pytest.mark.parametrize("place", ["its snapshot", "the round"])
async def test_several_jobs_at_fault_are_each_found(place, monkeypatch):
    """Three of forty, in one decision; nobody else is left out."""
    simulation = await full_cluster()
    bad = {*in_state(simulation, "Running")[3:5], in_state(simulation, "Waiting")[7]}
    with monkeypatch.context() as patched:
        break_for(patched, place, *bad)
        await decided(simulation)
        out = {
            key[1]
            for key, one in simulation.observer.decided.assignments.items()
            if one.reason == "InternalError"
        }
        assert out == bad
        before = bugs(simulation)
        await decided(simulation)
        assert bugs(simulation) == before + len(bad)


async def test_an_error_that_is_nobodys_fails_the_decision(monkeypatch):
    """It is told as before: what runs continues, and the ClusterPolicy is not Ready from the second on."""
    simulation = await full_cluster()
    monkeypatch.setattr(decision, "decide_round", lambda asked: {}["a bug"])
    before, ends = simulation.observer.decided.assignments, simulation.allocator.decider.memory.next_at
    for _ in range(2):
        simulation.now += datetime.timedelta(seconds=61)
        await simulation.attempt()
    assert simulation.observer.decided.assignments == before
    ready = simulation.policy_condition("Ready")
    assert (ready["status"], ready["reason"]) == ("False", "DecisionsFail")
    assert simulation.allocator.decider.memory.next_at == ends


async def test_a_gang_beside_one_at_fault_keeps_its_part_of_the_gpu(monkeypatch):
    """Two share a GPU, and nobody can say of one what it needs: no third one comes there."""
    simulation = sharing_cluster("n0", "n1", roundSeconds=60, moves={"minRunSeconds": 5_000})
    for name in ("one", "two", "three", "four", "five"):
        simulation.add_job(name, **one_job())
    await simulation.until(lambda: len(in_state(simulation, "Running")) == 4)
    (beside,) = (
        name
        for name in in_state(simulation, "Running")
        if simulation.status(name).allocation.nodes == simulation.status("one").allocation.nodes
        and name != "one"
    )
    with monkeypatch.context() as patched:
        break_for(patched, "its snapshot", "one")
        await decided(simulation)
        assert simulation.condition("one", "Decided").reason == "InternalError"
        assert "it shares a GPU with one of team/one" in simulation.condition(beside, "Decided").message
        assert len(in_state(simulation, "Running")) == 4
    await decided(simulation)
    assert simulation.condition(beside, "Decided") is None
    assert all(simulation.status(name).launches == 1 for name in in_state(simulation, "Running"))
