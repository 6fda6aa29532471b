"""Jobs in queues of Kueue: they hold GPUs while their Workload is admitted; Kueue counts, Ballast places."""

from typing import Any

import pytest
from ballast_operator.errors import Forbidden
from ballast_operator.kube.kinds import CONFIG_MAP, JOB, POLICY, WORKLOAD
from ballast_policies.contract.messages import plan_config_map_name

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

QUEUED = {"kueue.x-k8s.io/queue-name": "vision"}


def queued(*, asks_kueue: bool = True, **spec: Any) -> Simulation:
    """A cluster of four GPUs, and job ``one`` in a queue."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)})
    simulation.asks_kueue = asks_kueue
    simulation.start_operator()
    simulation.add_job("one", **{"totalSteps": 1_000_000, **spec})
    simulation.world.patch(JOB, NAMESPACE, "one", {"metadata": {"labels": QUEUED}})
    return simulation


def workload(simulation: Simulation) -> dict[str, Any] | None:
    return simulation.world.get(WORKLOAD, NAMESPACE, "trainingjob-one")


def kueue_says(simulation: Simulation, **conditions: str) -> None:
    """As its controller does."""
    listed = [{"type": kind, "status": "True", "message": text} for kind, text in conditions.items()]
    simulation.world.patch(WORKLOAD, NAMESPACE, "trainingjob-one", {"status": {"conditions": listed}})


def waits(simulation: Simulation) -> str:
    admitted = simulation.condition("one", "Admitted")
    return admitted.message if admitted is not None and admitted.reason == "Queued" else ""


@pytest.mark.slow
async def test_a_job_in_a_queue_holds_gpus_while_kueue_admits_its_workload() -> None:
    """It asks for the largest gang. Evicted, it saves, leaves, and queues again; its end frees the quota."""
    simulation = queued(stages=(1, 3))
    simulation.add_job("other")
    await simulation.until(lambda: waits(simulation) and simulation.state("other") == "Succeeded")
    first = workload(simulation)
    assert first is not None
    (pods,) = first["spec"]["podSets"]
    assert (first["spec"]["queueName"], pods["count"]) == ("vision", 3)
    asked = pods["template"]["spec"]["containers"][0]["resources"]
    assert asked == {"requests": {"nvidia.com/gpu": "1"}, "limits": {"nvidia.com/gpu": "1"}}
    assert simulation.status("one").launches == 0
    kueue_says(simulation, Admitted="fits")
    await simulation.running("one")
    simulation.start_operator()
    await simulation.tick()
    assert (simulation.state("one"), simulation.status("one").launches) == ("Running", 1)
    kueue_says(simulation, Admitted="fits", Evicted="a dearer one came")
    await simulation.until(
        lambda: (workload(simulation) or first)["metadata"]["uid"] != first["metadata"]["uid"]
    )
    assert not simulation.pods("one")
    assert simulation.status("one").restarts == {}
    await simulation.until(lambda: "waits in queue vision" in waits(simulation))
    kueue_says(simulation, Admitted="fits again")
    await simulation.until(lambda: simulation.status("one").launches == 2)
    simulation.change("one", suspend=True)
    await simulation.until(lambda: workload(simulation) is None)
    assert not simulation.pods("one")


async def test_a_job_of_another_size_queues_again() -> None:
    """It never holds more than Kueue has counted; a Workload that is deactivated is not replaced."""
    simulation = queued()
    await simulation.until(lambda: workload(simulation) is not None)
    kueue_says(simulation, Admitted="fits")
    await simulation.running("one")
    simulation.change("one", pipeline={"maxStages": 4})

    def counted() -> int:
        found = workload(simulation)
        return found["spec"]["podSets"][0]["count"] if found else 0

    await simulation.until(lambda: counted() == 4)
    assert not simulation.pods("one")
    simulation.world.patch(WORKLOAD, NAMESPACE, "trainingjob-one", {"spec": {"active": False}})
    kueue_says(simulation, Evicted="deactivated")
    await simulation.until(lambda: "deactivated" in waits(simulation))
    await simulation.ticks(3)
    found = workload(simulation)
    assert found is not None and found["spec"]["active"] is False


@pytest.mark.parametrize("admitted", [True, False])
async def test_a_job_that_leaves_its_queue_leaves_no_workload_there(admitted: bool) -> None:
    """Its label is taken away: the quota is free, and the gang runs on, or starts, without Kueue."""
    simulation = queued()
    await simulation.until(lambda: workload(simulation) is not None)
    if admitted:
        kueue_says(simulation, Admitted="fits")
        await simulation.running("one")
    simulation.world.patch(JOB, NAMESPACE, "one", {"metadata": {"labels": dict.fromkeys(QUEUED)}})
    await simulation.until(lambda: workload(simulation) is None)
    await simulation.running("one")
    await simulation.ticks(3)
    assert (simulation.state("one"), simulation.status("one").launches) == ("Running", 1)


@pytest.mark.parametrize("asks_kueue", [True, False])
async def test_a_queue_that_is_not_asked_is_said_on_the_job(asks_kueue: bool) -> None:
    """A Workload of somebody else, or an operator without ``kueue.enabled``: it waits, and says for what."""
    simulation = queued(asks_kueue=asks_kueue)
    metadata = {"name": "trainingjob-one", "namespace": NAMESPACE}
    simulation.world.put(WORKLOAD, {"metadata": metadata, "spec": {}})
    want = ("NameTaken", "is not the job's") if asks_kueue else ("Queued", "kueue.enabled=true")
    await simulation.refused("one", *want)
    assert simulation.status("one").launches == 0


@pytest.mark.parametrize("policies", [0, 1])
async def test_kueue_is_asked_a_few_times_a_minute(policies: int, monkeypatch: Any) -> None:
    """For each job; also where there is no ClusterPolicy, and nothing to make a Workload of."""
    simulation = queued()
    simulation.by_queue, get, asked = True, simulation.cluster.get, []
    if not policies:
        simulation.world.drop(POLICY, "", "default")

    async def counted(kind: Any, *names: str) -> Any:
        asked.append(kind)
        return await get(kind, *names)

    monkeypatch.setattr(simulation.cluster, "get", counted)
    await simulation.ticks(60)
    assert 2 <= asked.count(WORKLOAD) <= 6


async def test_a_right_that_is_missing_to_ask_kueue_is_said_with_what_to_grant() -> None:
    """It is nothing to report to the authors."""
    simulation = queued()
    simulation.by_queue, get = True, simulation.cluster.get

    async def no_workloads(kind: Any, *names: str) -> Any:
        if kind is WORKLOAD:
            raise Forbidden('cannot get resource "workloads"')
        return await get(kind, *names)

    simulation.cluster.get = no_workloads
    await simulation.until(lambda: simulation.condition("one", "Reconciled") is not None)
    told = simulation.condition("one", "Reconciled")
    assert (told.is_true, told.reason) == (False, "ActionRefused")
    assert 'cannot get resource "workloads". To fix: grant' in told.message


async def test_a_job_of_another_controller_is_left_alone() -> None:
    """``managedBy``: nothing is written for it and no GPU kept; jobs that name this operator are its own."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.add_job("theirs", managedBy="kueue.x-k8s.io/multikueue")
    simulation.add_job("ours", managedBy="ballast.dev/operator")
    await simulation.until(lambda: simulation.state("ours") == "Succeeded")
    theirs = simulation.world.get(JOB, NAMESPACE, "theirs")
    assert theirs is not None and not theirs.get("status")
    assert simulation.pods("theirs") == []
    assert simulation.world.get(CONFIG_MAP, NAMESPACE, plan_config_map_name("theirs")) is None
