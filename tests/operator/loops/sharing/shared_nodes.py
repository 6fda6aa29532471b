"""A simulated cluster whose nodes have one GPU each, which two jobs may share."""

from typing import Any

from ballast_operator.kube.kinds import NODE

from tests.operator.loops.simulated.simulation import Simulation, throughput

PRICE = 36.0
LABELS = {"nvidia.com/gpu.replicas": "2", "nvidia.com/gpu.sharing-strategy": "time-slicing"}


def sharing_cluster(*shared: str, whole: dict[str, int] | None = None, **spec: Any) -> Simulation:
    """Nodes of the pool ``fast``, which shares, and of ``whole``, which does not: node -> GPUs."""
    nodes = dict.fromkeys(shared, ("fast", 2)) | {
        name: ("whole", gpus) for name, gpus in (whole or {}).items()
    }
    alike = {"pricePerGpuHour": PRICE, "memoryPerGpu": "32G"}
    pools = {"fast": {**alike, "sharing": {"kind": "TimeSlicing", "jobsPerGpu": 2}}}
    simulation = Simulation(nodes=nodes, pools=pools | ({"whole": alike} if whole else {}), **spec)
    for name in shared:
        simulation.world.patch(NODE, "", name, {"metadata": {"labels": LABELS}})
    return simulation


def one_job(steps: int = 100_000, **spec: Any) -> dict[str, Any]:
    """A job of one GPU that may share it, with its speed alone."""
    known = throughput(1, fast=5.0)
    fields = {"sharesGpu": "Allowed", "memoryPerGpu": "10G", "totalSteps": steps, "throughput": known, **spec}
    return {"stages": (1, 1), "trainer": {}, **fields}
