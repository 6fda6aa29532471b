"""What jobs pay and what their nodes cost are the same sum: in short runs, too."""

import random
from typing import Any

import pytest
from ballast_operator.kube.kinds import JOB, NODE, POD, POLICY
from ballast_operator.kube.slim import pinned_node
from ballast_operator.report.costs import costs

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import NAMESPACE, Simulation
from tests.support.examples import first_daily

PRICES = {"sure": 3.6, "spot": 1.2}
ROUNDING = 1e-4


def cluster() -> Simulation:
    simulation = Simulation(
        nodes={"a": ("sure", 2), "b": ("spot", 2), "c": ("spot", 1), "d": ("spot", 1)}, roundSeconds=15
    )
    item = simulation.world.get(POLICY, "", "default")
    for pool in item["spec"]["nodePools"]:
        pool |= {"gpuType": "v100", "pricePerGpuHour": PRICES[pool["name"]]}
    simulation.world.put(POLICY, item)
    return simulation


def bill(simulation: Simulation) -> list[dict[str, Any]]:
    return (simulation.world.get(POLICY, "", "default").get("status") or {}).get("bill") or []


class Meter:
    """What each job has paid, deleted ones included, and what the nodes cost, in small steps of time."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation, self.jobs, self.nodes = simulation, dict[str, float](), 0.0

    def present(self) -> list[str]:
        names = self.simulation.trainers
        return [name for name in names if self.simulation.world.get(JOB, NAMESPACE, name) is not None]

    def result(self) -> dict[str, Any]:
        jobs = [self.simulation.world.get(JOB, NAMESPACE, name) for name in self.present()]
        policy = self.simulation.world.get(POLICY, "", "default")
        return costs(jobs, [policy], now=self.simulation.now).to_dict()

    async def tick(self, seconds: float) -> None:
        if bill(self.simulation):
            for one in self.simulation.world.items(NODE):
                gpus = int(one["status"]["allocatable"]["nvidia.com/gpu"])
                self.nodes += PRICES[one["metadata"]["labels"]["pool"]] * gpus * seconds / 3600
        await self.simulation.tick(seconds=seconds)
        self.jobs |= {job["job"]: job["cost"] for job in self.result()["jobs"]}


@pytest.mark.slow
@pytest.mark.parametrize("number_of_launches", first_daily([12, 50]))
async def test_launches_preemptions_and_failovers(number_of_launches):
    """Jobs come, end and are deleted, nodes go and come, operators die: no cent is missing at any time."""
    rng, simulation = random.Random(2), cluster()
    meter, launches, number = Meter(simulation), 0, 0
    gone: set[str] = set()
    while launches < number_of_launches:
        number += 1
        if number % 4 == 1 and len(meter.present()) < 40:
            stages = rng.choice(((1, 1), (1, 2), (2, 2)))
            steps = rng.randint(50, 300)
            simulation.add_job(f"j{number}", stages=stages, totalSteps=steps, trainer={"total": steps})
        if rng.random() < 0.08:
            name = rng.choice("bcd")
            if name in gone:
                simulation.world.put(NODE, node(name, "spot", 2 if name == "b" else 1))
                gone.discard(name)
            elif any(pinned_node(pod) == name for pod in simulation.world.items(POD)):
                simulation.set_node_ready(name, False)
            else:
                simulation.world.drop(NODE, "", name)
                gone.add(name)
        for name in "bcd":
            if name not in gone and rng.random() < 0.2:
                simulation.set_node_ready(name, True)
        if rng.random() < 0.05:
            simulation.start_operator()
        if rng.random() < 0.02 and meter.present():
            simulation.world.drop(JOB, NAMESPACE, rng.choice(meter.present()))
        await meter.tick(rng.choice((0.2, 0.5, 0.8)))
        total = meter.result()["total"]
        assert total["bill"] - total["idle"] == pytest.approx(
            total["jobs"] + total["deleted_jobs"], abs=ROUNDING
        )
        launches = sum(simulation.status(name).launches for name in meter.present()) + sum(
            name not in meter.present() for name in meter.jobs
        )
        assert number < 3000
    total = meter.result()["total"]
    assert sum(meter.jobs.values()) > 0.05
    assert total["bill"] - total["idle"] == pytest.approx(sum(meter.jobs.values()), abs=0.01)
    assert total["bill"] == pytest.approx(meter.nodes, abs=0.01)
    assert total["idle"] >= 0
