"""spec.spot of the ClusterPolicy: what is started on spot machines, under every policy, and what is said."""

from typing import Any

import pytest
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.kinds import NODE

from tests.operator.loops.simulated.simulation import Simulation, throughput

PRICES = {"sure": 3.0, "east": 1.0, "west": 1.1}


def cluster(spot: dict[str, Any], policy: str = "min-cost", **gpus: int) -> Simulation:
    """Pools ``sure`` (on demand), ``east`` and ``west`` (spot) of one GPU type."""
    gpus = gpus or {"sure": 8, "east": 8, "west": 8}
    pools = {
        pool: {
            "gpuType": "v100",
            "capacityType": "onDemand" if pool == "sure" else "spot",
            "pricePerGpuHour": PRICES[pool],
        }
        for pool in gpus
    }
    nodes = {pool: (pool, count) for pool, count in gpus.items()}
    return Simulation(nodes=nodes, pools=pools, roundSeconds=10, objective={"policy": policy}, spot=spot)


def add(simulation: Simulation, *names: str, **spec: Any) -> None:
    for name in names:
        simulation.add_job(name, **{"totalSteps": 100_000, "throughput": throughput(v100=1.0), **spec})


def pools(simulation: Simulation, *names: str) -> list[str]:
    return sorted(simulation.pool(name) for name in names)


def condition(simulation: Simulation) -> tuple[str, str, str]:
    found = simulation.policy_condition("WithinSpotLimits")
    return found["status"], found["reason"], found["message"]


async def test_the_cheap_part_is_used_as_far_as_it_is_allowed():
    """The policy that reads prices takes the half that it may have, and the condition counts it."""
    simulation = cluster({"onDemandShare": 0.5})
    add(simulation, "a", "b", "c", "d")
    await simulation.running(*"abcd")
    assert pools(simulation, *"abcd") == ["east", "east", "sure", "sure"]
    status, reason, message = condition(simulation)
    assert "4 of 8 GPUs in use are spot (4 of pool east)" in message
    assert (status, reason) in {("True", "SpotAsAllowed"), ("False", "SpotLimitReached")}


async def test_a_job_for_spot_machines_alone_waits_with_the_limit_as_its_reason():
    """Until enough runs beside them."""
    simulation = cluster({"onDemandShare": 0.5})
    add(simulation, "one", spot="Require")
    await simulation.tick()
    await simulation.refused("one", JobReason.SPOT_LIMIT, "onDemandShare=0.5 of the ClusterPolicy")
    assert "onDemandShare=0.5" in simulation.status("one").last_decision.why
    status, reason, message = condition(simulation)
    assert (status, reason) == ("False", "SpotLimitReached")
    assert "0 of 0 GPUs in use are spot; kept off spot machines: team/one" in message
    assert simulation.metrics.registry.get_sample_value("ballast_jobs_kept_off_spot") == 1
    add(simulation, "sure", spot="Forbid")
    await simulation.running("one")
    assert condition(simulation)[:2] == ("True", "SpotAsAllowed")


@pytest.mark.slow
async def test_a_limit_that_is_lowered_stops_nothing():
    """What runs stays, the condition says so, and the next job runs elsewhere."""
    simulation = cluster({})
    add(simulation, "a", "b")
    await simulation.running(*"ab")
    assert pools(simulation, "a", "b") == ["east", "east"]
    simulation.change_policy(spot={"onDemandShare": 0.9})
    await simulation.ticks(30)
    assert pools(simulation, "a", "b") == ["east", "east"]
    assert [simulation.status(name).launches for name in "ab"] == [1, 1]
    assert condition(simulation)[:2] == ("False", "SpotLimitExceeded")
    add(simulation, "c")
    await simulation.running("c")
    assert pools(simulation, "c") == ["sure"]


async def test_gangs_are_spread_over_the_zones_of_one_pool():
    """By the label of its nodes; the condition counts each zone."""
    nodes = {f"n{at}": ("east", 2) for at in range(8)}
    pools = {"east": {"gpuType": "v100", "capacityType": "spot"}}
    simulation = Simulation(nodes=nodes, pools=pools, roundSeconds=10, spot={"mostInOnePool": 0.5})
    for node in simulation.world.items(NODE):
        zone = "a" if node["metadata"]["name"] < "n4" else "b"
        node["metadata"]["labels"]["topology.kubernetes.io/zone"] = f"us-east-1{zone}"
        simulation.world.put(NODE, node)
    add(simulation, *"abcd")
    await simulation.running(*"abcd")
    nodes = [node for name in "abcd" for node in simulation.status(name).allocation.nodes]
    assert sum(node < "n4" for node in nodes) == 4
    assert "4 of pool east in zone us-east-1a, 4 of pool east in zone us-east-1b" in condition(simulation)[2]
