"""Spot node groups are recognised by the labels that clouds and autoscalers give their nodes."""

import pytest
from ballast_operator.kube.kinds import NODE

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation


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
