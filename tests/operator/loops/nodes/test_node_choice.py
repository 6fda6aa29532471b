"""Nodes that a template or a taint excludes, that cannot be, and on which a gang did not start."""

from typing import Any

import pytest
from ballast_operator.allocator.problem.snapshot import Observed, take_snapshot
from ballast_operator.api.read import read_cluster_policy
from ballast_operator.kube.kinds import EVENT, NODE, POD
from ballast_operator.views import node_constraints as taints
from ballast_operator.views.nodes import read_node
from ballast_policies.scheduling.measurements import Measurements

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import NAMESPACE, START, Simulation, policy, template
from tests.operator.views.builders import a_spec, a_view
from tests.support.examples import first_daily


def two_zones() -> Simulation:
    simulation = Simulation(nodes={"fast-0": ("fast", 2), "fast-1": ("fast", 2)})
    for name, zone in (("fast-0", "a"), ("fast-1", "b")):
        simulation.world.patch(NODE, "", name, {"metadata": {"labels": {"zone": zone}}})
    return simulation


def in_zone(*zones: str) -> dict[str, Any]:
    terms = [{"matchExpressions": [{"key": "zone", "operator": "In", "values": list(zones)}]}]
    required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": terms}}
    return template(affinity={"nodeAffinity": required})


async def test_a_gang_is_started_on_nodes_that_its_template_allows():
    """By nodeSelector or by affinity; a job without either takes what is left."""
    simulation = two_zones()
    simulation.add_job("one", template=template(nodeSelector={"zone": "b"}))
    simulation.add_job("two")
    await simulation.running("one", "two")
    assert (simulation.nodes("one"), simulation.nodes("two")) == ({"fast-1"}, {"fast-0"})
    simulation = two_zones()
    await simulation.run_job("one", template=in_zone("b", "c"))
    assert simulation.nodes("one") == {"fast-1"}


async def test_a_template_that_excludes_every_node_waits_and_says_so():
    """No launch; others run; a node that fits ends the wait."""
    simulation = two_zones()
    simulation.add_job("one", template=template(nodeSelector={"zone": "c"}))
    simulation.add_job("two", totalSteps=20)
    await simulation.until(lambda: simulation.state("two") == "Succeeded")
    status = simulation.status("one")
    admitted = status.condition("Admitted")
    assert (admitted.reason, status.launches) == ("ExceedsCapacity", 0)
    assert "2 nodes of pool fast are excluded by the template's" in admitted.message
    other = node("fast-2", "fast", 2)
    other["metadata"]["labels"]["zone"] = "c"
    simulation.world.put(NODE, other)
    await simulation.running("one")
    assert simulation.nodes("one") == {"fast-2"}


async def test_a_job_waits_for_the_nodes_that_it_may_use_although_others_are_free():
    """Its share of the pool is not spent on nodes where its pods could never run."""
    simulation = two_zones()
    await simulation.run_job("one", template=in_zone("b"))
    simulation.add_job("two", template=in_zone("b"), totalSteps=20)
    await simulation.ticks(5)
    assert simulation.status("two").launches == 0
    await simulation.until(lambda: simulation.state("two") == "Succeeded", ticks=400)


def asking(**requests: str) -> dict[str, Any]:
    container = {"name": "trainer", "image": "trainer:1", "resources": {"requests": requests}}
    return {"spec": {"containers": [container]}}


def with_cpus(name: str, gpus: int, cpus: str) -> dict[str, Any]:
    found = node(name, "fast", gpus)
    found["status"]["allocatable"] |= {"cpu": cpus, "memory": "64Gi", "pods": "110"}
    return found


async def test_gpus_of_nodes_without_the_cpus_for_a_jobs_pods_are_left_to_others():
    """No GPUs are held for pods that cannot run: the job says what each pod asks and what is left."""
    simulation = Simulation(nodes={"small": ("fast", 2), "large": ("fast", 2)})
    simulation.world.put(NODE, with_cpus("small", 2, "2"))
    simulation.world.put(NODE, with_cpus("large", 2, "7500m"))
    simulation.add_job("one", template=asking(cpu="4"))
    await simulation.run_job("two", template=asking(cpu="1", memory="1Gi"))
    no_room = "2 nodes of pool fast have no room for 2 of its pods: on large cpu 4 each, 7.5 left"
    to_fix = "To fix: lower the requests of spec.template, or"
    await simulation.refused("one", "ExceedsCapacity", no_room, to_fix)
    assert simulation.status("one").launches == 0
    simulation.world.put(NODE, with_cpus("large", 2, "8"))
    await simulation.running("one")
    assert simulation.nodes("one") == {"large"}


@pytest.mark.parametrize(
    ("excluding", "said"),
    [
        (template(nodeSelector={"zone": "c"}), "2 nodes of pool fast are excluded by the template's"),
        (asking(cpu="4"), "2 nodes of pool fast have no room for 2 of its pods"),
    ],
    ids=["nodeSelector", "requests"],
)
async def test_free_gpus_that_no_template_allows_are_called_so(excluding, said):
    """In the ClusterPolicy, whose pools have GPUs; in the job, which names each node once."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2), "fast-1": ("fast", 2)})
    for name in ("fast-0", "fast-1"):
        simulation.world.put(NODE, with_cpus(name, 2, "2"))
    simulation.add_job("one", template=excluding)
    simulation.add_job("two", template=template(nodeSelector={"zone": "d"}))
    await simulation.refused("one", "ExceedsCapacity", said)
    assert simulation.status("one").condition("Admitted").message.count("of pool fast") == 1
    solved = simulation.policy_condition("Solved")
    assert solved["reason"] == "NoCapacity"
    assert "a GPU that a job may use: no job's template allows fast-0, fast-1" in solved["message"]


async def test_what_pods_of_others_ask_for_is_no_room_for_a_job():
    """Their requests count while they live; a resource that a node does not name is none."""
    simulation = Simulation(nodes={"n": ("fast", 2)})
    simulation.world.put(NODE, with_cpus("n", 2, "8"))
    daemon = {
        "metadata": {"name": "daemon", "namespace": "kube-system", "uid": "daemon"},
        "spec": {"nodeName": "n", "containers": [{"resources": {"requests": {"cpu": "500m"}}}]},
        "status": {"phase": "Running"},
    }
    simulation.world.put(POD, daemon)
    simulation.add_job("one", template=asking(cpu="4"))
    simulation.add_job("two", template=asking(**{"rdma/hca": "1"}))
    await simulation.refused("one", "ExceedsCapacity", "cpu 4 each, 7.5 left")
    await simulation.refused("two", "ExceedsCapacity", "rdma/hca 1 each, 0 left")
    simulation.world.patch(POD, "kube-system", "daemon", {"status": {"phase": "Succeeded"}})
    await simulation.running("one")


@pytest.mark.slow
async def test_nodes_with_shared_gpus_take_no_gang_and_the_job_says_why():
    """Four replicas of one GPU are no four GPUs; a gang that runs there stays when the labels come."""
    simulation = Simulation(nodes={"whole": ("fast", 2), "sliced": ("fast", 4)}, roundSeconds=30)
    await simulation.run_job("one", totalSteps=100_000)
    assert simulation.nodes("one") == {"whole"}
    sliced = node("sliced", "fast", 4)
    shared = {"nvidia.com/gpu.replicas": "4", "nvidia.com/gpu.sharing-strategy": "time-slicing"}
    sliced["metadata"]["labels"] |= shared
    simulation.world.put(NODE, sliced)
    simulation.add_job("two", totalSteps=20)
    await simulation.until(lambda: simulation.condition("two", "Admitted") is not None)
    simulation.add_job("four", stages=(4, 4), totalSteps=20)
    why = "its GPUs are shared by time-slicing, 4 replicas of each, and ranks need whole GPUs"
    await simulation.refused("four", "ExceedsCapacity", f"1 node of pool fast: {why}")
    assert (simulation.status("two").launches, simulation.status("four").launches) == (0, 0)
    whole = node("whole", "fast", 2)
    whole["metadata"]["labels"] |= shared
    simulation.world.put(NODE, whole)
    await simulation.ticks(70)
    status = simulation.status("one")
    assert (simulation.state("one"), status.launches) == ("Running", 1)


class BrokenNode:
    """Pods on the node never run."""

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation, self.name = simulation, name

    def act(self, world: Any, now: Any) -> None:
        for pod in world.items(POD):
            if (pod.get("spec") or {}).get("nodeName") == self.name and pod["status"]["phase"] == "Running":
                world.patch(POD, NAMESPACE, pod["metadata"]["name"], {"status": {"phase": "Pending"}})


@pytest.mark.slow
async def test_a_node_on_which_a_gang_did_not_start_is_avoided():
    """The restart is counted as NotBound; the next launch is on the other node, after a pause."""
    simulation = two_zones()
    simulation.add_job("one")
    await simulation.until(lambda: simulation.status("one").allocation is not None)
    (first,) = set(simulation.status("one").allocation.nodes)
    simulation.trainers["broken"] = BrokenNode(simulation, first)
    await simulation.until(lambda: simulation.status("one").launches == 2, ticks=200)
    status = simulation.status("one")
    assert dict(status.restarts) == {"NotBound": 1}
    assert set(status.allocation.nodes) == {"fast-0", "fast-1"} - {first}
    await simulation.until(lambda: simulation.state("one") == "Succeeded")


class PullingNode(BrokenNode):
    """Pulls an image: kubelet says so in an Event, and of the pod nothing but that it is made."""

    def act(self, world: Any, now: Any) -> None:
        super().act(world, now)
        for pod in world.items(POD):
            name, uid = pod["metadata"]["name"], pod["metadata"]["uid"]
            if pod["status"]["phase"] == "Pending" and not world.get(EVENT, NAMESPACE, f"{name}.pulling"):
                waiting = {"name": "trainer", "state": {"waiting": {"reason": "ContainerCreating"}}}
                world.patch(POD, NAMESPACE, name, {"status": {"containerStatuses": [waiting]}})
                event = {"involvedObject": {"kind": "Pod", "uid": uid}, "reason": "Pulling"}
                metadata = {"namespace": NAMESPACE, "name": f"{name}.pulling"}
                world.put(EVENT, {"apiVersion": "v1", "kind": "Event", "metadata": metadata, **event})


@pytest.mark.slow
async def test_a_pull_slower_than_the_limit_of_a_launch_keeps_it():
    """Kubelet tells of a pull in an Event alone; the launch waits until its end, on the same nodes."""
    simulation = two_zones()
    simulation.add_job("one")
    await simulation.until(lambda: simulation.status("one").allocation is not None)
    (first,) = set(simulation.status("one").allocation.nodes)
    simulation.trainers["pulling"] = PullingNode(simulation, first)
    await simulation.ticks(60, seconds=5.0)
    status = simulation.status("one")
    assert (status.launches, set(status.allocation.nodes), status.allocation.ending) == (1, {first}, None)
    assert "PullingImage" in status.condition("Running").message
    del simulation.trainers["pulling"]
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=400)
    assert not simulation.status("one").restarts


@pytest.mark.slow
async def test_nodes_that_a_job_avoids_are_better_than_none():
    """Where there is no other node it is tried again, with pauses that grow."""
    simulation = Simulation(nodes={"fast-0": ("fast", 2)})
    simulation.add_job("one")
    simulation.trainers["broken"] = BrokenNode(simulation, "fast-0")
    await simulation.ticks(140, seconds=5.0)
    status = simulation.status("one")
    assert 3 <= status.restarts["NotBound"] <= 6
    assert not status.is_true("Failed")
    del simulation.trainers["broken"]
    await simulation.until(lambda: simulation.state("one") == "Succeeded", ticks=200)


@pytest.mark.parametrize("quantity", first_daily(["9223372036854775807", "1Ki1", "1e9", "1025", "9" * 30], 2))
async def test_gangs_are_started_on_the_others_and_a_job_that_waits_names_them(quantity):
    """Two of them, whose sum no integer of the solver holds: the round is decided all the same."""
    nodes = {"wrong-0": ("fast", 2), "wrong-1": ("fast", 2), "fast-0": ("fast", 2)}
    simulation = Simulation(nodes=nodes)
    for name in ("wrong-0", "wrong-1"):
        simulation.world.patch(NODE, "", name, {"status": {"allocatable": {"nvidia.com/gpu": quantity}}})
    simulation.add_job("one")
    simulation.add_job("two")
    await simulation.running("one")
    assert simulation.nodes("one") == {"fast-0"}
    assert simulation.pods("two") == []
    if quantity != "1Ki1":  # no number: it counts as none, in the operator's log
        assert f"said to have {quantity} of nvidia.com/gpu" in simulation.condition("two", "Admitted").message


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
    seen = Observed(now=START, nodes=nodes, pods=[], jobs=jobs)
    snapshot = take_snapshot(spec, seen, Measurements())
    assert len(snapshot.problem.jobs) == 2000
    assert len({asks.barred for asks in snapshot.asks.values()}) == 4
    assert len(compared) <= 5000 + 4 * 5
