"""Pools whose nodes do not exist yet: gangs are placed there, and an autoscaler makes nodes for the pods."""

import dataclasses
import datetime

import pytest
from ballast_operator.kube.kinds import NODE, POD, POLICY
from ballast_operator.kube.pinning import pinned_node
from ballast_operator.views.clock import Time, show
from ballast_operator.views.nodes import pod_gpus
from ballast_operator.views.selectors import read_requirements

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation, policy

GPU = "nvidia.com/gpu"


@dataclasses.dataclass
class Autoscaler:
    """What Karpenter and kube-scheduler do: see pods that wait, make nodes for them, bind them."""

    simulation: Simulation
    seconds: float = 30.0
    gpus: int = 2
    stock: int = 100
    karpenter: bool = False
    interleaves: bool = False
    made: int = 0
    due: list[tuple[Time, str]] = dataclasses.field(default_factory=list)

    async def tick(self) -> None:
        world, now = self.simulation.world, self.simulation.now
        for at, name in [entry for entry in self.due if entry[0] <= now]:
            self.due.remove((at, name))
            made = node(name, "spot", self.gpus)
            made["metadata"]["creationTimestamp"] = show(now)
            world.put(NODE, made)
        pods = world.items(POD)
        if self.interleaves:  # kube-scheduler takes a pod of each gang in turn
            pods = sorted(pods, key=lambda pod: pod["metadata"]["name"].rpartition("-")[2])
        waiting = [pod for pod in pods if self._waits(pod) and not self._bind(pod)]
        wanted = -(-sum(pod_gpus(pod, GPU) for pod in waiting) // self.gpus) - len(self.due)
        for _ in range(min(wanted, self.stock - self.made)):
            self.due.append((now + datetime.timedelta(seconds=self.seconds), f"new-{self.made}"))
            self.made += 1
        await self.simulation.tick()

    def _waits(self, pod) -> bool:
        content = pod["spec"]
        free = pod["status"]["phase"] == "Pending" and not content.get("nodeName")
        # Karpenter makes no node for a pod whose terms name nodes, by field or by their hostnames.
        excludes = any(
            term.get("matchFields") or "hostname" in str(term.get("matchExpressions"))
            for term in self._terms(pod)
        )
        supported = not (self.karpenter and excludes)
        return free and supported and content.get("nodeSelector") == {"pool": "spot"}

    @staticmethod
    def _terms(pod) -> list[dict]:
        affinity = (pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}
        required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
        return required.get("nodeSelectorTerms") or []

    def _bind(self, pod) -> bool:
        world = self.simulation.world
        for found in world.items(NODE):
            name, labels = found["metadata"]["name"], found["metadata"]["labels"]
            allowed = read_requirements(pod).allow(name, labels)
            if labels["pool"] != "spot" or found["spec"].get("taints") or not allowed:
                continue
            used = sum(
                pod_gpus(other, GPU)
                for other in world.items(POD)
                if pinned_node(other) == name and other["status"]["phase"] in ("Pending", "Running")
            )
            if used + pod_gpus(pod, GPU) <= int(found["status"]["allocatable"][GPU]):
                metadata = pod["metadata"]
                number = int(metadata["uid"].split("-")[1])
                status = {"phase": "Running", "podIP": f"127.2.{number // 250}.{number % 250}"}
                patch = {"spec": {"nodeName": name}, "status": status}
                world.patch(POD, metadata["namespace"], metadata["name"], patch)
                return True
        return False

    async def until(self, reached, ticks: int = 200) -> None:
        for _ in range(ticks):
            if reached():
                return
            await self.tick()
        raise AssertionError(f"not reached; {self.simulation.all_statuses()}")


def cluster(nodes=None, *, most=2, gpus=2, seconds=60.0, pools=("spot",), **autoscaler):
    simulation = Simulation(nodes=nodes or {})
    body = policy(*pools)
    spot = next(pool for pool in body["spec"]["nodePools"] if pool["name"] == "spot")
    spot |= {"maxNodes": most, "gpusPerNode": gpus, "startSeconds": seconds, "pricePerGpuHour": 1.0}
    simulation.world.put(POLICY, body)
    return simulation, Autoscaler(simulation, gpus=gpus, **autoscaler)


async def test_a_gang_starts_on_nodes_that_did_not_exist_when_it_was_made():
    """Its pods wait, unpinned, with the pool's labels; once they run the status has the real nodes."""
    simulation, autoscaler = cluster()
    simulation.add_job("a", stages=(4, 4), totalSteps=100_000, trainer={"total": 100_000})
    await autoscaler.until(lambda: simulation.status("a").allocation is not None)
    assert set(simulation.status("a").allocation.nodes) == {"spot/new-0", "spot/new-1"}
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert set(simulation.status("a").allocation.nodes) == {"new-0", "new-1"}
    assert (simulation.status("a").launches, simulation.status("a").restarts) == (1, {})
    assert autoscaler.made == 2
    waited = simulation.status("a").pool_costs
    assert sum(entry.gpu_seconds for entry in waited) < 4 * 10  # nothing is paid for nodes that do not exist


async def test_after_the_job_nothing_of_ours_keeps_the_nodes():
    """Its pods have ended: an autoscaler may remove the nodes, and the next job makes them come again."""
    simulation, autoscaler = cluster()
    simulation.add_job("a", stages=(4, 4))
    await autoscaler.until(lambda: simulation.state("a") == "Succeeded")
    assert simulation.pods("a") == []
    for number in range(2):
        simulation.world.drop(NODE, "", f"new-{number}")
    simulation.add_job("b", stages=(4, 4))
    await autoscaler.until(lambda: simulation.state("b") == "Succeeded")
    assert autoscaler.made == 4


async def test_nodes_that_exist_come_first():
    """A node costs money and minutes: none is asked for while there is room."""
    simulation, autoscaler = cluster({"old": ("spot", 2)}, most=3)
    simulation.add_job("a")
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert simulation.status("a").allocation.nodes == ("old", "old")
    assert autoscaler.made == 0


@pytest.mark.parametrize("karpenter", [True, False])
async def test_a_second_gang_gets_nodes_of_its_own_beside_those_of_the_first(karpenter):
    """It is kept off them by name, but not where Karpenter makes them: that passes over such pods."""
    simulation, autoscaler = cluster(karpenter=karpenter)
    old = node("old", "spot", 2)
    old["metadata"]["creationTimestamp"] = show(simulation.now)
    if karpenter:
        old["metadata"]["labels"]["karpenter.sh/nodepool"] = "spot"
    simulation.world.put(NODE, old)
    simulation.add_job("b", totalSteps=100_000, trainer={"total": 100_000})
    await autoscaler.until(lambda: simulation.state("b") == "Running")
    simulation.add_job("a", totalSteps=100_000, trainer={"total": 100_000})
    await autoscaler.until(lambda: simulation.pods("a"))
    allowed = {read_requirements(pod).allow("old", {"pool": "spot"}) for pod in simulation.pods("a")}
    assert allowed == {karpenter}
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert simulation.status("a").allocation.nodes == ("new-0", "new-0")


async def test_two_gangs_whose_pods_are_bound_in_turn_both_run():
    """Each has a pod on each node then: the nodes that come suffice for all, and the status has the truth."""
    simulation, autoscaler = cluster(interleaves=True)
    for name in "ab":
        simulation.add_job(name, totalSteps=100_000, trainer={"total": 100_000})
    await autoscaler.until(lambda: {simulation.state(name) for name in "ab"} == {"Running"})
    for name in "ab":
        status = simulation.status(name)
        assert sorted(status.allocation.nodes) == ["new-0", "new-1"]
        assert (status.launches, status.restarts) == (1, {})


@pytest.mark.slow
async def test_two_gangs_that_hold_half_of_a_node_each_do_not_wait_for_each_other_without_end():
    """Only one of two nodes comes: both are taken back in time, and then one has the node for itself."""
    simulation, autoscaler = cluster(interleaves=True, stock=1, seconds=60)
    for name in "ab":
        simulation.add_job(name, totalSteps=100_000, trainer={"total": 100_000})
    bound = lambda name: [pod for pod in simulation.pods(name) if pod["spec"].get("nodeName")]  # noqa: E731
    await autoscaler.until(lambda: len(bound("a")) == len(bound("b")) == 1)
    running = lambda: [name for name in "ab" if simulation.state(name) == "Running"]  # noqa: E731
    await autoscaler.until(lambda: len(running()) == 1, ticks=400)
    (one,) = running()
    assert simulation.status(one).allocation.nodes == ("new-0", "new-0")
    assert set(simulation.status(one).restarts) == {"NotBound"}


async def test_a_pool_never_has_more_nodes_than_it_may():
    """Three jobs of two GPUs, two nodes at most: the third waits, and says so."""
    simulation, autoscaler = cluster()
    for name in "abc":
        simulation.add_job(name, totalSteps=100_000, trainer={"total": 100_000})
    running = lambda: sorted(simulation.state(name) for name in "abc")  # noqa: E731
    await autoscaler.until(lambda: running() == ["Running", "Running", "Waiting"])
    for _ in range(20):
        await autoscaler.tick()
    assert autoscaler.made == 2
    assert running() == ["Running", "Running", "Waiting"]


@pytest.mark.slow
async def test_nodes_that_do_not_come_are_given_up_for_the_next_choice():
    """The cloud has none: after the time that a node takes the gang is taken back, and runs elsewhere."""
    simulation, autoscaler = cluster({"slow-0": ("slow", 2)}, pools=("spot", "slow"), stock=0, seconds=60)
    simulation.add_job(
        "a",
        throughput=[
            {"gpuType": "spot", "stages": 2, "stepsPerSecond": 9.0},
            {"gpuType": "slow", "stages": 2, "stepsPerSecond": 1.0},
        ],
        totalSteps=100_000,
        trainer={"total": 100_000},
    )
    simulation.add_job("filler", gpuTypes=["slow"], totalSteps=60, trainer={"total": 60})
    await autoscaler.until(lambda: simulation.status("a").allocation is not None)
    if simulation.status("a").allocation.pool == "spot":
        await autoscaler.until(lambda: "NotBound" in simulation.status("a").restarts, ticks=200)
        await autoscaler.until(lambda: not simulation.pods("a"), ticks=10)
    await autoscaler.until(lambda: simulation.state("a") == "Running", ticks=300)
    assert simulation.status("a").allocation.nodes == ("slow-0", "slow-0")


@pytest.mark.parametrize("stages", [(1, 4), (4, 4)])
async def test_gpus_are_asked_for_at_the_notice_and_not_after_the_loss(stages):
    """The node that goes still stands when the autoscaler sees pods that wait for another one."""
    simulation, autoscaler = cluster(seconds=60)
    trainer = {"total": 100_000, "scales": True}
    simulation.add_job("a", stages=stages, totalSteps=100_000, trainer=trainer)
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    await autoscaler.until(lambda: len(simulation.pods("a")) == 4, ticks=300)
    going = simulation.pods("a")[-1]["spec"]["nodeName"]
    taints = [{"key": "karpenter.sh/disrupted", "effect": "NoSchedule"}]
    simulation.world.patch(NODE, "", going, {"spec": {"taints": taints}})
    before = autoscaler.made
    await autoscaler.until(lambda: autoscaler.made > before, ticks=60)
    assert simulation.world.get(NODE, "", going) is not None
    await autoscaler.until(
        lambda: (
            going not in {pod["spec"].get("nodeName") for pod in simulation.pods("a")}
            and len(simulation.pods("a")) == 4
            and simulation.state("a") == "Running"
            and not simulation.status("a").allocation.joining
        ),
        ticks=200,
    )
    assert simulation.status("a").lost_steps == 0
    assert simulation.status("a").launches == (1 if stages == (1, 4) else 2)


async def test_a_node_that_has_come_for_one_gang_is_not_given_to_another():
    """Between the node and the binding of its pods there is time for a decision."""
    simulation, autoscaler = cluster(most=1)
    simulation.add_job("a", totalSteps=100_000, trainer={"total": 100_000})
    await autoscaler.until(lambda: simulation.pods("a"))
    made = node("new-0", "spot", 2)
    made["metadata"]["creationTimestamp"] = show(simulation.now)
    simulation.world.put(NODE, made)
    simulation.add_job("b", totalSteps=100_000, trainer={"total": 100_000})
    for _ in range(5):
        await simulation.tick()  # kube-scheduler is slow
    assert simulation.state("b") == "Waiting"
    autoscaler.made = 1
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert simulation.status("a").allocation.nodes == ("new-0", "new-0")


async def test_an_operator_that_dies_while_nodes_come_makes_nothing_twice():
    """Everything is in the status: the next one waits for the same pods."""
    simulation, autoscaler = cluster()
    simulation.add_job("a", stages=(4, 4), totalSteps=100_000, trainer={"total": 100_000})
    await autoscaler.until(lambda: simulation.pods("a"))
    for _ in range(12):
        simulation.start_operator()
        for _ in range(4):
            await autoscaler.tick()
    await autoscaler.until(lambda: simulation.state("a") == "Running")
    assert (simulation.status("a").launches, autoscaler.made) == (1, 2)
