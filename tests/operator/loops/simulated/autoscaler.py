"""An autoscaler and a scheduler for pods that are not pinned to a node."""

import dataclasses
import datetime

from ballast_operator.kube.kept_fields import pinned_node
from ballast_operator.kube.kinds import NODE, POD
from ballast_operator.views.clock import Time, show
from ballast_operator.views.node_constraints import read_requirements
from ballast_operator.views.nodes import pod_gpus

from tests.operator.loops.simulated.machines import node
from tests.operator.loops.simulated.simulation import Simulation

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
    pool: str = "spot"
    made: int = 0
    due: list[tuple[Time, str]] = dataclasses.field(default_factory=list)

    async def tick(self) -> None:
        world, now = self.simulation.world, self.simulation.now
        for at, name in [entry for entry in self.due if entry[0] <= now]:
            self.due.remove((at, name))
            made = node(name, self.pool, self.gpus)
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
        return free and supported and content.get("nodeSelector") == {"pool": self.pool}

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
            if labels["pool"] != self.pool or found["spec"].get("taints") or not allowed:
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
