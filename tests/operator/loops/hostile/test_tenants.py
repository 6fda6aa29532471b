"""Namespaces at their limit and figures that a stranger has written keep nobody else from being served."""

import json
import math

from ballast_operator.api.base import storable
from ballast_operator.kube.kinds import POLICY

from tests.operator.loops.simulated.simulation import Simulation


async def test_a_namespace_never_holds_more_gpus_than_its_limit():
    """Four GPUs are there, two may be held: the second job says so, and runs when the first is done."""
    simulation = Simulation(nodes={"fast-0": ("fast", 4)}, tenants={"namespaces": {"team": {"maxGpus": 2}}})
    await simulation.run_job("one")
    simulation.add_job("two")
    await simulation.until(lambda: bool(simulation.status("two").conditions))
    await simulation.refused("two", "NamespaceLimit", "tenants.namespaces.team.maxGpus=2")
    await simulation.until(lambda: simulation.state("one") == "Succeeded")
    assert simulation.pods("two") == []
    await simulation.until(lambda: simulation.state("two") == "Succeeded")


async def test_a_namespace_never_holds_more_gpus_of_a_type_than_its_limit():
    """It gets the other type; where a job wants no other it waits and says so, and is then served."""
    limits = {"namespaces": {"team": {"maxGpusByType": {"fast": 2, "old": 1}}}}
    simulation = Simulation(nodes={"fast-0": ("fast", 4), "slow-0": ("slow", 2)}, tenants=limits)
    await simulation.run_job("one", gpuTypes=["fast"])
    simulation.add_job("two")
    simulation.add_job("three", gpuTypes=["fast"])
    simulation.add_job("wide", pipeline={"minStages": 3, "maxStages": 3, "globalBatchSize": 24})
    await simulation.running("two")
    assert simulation.nodes("two") == {"slow-0"}
    await simulation.refused(
        "three", "NamespaceLimit", "may have 2 fast at a time", "tenants.namespaces.team.maxGpusByType"
    )
    await simulation.refused("wide", "NamespaceLimit", "may have 2 fast at a time, and the job needs 3")
    valid = simulation.policy_condition("Valid")
    assert "maxGpusByType limits old, of which" in valid["message"]
    await simulation.running("three")
    assert simulation.state("one") == "Succeeded"


async def test_an_edit_to_types_that_no_pool_has_leaves_the_others_of_the_namespace_their_limit():
    """The job stops, as without a limit, and says why."""
    limits = {"namespaces": {"team": {"maxGpusByType": {"fast": 2}}}}
    simulation = Simulation(nodes={"fast-0": ("fast", 4)}, tenants=limits)
    await simulation.run_job("one", gpuTypes=["fast"], totalSteps=100_000)
    simulation.change("one", gpuTypes=["none"])
    simulation.add_job("two")
    await simulation.until(lambda: simulation.state("one") == "Waiting")
    await simulation.refused("one", "NoMatchingGpuType", "gpuTypes allows none")
    await simulation.until(lambda: simulation.state("two") == "Succeeded")


async def test_a_team_and_the_teams_inside_it_never_hold_more_gpus_of_a_type_than_its_limit():
    """Under a policy that shares by no team; the inner team's own limit counts, too."""
    entities = {
        "research": {"maxGpusByType": {"fast": 2, "slow": 3}},
        "vision": {"parent": "research", "maxGpusByType": {"slow": 1}},
    }
    nodes = {"fast-0": ("fast", 4), "slow-0": ("slow", 4)}
    objective = {"policy": "max-min-fairness", "entities": entities}
    simulation = Simulation(nodes=nodes, objective=objective)
    await simulation.run_job("one", entity="research", gpuTypes=["fast"])
    simulation.add_job("two", entity="vision")
    simulation.add_job("three", entity="research")
    simulation.add_job("four")
    fields = ("research may have 2 fast, 3 slow at a time", "objective.entities.research.maxGpusByType")
    await simulation.refused("two", "TeamLimit", *fields)
    await simulation.running("three", "four")
    assert (simulation.nodes("three"), simulation.state("two")) == ({"slow-0"}, "Waiting")
    await simulation.running("two")
    assert simulation.nodes("two") == {"fast-0"}


LARGEST = 1.7e308
SINCE = "2025-01-01T00:00:00Z"


def test_what_is_stored_is_within_the_numbers_of_the_api_server():
    """Whatever the sums have come to; all else is as it was."""
    content = {
        "a": [math.inf, -math.inf, math.nan, 2**70, -(2**70)],
        "b": {"c": 1.5, "d": True, "e": "Infinity"},
    }
    found = storable(content)
    assert found["b"] == content["b"]
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert found["a"][0] > LARGEST > found["a"][2] == 0.0
    assert found["a"][3:] == [2**63 - 1, 1 - 2**63]


async def test_a_policys_sums_beyond_all_numbers_are_reported_as_the_largest():
    """A stranger has written them; the report goes on, and so do the jobs."""
    simulation = Simulation(nodes={"a": ("fast", 2)})
    await simulation.run_job("one", totalSteps=100_000)
    figures = {"cost": LARGEST, "monthCost": LARGEST, "costPerHour": LARGEST}
    bill = {
        "cost": LARGEST,
        "heldCost": LARGEST,
        "gpuSeconds": LARGEST,
        "gpus": 2**62,
        "pricePerGpuHour": 1e6,
    }
    written = {
        "teams": [{"team": "x", "since": SINCE, **figures}],
        "bill": [{"pool": "fast", "since": SINCE, **bill}],
        "billAt": SINCE,
    }
    simulation.world.patch(POLICY, "", "default", {"status": written})
    before = simulation.policy()["status"]["lastRound"]["planId"]
    await simulation.ticks(3, seconds=3600.0)
    status = simulation.policy()["status"]
    assert json.dumps(status, allow_nan=False)
    assert status["lastRound"]["planId"] != before
    (team,) = [entry for entry in status["teams"] if entry["team"] == "x"]
    assert team["cost"] >= LARGEST
    assert simulation.state("one") == "Running"
