"""What jobs and nodes cost, over their whole life."""

import datetime
from collections import Counter

import pytest
from ballast_operator.kube.kinds import JOB, NODE, POLICY
from ballast_operator.report.costs import costs

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import NAMESPACE, START, Simulation

PRICES = {"fast": 3.6, "slow": 0.36}
CENT = 0.01


def priced() -> Simulation:
    """Two pools; a round is long enough that nothing else moves jobs."""
    simulation = Simulation(nodes={"a": ("fast", 4), "b": ("slow", 4)}, roundSeconds=30)
    for pool in (changed := simulation.world.get(POLICY, "", "default"))["spec"]["nodePools"]:
        pool["pricePerGpuHour"] = PRICES[pool["name"]]
    simulation.world.put(POLICY, changed)
    return simulation


def there(simulation: Simulation) -> list[str]:
    """Names of the jobs that are not deleted."""
    return [name for name in simulation.trainers if simulation.world.get(JOB, NAMESPACE, name) is not None]


def found(simulation: Simulation):
    jobs = [simulation.world.get(JOB, NAMESPACE, name) for name in there(simulation)]
    policies = [simulation.world.get(POLICY, "", "default")]
    return costs(jobs, policies, now=simulation.now)


class Meter:
    """An independent bill: what the statuses hold in each second, at the pools' prices."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.jobs, self.nodes = simulation, Counter(), 0.0

    async def tick(self, seconds: float = 1.0) -> None:
        held = {name: self.simulation.status(name).allocation for name in there(self.simulation)}
        gpus = {entry["pool"]: entry["gpus"] for entry in self.bill()}
        for name, each in held.items():
            self.jobs[name] += 0.0 if each is None else PRICES[each.pool] * each.gpus * seconds / 3600
        self.nodes += sum(PRICES[pool] * count for pool, count in gpus.items()) * seconds / 3600
        await self.simulation.tick(seconds=seconds)

    def bill(self) -> list[dict]:
        return (self.simulation.world.get(POLICY, "", "default").get("status") or {}).get("bill") or []


@pytest.mark.slow
async def test_jobs_deleted_jobs_and_idle_gpus_sum_up_to_the_nodes_bill():
    """To a cent, over starts, a new node, a finished and a deleted job, and two deaths of the operator."""
    simulation = priced()
    meter = Meter(simulation)
    simulation.add_job("one", totalSteps=10_000, trainer={"total": 10_000})
    simulation.add_job("two", stages=(1, 1), totalSteps=600, trainer={"total": 600}, entity="vision")
    simulation.add_job("three", stages=(2, 2), totalSteps=10_000, trainer={"total": 10_000})
    for second in range(400):
        if second in (50, 250):
            simulation.start_operator()
        if second == 200:
            simulation.world.put(NODE, node("c", "slow", 2))
        if second == 300:
            simulation.world.drop(JOB, NAMESPACE, "three")
        await meter.tick(7.0 if second % 10 == 0 else 1.0)
    result = found(simulation)
    total = result.to_dict()["total"]
    assert total["bill"] == pytest.approx(meter.nodes, abs=CENT)
    for job in result.jobs:
        assert job.cost == pytest.approx(meter.jobs[job.job], abs=CENT)
    # What deleted jobs held is known from the pools, which see a change one look later.
    assert total["deleted_jobs"] == pytest.approx(meter.jobs["three"], abs=2 * CENT)
    assert total["jobs"] + total["deleted_jobs"] + total["idle"] == pytest.approx(total["bill"], abs=1e-9)
    assert meter.nodes > 0.5
    assert total["deleted_jobs"] > CENT
    assert {job.job: job.team for job in result.jobs} == {"one": "", "two": "vision"}
    two = next(job for job in result.jobs if job.job == "two")
    assert two.state == "Succeeded"
    assert two.projected == two.cost > two.startup_cost > 0


@pytest.mark.slow
async def test_what_a_pool_costs_is_in_each_job_by_pool():
    """And sums up to the job's cost."""
    simulation = priced()
    simulation.add_job("one", totalSteps=10_000, trainer={"total": 10_000})
    await simulation.until(lambda: simulation.state("one") == "Running")
    for _ in range(50):
        await simulation.tick()
    status = simulation.status("one")
    assert sum(entry.cost for entry in status.pool_costs) == pytest.approx(status.cost_so_far)
    (job,) = found(simulation).jobs
    assert sum(job.by_pool.values()) == pytest.approx(job.cost)
    assert job.projected > job.cost
    assert job.on_demand_cost == pytest.approx(job.cost)


async def test_a_cluster_without_prices_has_hours_and_no_bill():
    """Nothing fails, and nothing is invented."""
    simulation = Simulation(nodes={"a": ("fast", 4)})
    simulation.add_job("one")
    await simulation.until(lambda: simulation.state("one") == "Running")
    result = found(simulation)
    assert result.to_dict()["total"]["bill"] == 0
    assert result.jobs[0].cost == 0
    assert result.jobs[0].on_demand_cost is None


def test_a_status_of_an_older_operator_still_has_its_cost():
    """Its pools are not known; the cost is."""
    job = {
        "metadata": {"name": "old", "namespace": "n"},
        "spec": {"totalSteps": 10},
        "status": {"costSoFar": 4.5, "costAt": "2026-01-01T00:00:00Z", "state": "Succeeded"},
    }
    (line,) = costs([job], [], now=START + datetime.timedelta(days=1)).jobs
    assert (line.cost, line.projected, line.by_pool) == (4.5, 4.5, {})
