"""Jobs without a model, from their creation to their end, over a cluster in memory."""

import datetime

import pytest
from ballast_operator.kube.kinds import CONFIG_MAP, LEASE, POD
from ballast_policies.contract.messages import FINISHED_ANNOTATION
from ballast_policies.protocol.observed import Cause

from tests.operator.loops.simulated.machines import end_pod
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, fast_and_slow


async def running(**command) -> Simulation:
    simulation = fast_and_slow()
    simulation.add_script("one", command=command, totalSteps=1000)
    await simulation.running("one")
    return simulation


def environment(pod) -> dict:
    return {
        one["name"]: one.get("value", one.get("valueFrom")) for one in pod["spec"]["containers"][0]["env"]
    }


@pytest.mark.parametrize("client", [False, True])
async def test_a_script_runs_and_succeeds_when_every_rank_has_exited_with_success(client):
    """No lease is needed; with the client there is progress."""
    simulation = fast_and_slow()
    simulation.add_script("one", command={"client": client})
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    status = simulation.status("one")
    assert status.allocation is None and status.launches == 1 and not status.restarts
    assert (status.progress is not None) is client
    assert simulation.pods("one") == []


async def test_the_ranks_of_a_script_find_each_other():
    """Rank 0 knows its own address; the others read it once it is known."""
    simulation = await running()
    first, second = sorted(simulation.pods("one"), key=lambda pod: pod["metadata"]["name"])
    own, other = environment(first), environment(second)
    assert (own["RANK"], own["WORLD_SIZE"], own["LOCAL_RANK"]) == ("0", "2", "0")
    assert own["MASTER_ADDR"] == {"fieldRef": {"fieldPath": "status.podIP"}}
    assert (other["RANK"], other["PET_NODE_RANK"], other["MASTER_PORT"]) == ("1", "1", "29400")
    reference = other["MASTER_ADDR"]["configMapKeyRef"]
    told = simulation.world.get(CONFIG_MAP, NAMESPACE, reference["name"])
    assert told["data"][reference["key"]] == first["status"]["podIP"]


async def test_a_script_that_ends_before_the_plan_is_written_has_succeeded():
    """A command may take less time than a pass of the operator."""
    simulation = fast_and_slow()
    simulation.add_script("one", ranks=(1, 1))
    await simulation.until(lambda: bool(simulation.world.items(POD)))
    (pod,) = simulation.world.items(POD)
    end_pod(simulation.world, NAMESPACE, pod["metadata"]["name"], 0)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").launches == 1


async def test_the_last_step_counts_of_a_client_that_has_read_no_plan():
    """A resumed script may end sooner than it looks for a plan: it names its last step alone."""
    simulation = fast_and_slow()
    simulation.add_script("one", ranks=(1, 1), totalSteps=1000)
    await simulation.until(lambda: bool(simulation.world.items(LEASE) and simulation.world.items(POD)))
    (lease,), (pod,) = simulation.world.items(LEASE), simulation.world.items(POD)
    said = {"metadata": {"annotations": {FINISHED_ANNOTATION: "1000"}}}
    simulation.world.patch(LEASE, NAMESPACE, lease["metadata"]["name"], said)
    end_pod(simulation.world, NAMESPACE, pod["metadata"]["name"], 0)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    progress = simulation.status("one").progress
    assert (progress.step, progress.percent) == (1000, 100)


async def test_without_the_client_the_status_says_what_is_lost():
    """After a while, since the client has to be imported first."""
    simulation = await running(total=10_000)
    assert simulation.condition("one", "Reporting") is None
    await simulation.until(lambda: simulation.condition("one", "Reporting") is not None)
    condition = simulation.condition("one", "Reporting")
    assert (condition.is_true, condition.reason) == (False, "NoClient")
    assert "since spec.throughput does not have" in condition.message
    assert simulation.state("one") == "Running"


async def test_without_the_client_the_time_of_its_gpus_is_told_while_it_runs():
    """Cost and goodput follow from GPUs that are held: no report is needed."""
    simulation = await running(total=100_000)
    await simulation.until(lambda: simulation.condition("one", "Reporting") is not None)
    before = simulation.status("one").cost_at
    await simulation.ticks(60, seconds=5.0)
    after = simulation.status("one")
    assert after.state == "Running" and after.cost_at > before
    assert after.gpu_time.goodput > 0.5


@pytest.mark.slow
async def test_a_script_without_the_client_is_deleted_at_once_and_resumes_by_itself():
    """No process would hear a request to save: its pods get SIGTERM."""
    simulation = await running()
    simulation.change("one", suspend=True)
    ticks = await simulation.until(lambda: simulation.state("one") == "Suspended")
    assert ticks < 10 and not simulation.pods("one")
    simulation.change("one", suspend=False)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.status("one").launches == 2


@pytest.mark.slow
async def test_a_script_with_the_client_saves_before_it_stops():
    """Nothing is lost by a preemption."""
    simulation = await running(client=True)
    command = simulation.trainers["one"]
    await simulation.until(lambda: command.step > 20)
    await simulation.suspended("one")
    saved = command.step
    simulation.change("one", suspend=False)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert command.resumed_from == [0, saved]


async def test_an_exit_with_success_after_the_order_to_stop_is_no_success():
    """A script that leaves its loop when it is told to, and falls off its end, is not done."""
    simulation = await running(client=True)
    simulation.trainers["one"].silent = True
    simulation.change("one", suspend=True)
    await simulation.tick()
    await simulation.tick()
    for pod in simulation.pods("one"):
        end_pod(simulation.world, NAMESPACE, pod["metadata"]["name"], 0)
    await simulation.until(lambda: simulation.state("one") == "Suspended")


@pytest.mark.slow
async def test_a_rank_that_loses_its_peer_is_not_at_fault():
    """One pod is killed, the other fails for want of it: no failure of the job's own."""
    simulation = await running()
    end_pod(simulation.world, NAMESPACE, "one-1-0", 137)
    await simulation.until(lambda: simulation.status("one").launches == 2)
    assert simulation.status("one").restarts == {Cause.POD_LOST: 1}
    await simulation.until(lambda: simulation.state("one") == "Succeeded")


async def test_an_error_counts_once_a_lost_peer_would_have_been_seen():
    """All ranks of a wrong script fail, and it fails for good after backoffLimit."""
    simulation = fast_and_slow()
    simulation.add_script("one", totalSteps=1000, backoffLimit=0)
    await simulation.running("one")
    end_pod(simulation.world, NAMESPACE, "one-1-1", 1)
    await simulation.until(lambda: simulation.state("one") == "Failed")
    assert simulation.status("one").restarts == {Cause.USER_ERROR: 1}


@pytest.mark.parametrize("ahead", [-300, 0, 300])
async def test_a_lost_node_under_a_script_is_no_failure_of_its_own(ahead: int):
    """Its peers fail at once; the node is known to be lost much later. Clocks of nodes may be wrong."""
    simulation = Simulation(nodes={"a": ("fast", 1), "b": ("fast", 1)})
    simulation.add_script("one", totalSteps=1000)
    await simulation.running("one")
    command = simulation.trainers["one"]
    command.silent = True
    ended = simulation.now + datetime.timedelta(seconds=ahead)
    end_pod(simulation.world, NAMESPACE, "one-1-1", 1, at=ended)
    await simulation.ticks(40)
    assert simulation.status("one").restarts == {}
    simulation.set_node_ready("a", False)
    await simulation.until(lambda: simulation.status("one").restarts != {})
    assert simulation.status("one").restarts == {Cause.NODE_LOST: 1}
