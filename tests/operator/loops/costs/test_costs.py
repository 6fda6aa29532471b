"""What jobs and nodes cost over their whole life, and policies that choose pools by their prices."""

import datetime
from pathlib import Path

import pytest
import yaml
from ballast_operator.kube.kinds import NODE, POLICY
from ballast_operator.report.costs import costs

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import START, Simulation, throughput


async def test_a_cluster_without_prices_has_hours_and_no_bill():
    """Nothing fails, and nothing is invented."""
    simulation = Simulation(nodes={"a": ("fast", 4)})
    await simulation.run_job("one")
    result = simulation.costs()
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


EXAMPLE = Path(__file__).parents[4] / "examples" / "clusterpolicy.yaml"


def shipped(policy: str) -> Simulation:
    """The example's pools, two nodes with two GPUs each, and its ClusterPolicy with another policy."""
    simulation = Simulation(nodes={})
    example = yaml.safe_load(EXAMPLE.read_text())
    example["spec"]["objective"]["policy"] = policy
    example["spec"]["roundSeconds"], example["spec"]["moves"] = 10, {}
    simulation.world.drop(POLICY, "", "default")
    simulation.world.put(POLICY, example)
    for pool in example["spec"]["nodePools"]:
        item = node(pool["name"], pool["name"], 2)
        item["metadata"]["labels"] = dict(pool["nodeSelector"])
        simulation.world.put(NODE, item)
    return simulation


@pytest.mark.parametrize("policy", ["min-cost", "min-cost-slo", "max-throughput-per-dollar"])
async def test_a_job_runs_on_spot_where_that_is_the_cheapest(policy):
    """V100s at 0.74, not at 2.48 nor at their mean; status speaks of pool and GPU type."""
    simulation = shipped(policy)
    await simulation.run_job("one", throughput=throughput(a100=2.0, v100=1.0))
    allocation = simulation.status("one").allocation
    assert (allocation.pool, allocation.gpu_type) == ("v100-spot", "v100")
    assert " at " not in simulation.status("one").last_decision.why
    shadow = simulation.policy()["status"].get("shadowPrices", {})
    assert set(shadow) <= {"a100", "v100"}
