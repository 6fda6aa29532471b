"""How often machines of a pool are taken away is counted, kept, and weighed by policies that read prices."""

import pytest
from ballast_operator.allocator.problem.capacity import ClusterCapacity
from ballast_operator.allocator.problem.hazards import spot_seen
from ballast_operator.allocator.problem.snapshot import Snapshot
from ballast_operator.api.node_pool import NodePool
from ballast_operator.kube.kinds import JOB, NODE, POLICY
from ballast_policies.allocation.price_classes import PricedPool

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation

ITN = {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"}


def cluster(count=4, **pool):
    spot = {"capacityType": "spot", "pricePerGpuHour": 1.0, **pool}
    simulation = Simulation(nodes={f"n{i}": ("spot", 1) for i in range(count)}, pools={"spot": spot})
    simulation.add_job("a", stages=(1, 2), totalSteps=100_000)
    return simulation


async def running():
    """A gang that a decision has seen on its machines."""
    simulation = cluster()
    await simulation.running("a")
    await simulation.tick(decides=True)
    return simulation


def hazard(simulation):
    return simulation.policy()["status"]["hazard"][0]


def on(simulation):
    return sorted(simulation.nodes("a"))


@pytest.mark.slow
async def test_a_machine_that_is_taken_from_under_a_gang_counts_once():
    """With a notice, or without: by the end of the node it has been counted already."""
    simulation = await running()
    first = on(simulation)[-1]
    simulation.world.patch(NODE, "", first, {"spec": {"taints": [ITN]}})
    await simulation.until(lambda: hazard(simulation)["preemptions"] == 1, ticks=60)
    await simulation.until(lambda: first not in on(simulation), ticks=20)
    simulation.world.drop(NODE, "", first)
    await simulation.ticks(10)
    assert hazard(simulation)["preemptions"] == 1
    simulation.set_node_ready(on(simulation)[0], False)
    await simulation.until(lambda: hazard(simulation)["preemptions"] == 2, ticks=60)
    found = hazard(simulation)
    assert found["perHourLow"] <= found["perHour"] < found["perHourHigh"]


@pytest.mark.slow
@pytest.mark.parametrize("notice", [True, False])
async def test_a_machine_that_goes_before_the_next_decision_counts(notice: bool):
    """No decision has seen the gang there: it was launched since the last one."""
    simulation = cluster()
    await simulation.running("a")
    first = on(simulation)[-1]
    if notice:
        simulation.world.patch(NODE, "", first, {"spec": {"taints": [ITN]}})
    else:
        simulation.set_node_ready(first, False)
    simulation.asked_to_decide()
    await simulation.until(lambda: hazard(simulation).get("preemptions", 0) == 1, ticks=60)
    await simulation.ticks(30, decides=True)
    assert hazard(simulation)["preemptions"] == 1


@pytest.mark.slow
async def test_a_machine_that_is_about_to_go_is_counted_by_one_operator_alone():
    """The next one finds the notice, and what was counted; a second notice counts again."""
    simulation = await running()
    first = on(simulation)[-1]
    simulation.world.patch(NODE, "", first, {"spec": {"taints": [ITN]}})
    await simulation.tick(decides=True)
    assert hazard(simulation)["preemptions"] == 1
    simulation.start_operator()
    await simulation.ticks(20, decides=True)
    assert hazard(simulation)["preemptions"] == 1


async def test_a_machine_counts_whose_decision_another_follows_before_it_is_reported():
    """Reports are written once a second; decisions are made more often, and each replaces the last report."""
    simulation = await running()
    simulation.world.patch(NODE, "", on(simulation)[-1], {"spec": {"taints": [ITN]}})
    await simulation.look()
    for _ in range(3):
        await simulation.allocator.decide()
    await simulation.report()
    assert hazard(simulation)["preemptions"] == 1
    await simulation.allocator.decide()
    await simulation.report()
    assert hazard(simulation)["preemptions"] == 1


async def test_idle_nodes_that_go_are_no_preemptions():
    """An autoscaler removes them to save money."""
    simulation = cluster(8)
    await simulation.running("a")
    idle = sorted({f"n{i}" for i in range(8)} - set(on(simulation)))
    simulation.world.patch(NODE, "", idle[0], {"spec": {"taints": [ITN]}})
    simulation.world.drop(NODE, "", idle[1])
    await simulation.ticks(5)
    assert hazard(simulation).get("preemptions", 0) == 0


async def test_pools_on_demand_have_no_hazard():
    """Their nodes go for other reasons."""
    simulation = cluster(capacityType="onDemand")
    await simulation.running("a")
    assert "hazard" not in simulation.policy()["status"]


@pytest.mark.parametrize(
    ("entry", "price"),
    [
        (None, 1.0),
        ({"pool": "spot"}, 1.0),
        ({"pool": "spot", "preemptions": 50, "nodeHours": 11.6}, 1.2),
        ({"pool": "spot", "preemptions": 1, "nodeHours": 1500.0}, 1.0),
        ({"pool": "spot", "preemptions": "many"}, 1.0),
    ],
)
def test_policies_weigh_the_price_of_an_hour_in_which_a_job_gets_on(entry, price):
    """Start-ups and saves are paid as well; a status that cannot be read counts as none."""
    pool = NodePool.model_validate({"name": "spot", "nodeSelector": {"a": "b"}, "gpuType": "v100"})
    priced = PricedPool(pool="spot", gpu_type="v100", price=1.0, gpus=4)
    status = {} if entry is None else {"hazard": [entry]}
    capacity = ClusterCapacity(gpu_types=("v100",), pools=(priced,))
    (found,) = spot_seen(Snapshot(capacity=capacity, jobs=()), [pool], status).useful_prices
    assert found.price == pytest.approx(price, abs=0.02)


@pytest.mark.slow
async def test_the_trainer_is_told_how_often_its_machines_are_lost():
    """Summed over its machines; another rate is told within the epoch, without a restart."""
    simulation = cluster()
    await simulation.until(
        lambda: simulation.state("a") == "Running" and bool(simulation.plan("a").failures_per_hour)
    )
    first, rate = simulation.plan("a"), hazard(simulation)["perHour"]
    assert first.failures_per_hour == pytest.approx(rate * len(on(simulation)), rel=0.1)
    item = simulation.policy()
    item["status"]["hazard"][0]["perHour"] = 100 * rate
    simulation.world.put(POLICY, item)
    await simulation.until(
        lambda: simulation.plan("a").failures_per_hour > 50 * first.failures_per_hour, ticks=200
    )
    assert simulation.plan("a").epoch == first.epoch
    assert simulation.status("a").launches == 1
    await simulation.ticks(10)
    assert simulation.state("a") == "Running"


@pytest.mark.parametrize(("kind", "steps"), [("spot", 50), ("onDemand", None)])
async def test_a_stated_interval_and_machines_that_stay_have_no_rate(kind, steps):
    """Nothing is to be chosen there."""
    simulation = cluster(capacityType=kind)
    item = simulation.world.get(JOB, NAMESPACE, "a")
    item["spec"]["checkpoint"] |= {} if steps is None else {"everySteps": steps}
    simulation.world.put(JOB, item)
    await simulation.running("a")
    await simulation.ticks(20)
    assert simulation.plan("a").failures_per_hour is None
