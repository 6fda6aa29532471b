"""Gangs and tainted nodes: what is started where, and what a job that waits says of it."""

import pytest
from ballast_operator.allocator.problem.snapshot import Observed, take_snapshot
from ballast_operator.allocator.problem.throughput import Measurements
from ballast_operator.api.read import read_cluster_policy
from ballast_operator.kube.kinds import NODE
from ballast_operator.views import node_constraints as taints
from ballast_operator.views.nodes import read_node

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import START, Simulation, policy, template
from tests.operator.views.builders import a_spec, a_view

TAINT = {"key": "team", "value": "vision", "effect": "NoSchedule"}
TOLERATION = {"key": "team", "operator": "Exists"}


def taint(simulation: Simulation, name: str, *taints: dict) -> None:
    simulation.world.patch(NODE, "", name, {"spec": {"taints": list(taints)}})


@pytest.mark.parametrize(
    "found",
    [
        {"key": "aws-node-termination-handler/spot-itn", "effect": "NoSchedule"},
        {"key": "ToBeDeletedByClusterAutoscaler", "value": "1732145043", "effect": "NoSchedule"},
        TAINT,
        {"key": "node.kubernetes.io/disk-pressure", "effect": "NoSchedule"},
        {"key": "drain", "effect": "NoExecute"},
    ],
)
async def test_nothing_is_started_on_a_node_with_a_taint_that_the_template_does_not_tolerate(found):
    """The gang goes to the other node; a second one waits, and its condition names the taint."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2), "fast-1": ("fast", 2)})
    taint(simulation, "fast-0", found)
    simulation.add_job("one")
    simulation.add_job("two")
    await simulation.running("one")
    assert simulation.nodes("one") == {"fast-1"}
    assert simulation.pods("two") == []
    message = simulation.condition("two", "Admitted").message
    assert found["key"] in message
    assert "1 node of pool fast" in message


async def test_a_template_that_tolerates_the_taint_is_started_there():
    """And its pods carry the toleration, beside the one for the GPUs that they ask for."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    taint(simulation, "fast-0", TAINT, {"key": "nvidia.com/gpu", "value": "present", "effect": "NoSchedule"})
    simulation.add_job("intolerant")
    await simulation.run_job("one", template=template(tolerations=[TOLERATION]))
    own = {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}
    assert all(pod["spec"]["tolerations"] == [TOLERATION, own] for pod in simulation.pods("one"))
    admitted = simulation.condition("intolerant", "Admitted")
    assert admitted.reason == "ExceedsCapacity"
    assert (
        "1 node of pool fast has taint team=vision:NoSchedule, which the template does not tolerate. "
        "To fix: add the tolerations to spec.template, or " in admitted.message
    )


async def test_a_grant_is_taken_back_when_its_node_gets_a_taint_before_the_launch():
    """Between decision and launch a node may get its notice: the gang is placed elsewhere at once."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)}, roundSeconds=600)
    simulation.add_job("one")
    launch, simulation.reconciler.reconcile = simulation.reconciler.reconcile, _nothing
    await simulation.tick()  # granted, not launched
    taint(simulation, "fast-0", {"key": "karpenter.sh/disrupted", "effect": "NoSchedule"})
    simulation.world.put(NODE, node("fast-1", "fast", 2))
    simulation.reconciler.reconcile = launch
    await simulation.running("one", ticks=20)
    assert simulation.nodes("one") == {"fast-1"}


async def _nothing(_key: object) -> None:
    """In place of a job's pass."""


@pytest.mark.slow
def test_a_snapshot_of_thousands_of_tainted_nodes_and_jobs_looks_at_each_kind_once(monkeypatch):
    """5,000 nodes of five taints, 2,000 jobs of four templates: the work is by kinds, not by pairs."""
    spec = read_cluster_policy(policy("fast")).spec
    nodes = {}
    for index in range(5000):
        item = node(f"n{index}", "fast", 8)
        item["spec"] = {"taints": [{"key": f"k{index % 5}", "effect": "NoSchedule"}]}
        nodes[item["metadata"]["name"]] = read_node(item)
    specs = [
        a_spec(template=template(tolerations=[{"key": f"k{k}", "operator": "Exists"} for k in range(count)]))
        for count in range(1, 5)
    ]
    jobs = [
        a_view(pods=(), plan=None, spec=specs[index % 4], key=("a", f"j{index}"), created=START)
        for index in range(2000)
    ]
    compared = []
    original = taints.tolerates

    def counted(*arguments):
        compared.append(arguments)
        return original(*arguments)

    monkeypatch.setattr(taints, "tolerates", counted)
    seen = Observed(now=START, nodes=nodes, pods=[], jobs=jobs, measurements=Measurements())
    snapshot = take_snapshot(spec, seen)
    assert len(snapshot.problem.jobs) == 2000
    assert len(set(snapshot.not_tolerated.values())) == 4
    assert len(compared) <= 5000 + 4 * 5
