"""Data that is read from another region counts in where jobs run, what they cost, and what they are told."""

from typing import Any

import pytest
from ballast_operator.kube.kinds import JOB, NODE

from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation, throughput

PRICES = {"east": 3.0, "west": 1.0}
REGIONS = {"east": "us-east-1", "west": "us-west-2"}
BETWEEN = [{"fromRegion": "us-east-1", "toRegion": "us-west-2", "pricePerGb": 0.02}]


def cluster(policy: str = "min-cost", *, labels: bool = True, **spec: Any) -> Simulation:
    """Two pools of the same GPUs in two regions, the one far from the data at a third of the price."""
    pools = {pool: {"gpuType": "v100", "pricePerGpuHour": price} for pool, price in PRICES.items()}
    spec = {"roundSeconds": 20, "dataPrices": BETWEEN, "objective": {"policy": policy}, **spec}
    simulation = Simulation(nodes={"a": ("east", 2), "b": ("west", 2)}, pools=pools, **spec)
    if labels:
        for node in simulation.world.items(NODE):
            region = REGIONS[node["metadata"]["labels"]["pool"]]
            node["metadata"]["labels"]["topology.kubernetes.io/region"] = region
            simulation.world.put(NODE, node)
    return simulation


def add(simulation: Simulation, name: str, read: str | None, **spec: Any) -> None:
    """A job of two ranks at a step a second, whose data is in the east."""
    if read is not None:
        spec["dataLocation"] = {"region": "us-east-1", "readPerStep": read, **spec.pop("data", {})}
    simulation.add_job(name, **{"totalSteps": 100_000, "throughput": throughput(v100=1.0), **spec})


async def test_data_that_costs_more_than_the_gpus_save_keeps_the_job_where_it_is():
    """4 USD an hour saved, 72 for data: the explanation says both; without its data the job goes west."""
    simulation = cluster()
    add(simulation, "reads", "1Gi")
    await simulation.running("reads")
    assert simulation.pool("reads") == "east"
    why = simulation.status("reads").last_decision.why
    assert (
        "pool west is cheaper by its GPUs, but it costs 72 an hour to read its data there from us-east-1"
        in why
    )
    add(simulation, "plain", None)
    await simulation.running("plain")
    assert simulation.pool("plain") == "west"
    assert simulation.status("plain").data is None
    assert "data" not in simulation.status("plain").last_decision.why


@pytest.mark.slow
async def test_data_that_costs_less_is_paid_for_and_counted_to_the_cent():
    """In the job's cost by pool, in the bill, over another leader, lost steps and a deleted job."""
    simulation = cluster()
    add(simulation, "one", "10Mi", entity="vision")
    add(simulation, "two", "10Mi", totalSteps=60)
    for second in range(150):
        if second in (30, 100):
            simulation.start_operator()
        if second == 60:
            simulation.set_node_ready("b", False)
        if second == 80:
            simulation.set_node_ready("b", True)
        await simulation.tick()
    status = simulation.status("one")
    west = next(entry for entry in status.pool_costs if entry.pool == "west")
    read = status.progress.step + status.lost_steps
    assert status.data.steps == read
    assert not [entry for entry in status.pool_costs if entry.pool == "east"]
    assert status.data.gigabytes == pytest.approx(read * 10 / 1024)
    assert status.data.cost == pytest.approx(0.02 * status.data.gigabytes)
    assert west.data_cost == pytest.approx(status.data.cost)
    assert status.cost_so_far == pytest.approx(sum(e.cost + e.data_cost for e in status.pool_costs))
    await simulation.tick(decides=True)
    total = simulation.costs().to_dict()["total"]
    assert total["data"] == pytest.approx(sum(job.data_cost for job in simulation.costs().jobs))
    assert total["data"] > 0.01
    assert total["bill"] == pytest.approx(total["jobs"] + total["deleted_jobs"] + total["idle"], abs=1e-9)
    paid = total["jobs"]
    simulation.world.drop(JOB, NAMESPACE, "one")
    await simulation.tick(decides=True)
    simulation.start_operator()
    await simulation.ticks(3)
    after = simulation.costs().to_dict()["total"]
    assert after["data"] == pytest.approx(total["data"], abs=0.005)
    assert after["jobs"] + after["deleted_jobs"] >= paid - 0.005


async def test_a_job_whose_data_has_no_price_anywhere_is_refused_with_the_reason():
    """Nothing is guessed; once the price is stated, it runs."""
    simulation = cluster(dataPrices=[], labels=False)
    add(simulation, "reads", "1Mi")
    await simulation.until(lambda: simulation.condition("reads", "Admitted") is not None)
    await simulation.ticks(5)
    await simulation.refused("reads", "NoDataPrice", "pool east has no region")
    with simulation.changed_pools() as pools:
        for name, pool in pools.items():
            pool["region"] = REGIONS[name]
    await simulation.running("reads")
    assert simulation.pool("reads") == "east"
    assert "spec.dataLocation: not offered west, no price of data from us-east-1 to us-west-2" in (
        simulation.status("reads").last_decision.why
    )


async def test_a_budget_counts_the_data():
    """What it costs at the cheapest is told, and the job stops when GPUs and data have cost the budget."""
    simulation = cluster()
    simulation.world.drop(NODE, "", "a")
    add(simulation, "reads", "1Gi", budget=1.0, totalSteps=1000)
    await simulation.until(lambda: simulation.state("reads") == "Suspended", ticks=400)
    status = simulation.status("reads")
    assert status.cost_so_far == pytest.approx(1.0, abs=0.3)
    assert status.data.cost > 0.9 * status.cost_so_far
    assert status.progress.step < 100


async def test_what_a_budget_has_to_be_is_told_with_the_data():
    """1,000 steps read 1,000 GB at 0.02: 20, and some GPU time."""
    simulation = cluster("max-min-fairness")
    simulation.world.drop(NODE, "", "a")
    add(simulation, "reads", "1Gi", budget=5.0, totalSteps=1000)
    await simulation.until(lambda: simulation.condition("reads", "BudgetExhausted") is not None)
    told = simulation.condition("reads", "BudgetExhausted")
    assert told.reason == "BudgetTooSmall"
    assert "raise spec.budget to about 22" in told.message


@pytest.mark.parametrize("client", [True, False])
async def test_the_steps_of_a_script_are_paid_for_whether_it_tells_of_them_or_not(client: bool):
    """At its end all of them are, once."""
    simulation = cluster()
    where = {"region": "us-east-1", "readPerStep": "1Mi"}
    simulation.add_script("one", command={"client": client}, dataLocation=where)
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    item = simulation.world.get(JOB, NAMESPACE, "one")
    steps = item["spec"]["totalSteps"]
    status = simulation.status("one")
    assert [entry.pool for entry in status.pool_costs] == ["west"]
    assert status.data.gigabytes == pytest.approx(steps / 1024)
    assert status.cost_so_far == pytest.approx(sum(e.cost + e.data_cost for e in status.pool_costs))
