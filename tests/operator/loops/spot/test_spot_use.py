"""Spot machines: which pools have them, which jobs may run there by spec.spot, and what the policy limits."""

from typing import Any

import pytest
from ballast_operator.api.conditions import JobReason
from ballast_operator.kube.kinds import NODE

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import START, Simulation, at, throughput
from tests.support.examples import first_daily

PRICES = {"sure": 3.0, "spot": 1.0, "east": 1.0, "west": 1.1}


def cluster(policy: str = "min-cost", nodes: dict[str, Any] | None = None, **spec: Any) -> Simulation:
    """Pools of one GPU type: ``sure`` is on demand, the others are spot, which costs a third."""
    nodes = nodes or {"a": ("sure", 2), "b": ("spot", 2)}
    pools = {
        pool: {
            "gpuType": "v100",
            "capacityType": "onDemand" if pool == "sure" else "spot",
            "pricePerGpuHour": PRICES[pool],
        }
        for pool, _ in nodes.values()
    }
    return Simulation(nodes=nodes, pools=pools, roundSeconds=10, objective={"policy": policy}, **spec)


def add(simulation: Simulation, *names: str, **spec: Any) -> None:
    for name in names:
        simulation.add_job(name, **{"totalSteps": 100_000, "throughput": throughput(v100=1.0), **spec})


@pytest.mark.parametrize("policy", first_daily(["min-cost", "max-min-fairness", "fifo"]))
@pytest.mark.parametrize(("spot", "pool"), [("Forbid", "sure"), ("Require", "spot")])
async def test_the_job_runs_on_the_machines_that_it_may_use(policy: str, spot: str, pool: str):
    """Whatever they cost, and whatever the policy reads; explain names what was left out."""
    simulation = cluster(policy)
    add(simulation, "one", spot=spot)
    await simulation.running("one")
    assert simulation.pool("one") == pool
    other = "spot" if pool == "sure" else "sure"
    assert f"spec.spot is {spot}: not offered {other}" in simulation.status("one").last_decision.why


@pytest.mark.parametrize("policy", first_daily(["min-cost", "max-min-fairness", "fifo"]))
async def test_a_job_that_may_use_both_leaves_the_place_that_the_other_needs(policy: str):
    """Both run, each whole, in whatever order they came."""
    for order in (("picky", "any"), ("any", "picky")):
        simulation = cluster(policy)
        for name in order:
            add(simulation, name, **({"spot": "Forbid"} if name == "picky" else {}))
        await simulation.until(
            lambda simulation=simulation: (
                [simulation.pool(name) for name in ("picky", "any")] == ["sure", "spot"]
            )
        )


@pytest.mark.parametrize(("spot", "pool"), [("Forbid", "spot"), ("Require", "sure")])
async def test_without_such_a_pool_the_job_waits_and_says_why(spot: str, pool: str):
    """It is placed once the field allows it."""
    simulation = cluster(nodes={"a": (pool, 2)})
    add(simulation, "one", spot=spot)
    await simulation.tick()
    await simulation.refused(
        "one",
        JobReason.NO_MATCHING_CAPACITY_TYPE,
        f"spec.spot is {spot}",
        f": {pool}. To fix: set spec.spot to Allow",
    )
    simulation.change("one", spot="Allow")
    await simulation.running("one")


async def test_a_job_waits_for_its_machines_while_others_are_free():
    """A gang that is too large for the pools that it may use is refused with their sizes."""
    simulation = cluster(nodes={"a": ("sure", 1), "b": ("spot", 4)})
    add(simulation, "one", spot="Forbid")
    await simulation.tick()
    await simulation.refused("one", JobReason.EXCEEDS_CAPACITY, "its pools have: sure 1. To fix: ")


@pytest.mark.slow
async def test_a_running_job_stays_until_its_next_launch():
    """As a change of the template does: nothing is stopped for it."""
    simulation = cluster()
    add(simulation, "one")
    await simulation.running("one")
    assert simulation.pool("one") == "spot"
    simulation.change("one", spot="Forbid")
    await simulation.ticks(30)
    assert simulation.pool("one") == "spot"
    await simulation.relaunched("one")
    assert simulation.pool("one") == "sure"


@pytest.mark.slow
async def test_a_job_waits_for_spot_machines_until_only_on_demand_ones_are_sure():
    """The spot node is too small for its gang; those on demand idle until the last moment."""
    simulation = cluster("min-cost-slo", nodes={"a": ("sure", 2), "b": ("spot", 1)})
    add(simulation, "one", totalSteps=1000, trainer={"silent": True}, deadline=at(2000))
    await simulation.tick(seconds=10)
    assert simulation.pool("one") == ""
    assert "waits for spot machines" in simulation.status("one").last_decision.why
    await simulation.until(lambda: simulation.pool("one") == "sure", seconds=10)
    waited = (simulation.now - START).total_seconds()
    assert 500 < waited < 1000 - 180  # a start takes three minutes


def elastic(least: int, most: int) -> dict[str, Any]:
    """A gang of so many GPUs, of which each more counts for less."""
    sizes = [{"gpuType": "v100", "stages": n, "stepsPerSecond": n**0.8} for n in range(least, most + 1)]
    return {"stages": (least, most), "throughput": sizes, "trainer": {"silent": True}}


async def test_elastic_gangs_have_the_gpus_that_keep_their_deadlines_before_one_that_nothing_keeps():
    """Three GPUs keep each of two, one does not; the gang that came first is late even on eight."""
    simulation = cluster("min-cost-slo", nodes={"a": ("sure", 8)})
    for name, steps, seconds in (("far", 35_000, 1500), ("one", 20_000, 10_500), ("two", 20_000, 10_500)):
        add(simulation, name, totalSteps=steps, deadline=at(seconds), **elastic(1, 8))
    await simulation.until(lambda: all(map(simulation.pool, ("far", "one", "two"))))
    await simulation.ticks(3, seconds=10)
    assert [simulation.status(name).allocation.gpus for name in ("far", "one", "two")] == [2, 3, 3]
    told = {name: simulation.condition(name, "OnTime") for name in ("far", "one")}
    assert told["one"].reason == JobReason.DEADLINE_WITHIN_REACH
    assert told["far"].reason == JobReason.DEADLINE_OUT_OF_REACH
    assert "need 110 min on its fastest GPUs" in told["far"].message


async def test_a_gang_that_may_mix_pools_waits_for_spot_machines_as_others_do():
    """While its deadline is safe, it takes no GPUs on demand, whole or beside the two spot ones."""
    simulation = cluster("min-cost-slo", nodes={"a": ("sure", 4), "b": ("spot", 2)})
    gang = {"model": {"name": "gpt", "layers": 8}, "mixedPools": "Allowed", **elastic(3, 4)}
    add(simulation, "one", totalSteps=2000, deadline=at(10_500), **gang)
    await simulation.ticks(3, seconds=10)
    assert "waits for spot machines" in simulation.status("one").last_decision.why


@pytest.mark.parametrize(("spot", "gpus"), [(2, 2), (8, 6)])
async def test_an_elastic_gang_with_a_deadline_runs_on_what_there_is_of_spot_machines(spot: int, gpus: int):
    """Six GPUs are twice as fast as it needs, which is enough; one alone would miss the deadline."""
    simulation = cluster("min-cost-slo", nodes={"a": ("sure", 8), "b": ("spot", spot)})
    add(simulation, "one", totalSteps=20_000, deadline=at(10_500), **elastic(1, 8))
    await simulation.until(lambda: simulation.pool("one") == "spot")
    await simulation.ticks(3, seconds=10)
    assert (simulation.pool("one"), simulation.status("one").allocation.gpus) == ("spot", gpus)
    assert simulation.condition("one", "OnTime").reason == JobReason.DEADLINE_WITHIN_REACH


async def test_an_elastic_gang_waits_as_long_as_all_that_it_may_have_on_demand_keeps_its_deadline():
    """Eight GPUs take 25 minutes: its least gang would have to begin at once."""
    simulation = cluster("min-cost-slo", nodes={"a": ("sure", 8), "b": ("spot", 1)})
    add(simulation, "one", totalSteps=8000, deadline=at(4600), **elastic(2, 8))
    await simulation.tick(seconds=10)
    assert "waits for spot machines" in simulation.status("one").last_decision.why
    await simulation.until(lambda: simulation.pool("one") == "sure", seconds=10, ticks=400)
    waited = (simulation.now - START).total_seconds()
    assert 1500 < waited < 4600 - 8000 / 8**0.8 - 180  # a start takes three minutes
    await simulation.until(lambda: simulation.status("one").allocation.gpus == 8, seconds=10)


async def test_a_job_goes_on_demand_at_the_last_moment_and_stays():
    """What is left just fits before the deadline: spot machines are not sure enough, cheap as they are."""
    simulation = cluster("min-cost-slo")
    add(simulation, "one", totalSteps=3000, trainer={"silent": True}, deadline=at(3300))
    await simulation.until(lambda: simulation.pool("one") == "sure")
    await simulation.ticks(3, seconds=10)
    assert simulation.pool("one") == "sure"


def limited(**limits: float) -> Simulation:
    """Eight GPUs on demand and eight in each of two spot pools, under ``spec.spot`` of the ClusterPolicy."""
    return cluster(nodes={pool: (pool, 8) for pool in ("sure", "east", "west")}, spot=limits)


def pools(simulation: Simulation, *names: str) -> list[str]:
    return sorted(simulation.pool(name) for name in names)


def condition(simulation: Simulation) -> tuple[str, str, str]:
    found = simulation.policy_condition("WithinSpotLimits")
    return found["status"], found["reason"], found["message"]


async def test_the_cheap_part_is_used_as_far_as_it_is_allowed():
    """The policy that reads prices takes the half that it may have, and the condition counts it."""
    simulation = limited(onDemandShare=0.5)
    add(simulation, "a", "b", "c", "d")
    await simulation.running(*"abcd")
    assert pools(simulation, *"abcd") == ["east", "east", "sure", "sure"]
    status, reason, message = condition(simulation)
    assert "4 of 8 GPUs in use are spot (4 of pool east)" in message
    assert (status, reason) == ("False", "SpotLimitReached")


async def test_a_job_for_spot_machines_alone_waits_with_the_limit_as_its_reason():
    """Until enough runs beside them."""
    simulation = limited(onDemandShare=0.5)
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
    simulation = limited()
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
    for name in nodes:
        zone = "us-east-1a" if name < "n4" else "us-east-1b"
        labels = {"topology.kubernetes.io/zone": zone}
        simulation.world.patch(NODE, "", name, {"metadata": {"labels": labels}})
    add(simulation, *"abcd")
    await simulation.running(*"abcd")
    nodes = [node for name in "abcd" for node in simulation.status(name).allocation.nodes]
    assert sum(node < "n4" for node in nodes) == 4
    assert "4 of pool east in zone us-east-1a, 4 of pool east in zone us-east-1b" in condition(simulation)[2]


async def pool_status(labels_by_node, **pool):
    """What the ClusterPolicy says of a pool whose nodes have these labels."""
    simulation = Simulation(nodes={}, pools={"gpus": pool})
    for name, labels in labels_by_node.items():
        found = node(name, "gpus", 1)
        found["metadata"]["labels"] |= labels
        simulation.world.put(NODE, found)
    await simulation.tick()
    status = simulation.policy()["status"]
    differ = [c for c in status["conditions"] if c["type"] == "CapacityTypesAgree"]
    return status["capacity"][0]["capacityType"], differ[0]["message"] if differ else ""


@pytest.mark.parametrize(
    ("label", "value", "kind"),
    [
        ("karpenter.sh/capacity-type", "spot", "spot"),
        ("karpenter.sh/capacity-type", "on-demand", "onDemand"),
        ("karpenter.sh/capacity-type", "reserved", "onDemand"),
        ("eks.amazonaws.com/capacityType", "SPOT", "spot"),
        ("eks.amazonaws.com/capacityType", "ON_DEMAND", "onDemand"),
        ("cloud.google.com/gke-spot", "true", "spot"),
        ("cloud.google.com/gke-preemptible", "true", "spot"),
        ("cloud.google.com/gke-provisioning", "spot", "spot"),
        ("cloud.google.com/gke-provisioning", "standard", "onDemand"),
        ("kubernetes.azure.com/scalesetpriority", "spot", "spot"),
        ("kubernetes.azure.com/scalesetpriority", "regular", "onDemand"),
        ("node.kubernetes.io/lifecycle", "spot", "spot"),
        ("ballast.dev/capacity-type", "onDemand", "onDemand"),
        ("ballast.dev/capacity-type", "spot", "spot"),
        ("karpenter.sh/capacity-type", "something-new", "onDemand"),
        ("team", "spot", "onDemand"),
    ],
)
async def test_a_pool_that_does_not_say_is_what_its_nodes_say(label, value, kind):
    """Without a word in the policy, and without a warning."""
    assert await pool_status({"n0": {label: value}, "n1": {label: value}}) == (kind, "")


@pytest.mark.parametrize(
    ("given", "labels", "kind", "words"),
    [
        ("onDemand", {"n0": "spot"}, "onDemand", "capacityType is onDemand, but not of n0"),
        ("spot", {"n0": "on-demand"}, "spot", "karpenter.sh/capacity-type=on-demand"),
        (None, {"n0": "spot", "n1": "spot", "n2": "on-demand"}, "spot", "most nodes are spot, but not of n2"),
        ("spot", {f"n{i}": "on-demand" for i in range(9)}, "spot", "and 6 more"),
    ],
)
async def test_labels_that_contradict_are_named_and_the_pool_counts(given, labels, kind, words):
    """A condition of the ClusterPolicy says which node, by which label."""
    pool = {} if given is None else {"capacityType": given}
    nodes = {name: {"karpenter.sh/capacity-type": value} for name, value in labels.items()}
    found, message = await pool_status(nodes, **pool)
    assert found == kind
    assert words in message


async def test_the_selector_of_a_pool_without_nodes_says_it():
    """Its nodes will have this label, when they come."""
    found = await pool_status({}, nodeSelector={"cloud.google.com/gke-spot": "true"})
    assert found == ("spot", "")
