"""Spot machines of a local cluster, and how one is taken away: with a notice, or without."""

import dataclasses
import random
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from ballast_localcluster.cluster import LocalCluster
from ballast_localcluster.nodes.node import ProcessNode
from kubernetes import client
from live.trainer_jobs import WHERE

NOTICES = {
    "aws-node-termination-handler/spot-itn": 120.0,
    "cloud.google.com/impending-node-termination": 30.0,
}

POWER_LOSS = 0.2
"""Part of the preemptions that come without a notice."""

EVERY_STEPS = 20
"""Steps between checkpoints."""

LIMIT_SECONDS = 240.0
NODES = tuple(f"spot-{number}" for number in range(4))


def machine(name: str) -> ProcessNode:
    slowdown = {"default": 8.0}
    return ProcessNode(name=name, gpus=1, pool="spot", capacity_type="spot", slowdown=slowdown)


@dataclasses.dataclass
class Market:
    """The cluster, and what is taken from it."""

    cluster: LocalCluster
    api: Any
    random: random.Random
    taken: Counter[str] = dataclasses.field(default_factory=Counter)
    first: dict[str, int] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.core = client.CoreV1Api(self.api)
        self.custom = client.CustomObjectsApi(self.api)

    def status(self, name: str) -> dict[str, Any]:
        """The job's status."""
        found = self.custom.get_namespaced_custom_object(name=name, **WHERE).get("status") or {}
        step = (found.get("progress") or {}).get("step")
        if step is not None:
            self.first.setdefault(name, step)
        return found

    def pods_on(self, node: str) -> int:
        """Pods that run or start there."""
        pods = self.core.list_namespaced_pod("default", field_selector=f"spec.nodeName={node}").items
        return sum(pod.status.phase in ("Pending", "Running") for pod in pods)

    def wait(self, reached: Callable[[], bool], seconds: float) -> bool:
        """True if it is reached in time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if reached():
                return True
            time.sleep(0.3)
        return False

    def suspend(self, names: list[str]) -> bool:
        """Let the jobs save and hold no machines; whether they do."""
        for name in names:
            self._patch(name, {"suspend": True})
        return self.wait(
            lambda: all(self.status(n).get("state") == "Suspended" for n in names), LIMIT_SECONDS
        )

    def finish(self, names: list[str]) -> None:
        """Let the jobs end soon: a number of steps counts from the next launch on."""
        self.suspend(names)
        for name in names:
            step = (self.status(name).get("progress") or {}).get("step") or 0
            self._patch(name, {"suspend": False, "totalSteps": step + EVERY_STEPS})

    def _patch(self, name: str, spec: dict[str, Any]) -> None:
        self.custom.patch_namespaced_custom_object(name=name, body={"spec": spec}, **WHERE)

    def preempt(self) -> str:
        """Take one machine, in use if there is one; returns what happened."""
        used = [name for name in NODES if self.pods_on(name)]
        name = self.random.choice(used or NODES)
        if self.random.random() < POWER_LOSS:
            self.taken["power loss"] += 1
            self.replace(name)
            return f"{name} loses its power"
        key, seconds = self.random.choice(sorted(NOTICES.items()))
        began = time.monotonic()
        self.taken[f"notice of {seconds:g} s"] += 1
        self.core.patch_node(name, {"spec": {"taints": [{"key": key, "effect": "NoSchedule"}]}})
        left = self.wait(lambda: not self.pods_on(name), seconds - 1.0)
        text = f"{name} has {seconds:g} s: left after {time.monotonic() - began:.1f} s"
        if not left:
            self.taken["not left in time"] += 1
            text = f"{name} has {seconds:g} s: not left in time"
        if left and self.random.random() < 0.7:  # the next machine is like this one
            self.core.patch_node(name, {"spec": {"taints": []}})
        else:
            self.replace(name)
        return text

    def replace(self, name: str) -> None:
        """The machine is gone, and some time later another one has its name."""
        self.cluster.lose_node(name)
        time.sleep(self.random.uniform(1.0, 4.0))
        self.core.delete_node(name)
        self.cluster.add_node(machine(name))
