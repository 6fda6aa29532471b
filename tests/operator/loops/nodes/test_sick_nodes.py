"""Nodes that are sick by their conditions, or by several jobs: their pods failed there, or ranks are slow."""

import datetime
from typing import Any

import pytest
from ballast_operator.kube.kinds import JOB, NODE
from ballast_policies.contract.messages import ExitReason, SlowRank, TerminationMessage

from tests.operator.loops.simulated.machines import Trainer, end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE, START, Simulation, template
from tests.operator.loops.simulated.world import World

pytestmark = pytest.mark.slow

HEALTH = {"withinSeconds": 600, "avoidSeconds": 200}
LONG = {"totalSteps": 100_000, "stages": (1, 1)}


def conditions(simulation: Simulation, name: str, *found: tuple[str, str]) -> None:
    listed = [{"type": kind, "status": status} for kind, status in (("Ready", "True"), *found)]
    simulation.world.patch(NODE, "", name, {"status": {"conditions": listed}})


def told(simulation: Simulation) -> str:
    """What the ClusterPolicy says of sick nodes; empty: nothing."""
    found = simulation.policy_condition("NodesHealthy")
    return "" if found is None else found["message"]


def fail(simulation: Simulation, name: str, reason: ExitReason = ExitReason.FAILED) -> None:
    for pod in simulation.pods(name):
        message = TerminationMessage(reason=reason, message="CUDA error: uncorrectable ECC error")
        end_pod(simulation.world, NAMESPACE, pod["metadata"]["name"], 1, message, simulation.now)


async def fail_again(simulation: Simulation, name: str, reason: ExitReason = ExitReason.FAILED) -> None:
    """A pod of the job fails, and the job is seen to have been started again."""
    launches = simulation.status(name).launches
    fail(simulation, name, reason)
    await simulation.until(
        lambda: simulation.status(name).launches > launches and simulation.state(name) == "Running"
    )


@pytest.mark.parametrize(
    ("condition", "spec"),
    [
        (("GpuMemWatch", "True"), {}),
        (("AcceleratedHardwareReady", "False"), {}),
        (("OwnCheck", "True"), {"nodeHealth": {"unhealthyConditions": ["OwnCheck"]}}),
    ],
)
async def test_nothing_is_started_on_a_node_with_a_condition_of_broken_gpus(condition: Any, spec: Any):
    """What runs there stays; the policy and the job that waits say it, until the condition is gone."""
    simulation = Simulation(nodes={"fast-0": ("fast", 1)}, **spec)
    conditions(simulation, "fast-0", (condition[0], {"True": "False", "False": "True"}[condition[1]]))
    simulation.add_job("one", stages=(1, 1), totalSteps=400)
    await simulation.running("one")
    assert not told(simulation)
    conditions(simulation, "fast-0", condition)
    simulation.add_job("two", stages=(1, 1))
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    await simulation.until(lambda: simulation.condition("two", "Admitted") is not None)
    why = f"sick, by condition {condition[0]}={condition[1]}"
    await simulation.until(lambda: why in simulation.condition("two", "Admitted").message)
    assert (simulation.status("one").launches, simulation.status("two").launches) == (1, 0)
    assert told(simulation).startswith(f"node fast-0 is {why}. To fix: ")
    assert "SickNodes" in simulation.world.events
    conditions(simulation, "fast-0")
    await simulation.until(lambda: simulation.state("two") == "Succeeded")
    assert not told(simulation)


def on_first(simulation: Simulation) -> dict[str, Any]:
    """A template for the node fast-0 alone."""
    simulation.world.patch(NODE, "", "fast-0", {"metadata": {"labels": {"name": "fast-0"}}})
    return template(nodeSelector={"name": "fast-0"})


async def test_a_node_on_which_two_jobs_failed_is_avoided_for_a_time():
    """Others start elsewhere, or wait although it is free; then it is used again."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2), "fast-1": ("fast", 1)}, nodeHealth=HEALTH)
    there = on_first(simulation)
    for name in ("a", "b"):
        simulation.add_job(name, **LONG, template=there)
    await simulation.running("a", "b")
    await fail_again(simulation, "a")
    assert not told(simulation)
    await fail_again(simulation, "b")
    # Their template allows no other: better an avoided node than none.
    assert simulation.nodes("a") == simulation.nodes("b") == {"fast-0"}
    assert told(simulation).startswith("node fast-0 is avoided until 2026-01-01T00:")
    assert "Z: pods of team/a, team/b failed there. To fix: " in told(simulation)
    await avoided_then_used_again(simulation)


async def avoided_then_used_again(simulation: Simulation) -> None:
    """The jobs that complain go; the next start on fast-1, as long as fast-0 is told to be avoided."""
    for name in ("a", "b"):
        simulation.change(name, suspend=True)
    await simulation.until(lambda: not simulation.pods("a") and not simulation.pods("b"))
    for name in ("c", "d"):
        simulation.add_job(name, **LONG)
    used: set[str] = set()
    while told(simulation):  # they take turns
        used |= simulation.nodes("c") | simulation.nodes("d")
        assert simulation.now < START + datetime.timedelta(hours=1)
        await simulation.tick(seconds=5)
    assert used == {"fast-1"}
    await simulation.running("c", "d")
    assert simulation.nodes("c") | simulation.nodes("d") == {"fast-0", "fast-1"}


@pytest.mark.parametrize("others", ["none", "other node", "own fault"])
async def test_a_node_is_not_avoided_for_one_job_that_fails(others: str):
    """However often it does; nor for another that failed elsewhere before, or names its own fault."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2), "fast-1": ("fast", 1)}, nodeHealth=HEALTH)
    there = on_first(simulation)
    simulation.add_job("a", **LONG, template=there, backoffLimit=10)
    await simulation.running("a")
    for _ in range(3):
        await fail_again(simulation, "a")
    if others == "own fault":
        simulation.add_job("b", **LONG, template=there)
        await simulation.running("b")
        await fail_again(simulation, "b", ExitReason.CONFIGURATION)
    if others == "other node":
        other = {**there["spec"], "nodeSelector": {"name": "fast-1"}}
        simulation.world.patch(NODE, "", "fast-1", {"metadata": {"labels": {"name": "fast-1"}}})
        simulation.add_job("b", **LONG, template={"spec": other})
        await simulation.running("b")
        fail(simulation, "b")
        await simulation.until(lambda: bool(simulation.status("b").restarts))
        simulation.change("b", template=there)
        await simulation.running("b")
        await fail_again(simulation, "b")
    assert not told(simulation)
    assert "SickNodes" not in simulation.world.events


async def two_measure(
    nodes: dict[str, tuple[str, int]], *slow: SlowRank, avoid_seconds: int = HEALTH["avoidSeconds"]
) -> Simulation:
    """Jobs a and b run on fast-0, and a says for minutes that these of its ranks are slow."""
    simulation = Simulation(nodes=nodes, nodeHealth={**HEALTH, "avoidSeconds": avoid_seconds})
    for name in ("a", "b"):
        simulation.add_job(name, **LONG, template=on_first(simulation))
    await simulation.running("a", "b")
    simulation.trainers["a"].slow = slow
    await simulation.ticks(40, seconds=5)
    assert not told(simulation)
    return simulation


async def test_a_node_on_which_ranks_of_two_jobs_are_slow_is_avoided_for_a_time():
    """What runs there stays, and says it again to an operator that starts."""
    slow = SlowRank(rank=0, factor=1.5)
    simulation = await two_measure({"fast-0": ("fast", 2), "fast-1": ("fast", 1)}, slow)
    simulation.trainers["b"].slow = (slow,)
    for _ in range(2):
        await simulation.until(lambda: bool(told(simulation)), seconds=5)
        assert told(simulation).startswith("node fast-0 is avoided until 2026-01-01T00:")
        assert "Z: ranks of team/a, team/b are slow there. To fix: " in told(simulation)
        simulation.start_operator()
        await simulation.until(lambda: not told(simulation), seconds=5)
    assert "SickNodes" in simulation.world.events
    assert [simulation.status(name).launches for name in "ab"] == [1, 1]
    await simulation.until(lambda: bool(told(simulation)), seconds=5)
    await avoided_then_used_again(simulation)


async def test_what_is_told_of_a_node_does_not_change_with_each_report_of_slow_ranks():
    """Ten rounds later it is told anew for how long."""
    slow = SlowRank(rank=0, factor=1.5)
    simulation = await two_measure({"fast-0": ("fast", 2), "fast-1": ("fast", 1)}, slow, avoid_seconds=2000)
    simulation.trainers["b"].slow = (slow,)
    await simulation.until(lambda: bool(told(simulation)), seconds=5)
    said = set()
    for _ in range(120):
        await simulation.tick(seconds=5)
        said.add(told(simulation))
    assert len(said) == 2


async def test_a_policy_that_turns_avoiding_off_avoids_no_node():
    """Not for the rest of a second either, again and again with each report."""
    slow = SlowRank(rank=0, factor=1.5)
    simulation = await two_measure({"fast-0": ("fast", 2)}, slow, avoid_seconds=0)
    simulation.trainers["b"].slow = (slow,)
    for _ in range(60):
        await simulation.tick(decides=True, seconds=0.7)
        assert not told(simulation)


async def test_a_failure_and_a_slow_rank_of_two_jobs_are_told_together():
    """A job whose pod failed is not heard as slow elsewhere."""
    simulation = await two_measure({"fast-0": ("fast", 2)}, SlowRank(rank=0, factor=1.5))
    await fail_again(simulation, "b")
    await simulation.until(lambda: bool(told(simulation)), seconds=5)
    assert "pods of team/b failed there and ranks of team/a are slow there" in told(simulation)


@pytest.mark.parametrize("lie", ["made anew", "no such rank", "of another plan"])
async def test_a_node_is_not_avoided_for_what_one_trainer_says(lie: str, monkeypatch: Any):
    """However often it says it, under one name; nor for ranks that the plan in force does not have."""
    slow = SlowRank(rank=0, factor=1e9)
    simulation = await two_measure({"fast-0": ("fast", 2)}, slow)
    if lie == "made anew":
        simulation.world.drop(JOB, NAMESPACE, "a")
        await simulation.until(lambda: not simulation.pods("a"))
        simulation.add_job("a", **LONG, template=on_first(simulation), trainer={"slow": (slow,)})
        await simulation.running("a")
    if lie == "no such rank":
        simulation.trainers["b"].slow = (SlowRank(rank=1, factor=1e9), SlowRank(rank=65_536, factor=1e9))
    if lie == "of another plan":
        simulation.trainers["b"].slow, report = (slow,), Trainer._report
        monkeypatch.setattr(Trainer, "_report", lambda *at: report(*at).replace(epoch=at[1].epoch + 1))
    await simulation.ticks(60, seconds=5)
    assert not told(simulation)
    assert "SickNodes" not in simulation.world.events


@pytest.mark.parametrize(("apart", "accused"), [(0, ""), (4, "node fast-1 is avoided")])
async def test_no_clock_of_a_node_says_where_a_pod_failed_first(apart: int, accused: str):
    """The clock of fast-0 is 300 s behind. Pods whose ends are told at once accuse no node."""
    simulation = Simulation(nodes={"fast-0": ("fast", 1), "fast-1": ("fast", 1)}, nodeHealth=HEALTH)
    for name in ("a", "b"):
        simulation.add_script(name, totalSteps=100_000)
        await simulation.running(name)
        pods = {pod["spec"]["nodeName"]: pod["metadata"]["name"] for pod in simulation.pods(name)}
        simulation.trainers[name].silent = True
        end_pod(simulation.world, NAMESPACE, pods["fast-1"], 1, at=simulation.now)
        await simulation.ticks(apart)
        behind = datetime.timedelta(seconds=300)
        end_pod(simulation.world, NAMESPACE, pods["fast-0"], 1, at=simulation.now - behind)
        await simulation.until(lambda name=name: bool(simulation.status(name).restarts))
        simulation.change(name, suspend=True)
        await simulation.until(lambda name=name: not simulation.pods(name))
    await simulation.ticks(5)
    assert told(simulation).startswith(accused) and bool(told(simulation)) is bool(accused)


@pytest.mark.parametrize("left", [1, 0], ids=["fewer", "none"])
async def test_a_node_that_loses_gpus_under_a_gang_is_told_and_takes_no_other(left: int, monkeypatch: Any):
    """What runs stays, as with Kubernetes. It offers none while its device plugin starts: that is no news."""
    monkeypatch.setattr(World, "checked", lambda self: None)  # pods of GPUs that the node does not offer now
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.add_job("one", stages=(2, 2), totalSteps=1_500)
    await simulation.running("one")
    simulation.world.patch(NODE, "", "fast-0", {"status": {"allocatable": {"nvidia.com/gpu": str(left)}}})
    simulation.add_job("two", stages=(1, 1), totalSteps=20)
    why = f"offers {left} GPUs, and gangs hold 2"
    await simulation.until(lambda: simulation.condition("two", "Admitted") is not None)
    await simulation.until(lambda: why in simulation.condition("two", "Admitted").message)
    assert told(simulation).startswith(f"node fast-0 {why}. To fix: ") is bool(left)
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=900)
    assert simulation.status("one").launches == 1
    if left:
        await simulation.until(lambda: simulation.state("two") == "Succeeded", ticks=100)
    await simulation.until(lambda: not told(simulation))
