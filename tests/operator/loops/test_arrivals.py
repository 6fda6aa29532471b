"""A new job that fits is launched while a decision is under way, if none could give its GPUs to others."""

from collections import Counter
from typing import Any

import pytest
from ballast_operator.kube.kinds import JOB, NODE, POLICY
from ballast_operator.views.assignment import AssignmentAction

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

pytestmark = pytest.mark.slow


async def cluster(nodes: dict[str, tuple[str, int]] | None = None, **policy: Any) -> Simulation:
    """With a job that trains; from now on no decision ends."""
    simulation = Simulation(nodes=nodes or {"a": ("fast", 4), "b": ("fast", 4)}, **policy)
    add(simulation, "first")
    await simulation.until(lambda: simulation.state("first") == "Running")
    simulation.asked_to_decide()
    await simulation.tick()
    simulation.decides = False
    return simulation


def add(simulation: Simulation, name: str, **spec: Any) -> None:
    simulation.add_job(name, totalSteps=100_000, trainer={"total": 100_000}, **spec)


def changed(simulation: Simulation, kind: Any, namespace: str, name: str, **spec: Any) -> None:
    item = simulation.world.get(kind, namespace, name)
    item["spec"].update(spec)
    item["metadata"]["generation"] = item["metadata"].get("generation", 1) + 1
    simulation.world.put(kind, item)


async def ticks(simulation: Simulation, count: int) -> None:
    for _ in range(count):
        await simulation.tick()


def held(simulation: Simulation) -> Counter[str]:
    """Node -> GPUs that launches count on."""
    found = Counter[str]()
    for name in simulation.trainers:
        allocation = simulation.status(name).allocation
        found.update(allocation.placement.nodes if allocation is not None else ())
    return found


async def test_a_new_job_that_fits_trains_before_the_next_decision():
    """It needs none; the one that comes finds it where it is, and moves nothing."""
    simulation = await cluster()
    decisions = simulation.decisions
    for number in range(3):
        add(simulation, f"new-{number}")
        await ticks(simulation, 1)
    await simulation.until(lambda: all(simulation.state(f"new-{n}") == "Running" for n in range(3)))
    assert simulation.decisions == decisions
    assert held(simulation) == {"a": 4, "b": 4}
    assert "idle" in simulation.status("new-0").condition("Admitted").message
    simulation.decides = True
    await ticks(simulation, 80)
    assert simulation.decisions > decisions
    assert [simulation.status(f"new-{n}").launches for n in range(3)] == [1, 1, 1]
    assert simulation.status("first").launches == 1


async def test_a_decision_that_has_not_seen_it_leaves_it_its_gpus():
    """It ends after the job was given GPUs, and before it holds them."""
    simulation = await cluster()
    jobs = simulation.observer.jobs()
    add(simulation, "new")
    await simulation.look()
    given = simulation.board.assignments[NAMESPACE, "new"]
    assert given.action is AssignmentAction.PLACE
    simulation.decides = True
    seen, simulation.observer.jobs = simulation.observer.jobs, lambda: jobs
    simulation.asked_to_decide()
    await simulation.decide()
    simulation.observer.jobs = seen
    assert simulation.board.assignments[NAMESPACE, "new"] == given
    add(simulation, "other", stages=(4, 4))
    await simulation.until(lambda: simulation.state("new") == "Running")
    assert simulation.status("new").allocation.placement == given.placement
    assert all(gpus <= 4 for gpus in held(simulation).values())


async def elastic(simulation: Simulation) -> None:
    add(simulation, "new", stages=(1, 4))


async def too_large(simulation: Simulation) -> None:
    add(simulation, "new", stages=(7, 7))


async def prices(simulation: Simulation) -> None:
    add(simulation, "new")


async def another_waits(simulation: Simulation) -> None:
    add(simulation, "large", stages=(7, 7))
    await ticks(simulation, 1)
    add(simulation, "new")


async def another_has_resumed(simulation: Simulation) -> None:
    changed(simulation, JOB, NAMESPACE, "paused", suspend=False)
    await ticks(simulation, 1)
    add(simulation, "new")


async def round_over(simulation: Simulation) -> None:
    await simulation.tick(seconds=100.0)
    add(simulation, "new")


async def policy_changed(simulation: Simulation) -> None:
    changed(simulation, POLICY, "", "default", roundSeconds=50)
    await ticks(simulation, 1)
    add(simulation, "new")


async def nodes_cordoned(simulation: Simulation) -> None:
    for name in "ab":
        changed(simulation, NODE, "", name, unschedulable=True)
    await ticks(simulation, 1)
    add(simulation, "new")


async def other_nodes(simulation: Simulation) -> None:
    container = {"name": "trainer", "image": "trainer:1"}
    selector = {"nodeSelector": {"pool": "fast"}, "containers": [container]}
    add(simulation, "new", template={"spec": selector})


@pytest.mark.parametrize(
    ("policy", "happens"),
    [
        ({}, elastic),
        ({}, too_large),
        ({"objective": {"policy": "min-cost"}}, prices),
        ({}, another_waits),
        ({}, another_has_resumed),
        ({}, round_over),
        ({}, policy_changed),
        ({}, nodes_cordoned),
        ({}, other_nodes),
        ({"tenants": {"namespaces": {NAMESPACE: {"maxGpus": 8}}}}, prices),
        ({"tenants": {"eachNamespace": {"maxRunningJobs": 9}}}, prices),
        ({"tenants": {"eachNamespace": {"maxWaitingJobs": 1}}}, another_has_resumed),
        ({"dryRun": True}, prices),
    ],
    ids=lambda value: value.__name__ if callable(value) else "-".join(value),
)
async def test_what_is_a_matter_of_others_or_of_the_policy_waits_for_a_decision(policy, happens):
    """The job is not launched before one has ended."""
    dry_run = policy.pop("dryRun", False)
    simulation = await cluster(**policy)
    simulation.decides = True
    add(simulation, "paused", suspend=True)
    if dry_run:
        changed(simulation, POLICY, "", "default", dryRun=True)
    await ticks(simulation, 2)
    simulation.decides = False
    await happens(simulation)
    await ticks(simulation, 3)
    assert simulation.status("new").launches == 0
    assert (NAMESPACE, "new") not in simulation.board.assignments
